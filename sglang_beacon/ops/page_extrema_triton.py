"""`page_extrema` as one kernel, a program for each page and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def page_extrema(
    k_pool: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.page_extrema`; vectors must be contiguous."""
    batch, listed = slots.shape
    kv_heads, dim = k_pool.shape[1:]
    shape = (batch, kv_heads, triton.cdiv(listed, page), dim)
    low = torch.empty(shape, dtype=torch.float32, device=k_pool.device)
    high = torch.empty_like(low)
    _extrema[shape[:3]](
        k_pool, slots, counts, low, high, *k_pool.stride()[:2], *slots.stride(),
        counts.stride(0), PAGE=page, BLOCK_P=triton.next_power_of_2(page),
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return low, high


@triton.jit
def _extrema(
    K_POOL, SLOTS, COUNTS, LOW, HIGH, stride_slot, stride_head, stride_b, stride_n, stride_count,
    PAGE: tl.constexpr, BLOCK_P: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request, head, page = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(COUNTS + request * stride_count).to(tl.int32)
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    place = page * PAGE + p
    inside = (p < PAGE) & (place < count)
    slot = tl.load(SLOTS + request * stride_b + place * stride_n, mask=inside, other=0)
    mask = inside[:, None] & (d < DIM)[None, :]
    at = slot.to(tl.int64)[:, None] * stride_slot + head * stride_head + d[None, :]
    keys = tl.load(K_POOL + at, mask=mask, other=0.0).to(tl.float32)
    low = tl.min(tl.where(mask, keys, float("inf")), 0)
    high = tl.max(tl.where(mask, keys, float("-inf")), 0)
    some = page * PAGE < count
    row = (request * tl.num_programs(1) + head) * tl.num_programs(2) + page
    tl.store(LOW + row * DIM + d, tl.where(some, low, 0.0), mask=d < DIM)
    tl.store(HIGH + row * DIM + d, tl.where(some, high, 0.0), mask=d < DIM)
