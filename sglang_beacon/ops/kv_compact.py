"""Compaction of one layer's KV: each head moves its own kept tokens into shared slots."""

from __future__ import annotations

import torch


def kv_compact(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    source: torch.Tensor,
    keep: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    """Move the kept tokens of every head into the destination slots, in place.

    After the call, head h of slot ``destination[i]`` holds what head h of slot
    ``source[keep[h, i]]`` held before. Source and destination may overlap: every source is read
    before any destination is written.

    Parameters
    ----------
    k_pool, v_pool : Tensor [num_slots, H_kv, D]
        The layer's pools, modified.
    source : Tensor [N] int64
        Slots of the tokens to choose from.
    keep : Tensor [H_kv, K] int64
        Indices into ``source``, ascending per head.
    destination : Tensor [K] int64
        Distinct slots that only this request uses.
    """
    heads = torch.arange(keep.shape[0], device=keep.device)
    slots = source[keep].T
    for pool in (k_pool, v_pool):
        pool[destination] = pool[slots, heads]
