"""Compaction of a request's KV: each layer and head moves its own kept tokens to shared slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kv_compact(
    k_pools: Sequence[torch.Tensor],
    v_pools: Sequence[torch.Tensor],
    source: torch.Tensor,
    keep: torch.Tensor,
    destination: torch.Tensor,
    forward: bool = False,
) -> None:
    """Move the kept tokens of every layer and head into the destination slots, in place.

    After the call, head h of slot ``destination[i]`` of layer l holds what head h of slot
    ``source[keep[l, h, i]]`` held before. Source and destination may overlap: every source is read
    before it is overwritten.

    Parameters
    ----------
    k_pools, v_pools : sequence of Tensor [num_slots, H_kv, D]
        One for each layer, modified.
    source : Tensor [N] int64
        Slots of the tokens to choose from.
    keep : Tensor [layers, H_kv, K] int64
        Indices into ``source``, ascending per head.
    destination : Tensor [K] int64
        Distinct slots that only this request uses.
    forward : bool
        Promises that tokens only move towards the front: ``destination[i]`` is ``source[j]`` with
        ``j <= keep[l, h, i]``. A kernel then needs no memory besides the pools.
    """
    heads = torch.arange(keep.shape[1], device=keep.device)
    for k_pool, v_pool, kept in zip(k_pools, v_pools, keep, strict=True):
        slots = source[kept].T
        for pool in (k_pool, v_pool):
            pool[destination] = pool[slots, heads]
