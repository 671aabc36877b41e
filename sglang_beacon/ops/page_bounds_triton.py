"""`page_bounds` as one kernel, a program for each KV head and stretch of its pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_PAGES = 32


def page_bounds(
    queries: torch.Tensor, low: torch.Tensor, high: torch.Tensor, pages: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `ops.page_bounds`; ``low`` and ``high`` are contiguous."""
    batch, num_heads, dim = queries.shape
    kv_heads, num_pages = low.shape[1:3]
    bounds = torch.empty((batch, num_heads, num_pages), dtype=torch.float32, device=queries.device)
    _bounds[(batch * kv_heads, triton.cdiv(num_pages, BLOCK_PAGES))](
        queries, low, high, pages, bounds, scale, num_pages, kv_heads, *queries.stride()[:2],
        pages.stride(0), GROUP=num_heads // kv_heads, BLOCK_P=BLOCK_PAGES,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return bounds


@triton.jit
def _bounds(
    QUERIES, LOW, HIGH, PAGES, BOUNDS, scale, num_pages, kv_heads, stride_qb, stride_qh,
    stride_pages, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request, head = row // kv_heads, row % kv_heads
    d = tl.arange(0, BLOCK_D)
    page = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    there = page < num_pages
    mask = there[:, None] & (d < DIM)[None, :]
    at = (row * num_pages + page)[:, None] * DIM + d[None, :]
    low = tl.load(LOW + at, mask=mask, other=0.0)
    high = tl.load(HIGH + at, mask=mask, other=0.0)
    full = page < tl.load(PAGES + request * stride_pages)
    for g in range(GROUP):
        index = head * GROUP + g
        query = QUERIES + request * stride_qb + index * stride_qh + d
        q = tl.load(query, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        bound = tl.sum(tl.maximum(q * low, q * high), 1) * scale
        target = BOUNDS + (row * GROUP + g) * num_pages + page
        tl.store(target, tl.where(full, bound, float("-inf")), mask=there)
