"""The order in which SGLang's prefix tree evicts under ``shared-prefix``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_beacon.srt import tree_eviction


@pytest.fixture(scope="module")
def strategy():
    """As SGLang builds it from the flag."""
    from sglang.srt.mem_cache.utils import get_eviction_strategy

    tree_eviction.register()
    return get_eviction_strategy(tree_eviction.NAME)


def node(parent, *, hits: int, used: float, length: int) -> SimpleNamespace:
    return SimpleNamespace(parent=parent, hit_count=hits, last_access_time=used, key=[0] * length)


@pytest.fixture
def root() -> SimpleNamespace:
    return node(None, hits=0, used=100.0, length=0)


def order(strategy, **nodes: SimpleNamespace) -> list[str]:
    return sorted(nodes, key=lambda name: strategy.get_priority(nodes[name]))


@pytest.mark.parametrize("hits", [4, 16])
def test_a_shared_prefix_outlives_a_longer_one_used_once(strategy, root, hits: int) -> None:
    """Until it has been idle four times as long, however many shared it."""
    shared = node(root, hits=hits, used=61.0, length=50)
    once = node(root, hits=1, used=90.0, length=500)
    assert order(strategy, shared=shared, once=once) == ["once", "shared"]
    fresh = node(root, hits=1, used=92.0, length=500)
    assert order(strategy, shared=shared, fresh=fresh) == ["shared", "fresh"]


def test_of_equals_the_one_used_last_and_the_shortest_stay(strategy, root) -> None:
    old = node(root, hits=2, used=10.0, length=5)
    new = node(root, hits=2, used=90.0, length=5)
    long = node(root, hits=2, used=90.0, length=50)
    assert order(strategy, old=old, new=new, long=long) == ["old", "long", "new"]


def test_the_command_line_knows_it() -> None:
    from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES

    tree_eviction.register()
    tree_eviction.register()
    assert RADIX_EVICTION_POLICY_CHOICES.count(tree_eviction.NAME) == 1
