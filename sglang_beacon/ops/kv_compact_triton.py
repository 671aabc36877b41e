"""`kv_compact` as one kernel for all layers, a program for each pool and head.

Tokens that only move towards the front need no second copy: a program takes a tile of them into
registers, waits until all its threads have theirs, and writes. Whatever a later tile reads lies
behind everything written by then, since both lists ascend. Tokens that move otherwise pass through
a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_beacon.ops.launch import offset_table

# What may lie outside the pools at a time.
BUFFER_BYTES = 64 * 2**20


def kv_compact(
    k_pools: Sequence[torch.Tensor],
    v_pools: Sequence[torch.Tensor],
    source: torch.Tensor,
    keep: torch.Tensor,
    destination: torch.Tensor,
    forward: bool = False,
) -> None:
    """See `ops.kv_compact`; pools must be laid out alike, with contiguous vectors."""
    first = k_pools[0]
    offsets = offset_table((*k_pools, *v_pools))
    layers, heads, kept = keep.shape
    keep = keep.contiguous()
    dim = first.shape[2]
    shape = {"DIM": dim, "BLOCK_D": triton.next_power_of_2(dim), "BLOCK": 32, "num_warps": 4}
    if forward:
        _move_forward[(2 * layers, heads)](
            first, offsets, source, keep, destination, layers, kept, *first.stride()[:2], **shape
        )
        return
    at_once = max(BUFFER_BYTES // (heads * kept * dim * first.element_size()), 1)
    buffer = first.new_empty((min(at_once, 2 * layers), heads, kept, dim))
    for begin in range(0, 2 * layers, at_once):
        grid = (min(at_once, 2 * layers - begin), heads, triton.cdiv(kept, shape["BLOCK"]))
        for gather in (True, False):
            _through_buffer[grid](
                first, offsets, buffer, source, keep, destination, begin, layers, kept,
                *first.stride()[:2], *buffer.stride()[:2], GATHER=gather, **shape,
            )  # fmt: skip


@triton.jit
def _move_forward(
    POOLS, OFFSETS, SOURCE, KEEP, DESTINATION, layers, kept, stride_slot, stride_head,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pool, head = tl.program_id(0), tl.program_id(1)
    base = POOLS + tl.multiple_of(tl.load(OFFSETS + pool), 16) + head * stride_head
    keep = KEEP + ((pool % layers) * tl.num_programs(1) + head).to(tl.int64) * kept
    d = tl.arange(0, BLOCK_D)
    for begin in range(0, kept, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < kept
        mask = inside[:, None] & (d < DIM)[None, :]
        from_slot = tl.load(SOURCE + tl.load(keep + place, mask=inside, other=0))
        to_slot = tl.load(DESTINATION + place, mask=inside, other=0)
        vectors = tl.load(base + from_slot[:, None] * stride_slot + d[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(base + to_slot[:, None] * stride_slot + d[None, :], vectors, mask=mask)
        tl.debug_barrier()


@triton.jit
def _through_buffer(
    POOLS, OFFSETS, BUFFER, SOURCE, KEEP, DESTINATION, begin, layers, kept,
    stride_slot, stride_head, stride_pool, stride_row,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """A tile of the kept tokens into the buffer, or out of it to its destination."""
    pool, head = begin + tl.program_id(0), tl.program_id(1)
    base = POOLS + tl.multiple_of(tl.load(OFFSETS + pool), 16) + head * stride_head
    buffer = BUFFER + tl.program_id(0).to(tl.int64) * stride_pool + head.to(tl.int64) * stride_row
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    inside = place < kept
    mask = inside[:, None] & (d < DIM)[None, :]
    buffered = buffer + place[:, None] * DIM + d[None, :]
    if GATHER:
        keep = KEEP + ((pool % layers) * tl.num_programs(1) + head).to(tl.int64) * kept
        slot = tl.load(SOURCE + tl.load(keep + place, mask=inside, other=0))
        pooled = base + slot[:, None] * stride_slot + d[None, :]
        tl.store(buffered, tl.load(pooled, mask=mask), mask=mask)
    else:
        slot = tl.load(DESTINATION + place, mask=inside, other=0)
        pooled = base + slot[:, None] * stride_slot + d[None, :]
        tl.store(pooled, tl.load(buffered, mask=mask), mask=mask)
