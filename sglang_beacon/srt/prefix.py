"""The prefix tree of a server that compresses: who owns a row's slots, and how they change hands.

The tree holds exact keys and values only, and nobody writes to a slot it owns. A request that is
compressed gives back private slots of its own, or leaves the tree altogether; the tree keeps the
prompt then, as cache that may be evicted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_memory

from sglang_beacon.core import EvictionPlan
from sglang_beacon.runtime.beacon_store import Beacons, BeaconStore
from sglang_beacon.srt import tree_eviction
from sglang_beacon.srt.server_args import config_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

NAME = "prefix-respecting"


class Move(NamedTuple):
    """Slots of an eviction: ``source`` [held] as they were, ``target`` [kept] where tokens go."""

    source: torch.Tensor
    target: torch.Tensor


class PrefixCache(UnifiedRadixCache):
    """SGLang's radix cache, for requests that may be compressed.

    Attributes
    ----------
    beacons : BeaconStore
        What finished prefills remember of their prompts.
    """

    beacons = BeaconStore(0)

    # What goes into the tree.

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Insert what the request holds exactly, up to ``up_to``; see `BasePrefixCache`."""
        state = getattr(req, "kv_policy", None)
        if state is None or not state.is_bounded:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        if state.freed:
            # `skip_radix_cache_insert` bars it already; this is the second line of defence.
            logger.error("Request %s is compressed and was to enter the prefix tree.", req.rid)
            return
        # What it said before a retraction is computed again, but nobody else will ask for it.
        exact = up_to if req.finished() else min(up_to, len(req.origin_input_ids))
        if exact == up_to or exact // self.page_size * self.page_size > req.kv.cache_protected_len:
            super().checkpoint(req, up_to=exact, **kwargs)
        self._keep_beacons(req)

    # Who shares it.

    def shares(self, reqs: Sequence[Req]) -> list[int]:
        """Tokens of the tree that each request answers for, if all holders are given.

        A stretch of ``n`` tokens that ``k`` requests hold counts ``ceil(n / k)`` for each.
        """
        nodes = tuple(req.last_node for req in reqs)
        if nodes != self._counted_nodes:
            paths = self.tree_core.collect_path_info(nodes)
            holders = Counter(node.node_id for path in paths for node in path)
            self._counted_nodes = nodes
            self._counted = [
                sum(-(-(node.path_end - node.path_start) // holders[node.node_id]) for node in path)
                for path in paths
            ]
        return self._counted

    _counted_nodes: tuple[int, ...] = ()
    _counted: Sequence[int] = ()

    # How slots change hands.

    def can_leave(self, req: Req, kept: int) -> bool:
        """Whether the pool has the new slots that leaving the tree with ``kept`` tokens takes."""
        self.unlock(req.lock)
        room = self.room()
        req.lock = self.lock(req.last_node)
        return room >= kept - self._own_target(req, kept)

    def evict_from(self, req: Req, plan: EvictionPlan) -> Move:
        """Shorten a request's row as planned; from now on it holds no exact copy."""
        move = self._leave(req, plan.kept) if plan.detach else self._shorten(req, plan)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = plan.held_after
        req.skip_radix_cache_insert = True
        return move

    def _shorten(self, req: Req, plan: EvictionPlan) -> Move:
        source = self.row(req)
        self.free_kv_row(req.kv, [(plan.held_after, plan.lengths.held)])
        return Move(source, source[plan.pinned : plan.held_after])

    def _leave(self, req: Req, kept: int) -> Move:
        kv = req.kv
        exact = not req.skip_radix_cache_insert
        if exact and self.token_to_kv_pool_allocator.available_size() >= kept:
            # There is room to let the tree have what the request said so far as well.
            req.refresh_fill_ids()
            super().checkpoint(req, up_to=kv.kv_allocated_len)
        source = self.row(req)
        own = self._own_target(req, kept)
        left_over = kv.cache_protected_len + own
        # The tree's part may be evicted from here on, and its slots given out, even as targets of
        # this very move: what moves is read before anything is written.
        self.unlock(req.lock)
        self.free_kv_row(kv, [(left_over, len(source))])
        fresh = self._allocate(kept - own)
        target = torch.cat((source[kv.cache_protected_len : left_over], fresh))
        self.req_to_token_pool.write((kv.req_pool_idx, slice(0, kept)), target.to(torch.int32))
        kv.cache_protected_len = kv.cache_inserted_len = 0
        req.lock = None
        req.last_node = self.root_node_handle(req.extra_key)
        return Move(source, target)

    def row(self, req: Req) -> torch.Tensor:
        """The slots [held] int64 of a request, in position order."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        # A copy: the next token may be written to the row's tail.
        return row[: req.kv.kv_allocated_len].to(torch.int64, copy=True)

    def _own_target(self, req: Req, kept: int) -> int:
        """Private tokens of the request, in whole pages, that can take what it keeps."""
        private = req.kv.kv_allocated_len - req.kv.cache_protected_len
        return min(kept, private // self.page_size * self.page_size)

    def room(self) -> int:
        """Slots that are free, or would be if nobody's prefixes were evicted."""
        return self.token_to_kv_pool_allocator.available_size() + self.full_evictable_size()

    def _allocate(self, count: int) -> torch.Tensor:
        allocator = self.token_to_kv_pool_allocator
        if count > allocator.available_size():
            evict_from_tree_cache(self, count)
        slots = allocator.alloc(count) if count else torch.empty(0, dtype=torch.int64)
        if slots is None:
            raise RuntimeError(f"{count} slots were counted as free and could not be had")
        return slots.to(self.device, torch.int64)

    # Beacons.

    def beacons_for(self, req: Req, at_most: int) -> Beacons | None:
        """Beacons of the cached prefix that a request matched."""
        ends = {node.node_id: node.path_end for node in self._path(req.last_node) or ()}
        return self.beacons.find(ends, self._nodes, at_most) if ends else None

    def _keep_beacons(self, req: Req) -> None:
        state = req.kv_policy
        if state.beacons is not None and not self.tree_core.is_root(req.last_node):
            self.beacons.put(req.last_node, state.beacons)
        state.beacons = None

    def _nodes(self, node: int) -> list[int] | None:
        path = self._path(node)
        return None if path is None else [step.node_id for step in path]

    def _path(self, node: int) -> Sequence[Any] | None:
        try:
            return self.tree_core.collect_path_info([node])[0]
        except KeyError:
            return None

    def _evict(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._evict(*args, **kwargs)
        if result.num_tokens_evicted:
            self.beacons.forget_missing(self._nodes)
        return result

    def reset(self) -> None:
        super().reset()
        self.beacons.clear()
        self._counted_nodes = ()


def build(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """SGLang's factory interface for tree caches."""
    if get_memory().radix_eviction_policy == tree_eviction.NAME:
        ctx.params.tree_core_backend = "python"
    cache = create_unified_radix_cache(ctx, cache_class=PrefixCache)
    cache.beacons = BeaconStore(config_of(ctx.server_args).prefix_beacons_mb * 2**20)
    return cache


def use() -> None:
    """Register the cache with SGLang and choose it, in this process.

    Not in the launcher's settings: a scheduler without the plugin would die of an unknown name,
    where the launcher knows better what to say.
    """
    if get_radix_cache_factory(NAME) is None:
        register_radix_cache_backend(NAME, build)
    get_context().override("sglang_beacon", radix_cache_backend=NAME)
