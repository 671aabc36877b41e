"""Which cached prefix goes first when memory is short: ``--radix-eviction-policy shared-prefix``.

A node of the prefix tree is worth what it will save, and what it saved tells: `hit_count` is how
many distinct requests came through it, so a node with many branches has a high one even after the
branches are gone. Interest wears off with time. So a leaf's worth is ``hit_count / age``, with the
age counted in matches and inserts since it was last used (hyperbolic caching, Blankstein et al.,
ATC 2017); the least goes first, and of equals the longest. Per slot, a long prefix is worth as
much as a short one: it saves more and takes more.

SGLang's count never falls, so it is capped, as small counters are in CLOCK and S3-FIFO: a prefix
that many requests shared outlives one that was used once until it has been idle `ENOUGH` times as
long. Without the cap, yesterday's popular prefixes would crowd out today's.

SGLang's Rust tree knows its own strategies only; with this one the Python tree is used.
"""

from __future__ import annotations

from typing import Any

NAME = "shared-prefix"
ENOUGH = 4
"""Requests after which more of them tell nothing new."""


class SharedPrefixStrategy:
    """An eviction strategy of SGLang's prefix tree: the lowest priority is evicted first."""

    def get_priority(self, node: Any) -> tuple[float, int]:
        root = node
        while root.parent is not None:
            root = root.parent
        # Every match and insert passes the root, so its clock is the tree's.
        age = max(root.last_access_time - node.last_access_time, 0) + 1
        return min(node.hit_count, ENOUGH) / age, -len(node.key)


def register() -> None:
    """Make the strategy known to SGLang, on the command line and in the tree."""
    from sglang.srt.arg_groups.choices import (
        RADIX_EVICTION_POLICY_CHOICES,
        add_radix_eviction_policy_choices,
    )
    from sglang.srt.mem_cache import utils

    if NAME not in RADIX_EVICTION_POLICY_CHOICES:
        add_radix_eviction_policy_choices([NAME])
    utils._EVICTION_POLICY_FACTORIES[NAME] = SharedPrefixStrategy
