"""`sparse_decode` in two kernels: attention over parts of a list, then the parts together.

The first keeps its logits, so that the second can say what each token weighs once the sum over all
parts is known: 4 bytes for each query head and listed token, beside the 4 D that are read for a KV
head. Logits are in base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_beacon.ops.launch import multiprocessors, upcasts
from sglang_beacon.ops.list_blocks import load_group, log_sum, store_weights, tile_logits
from sglang_beacon.ops.sparse_decode import Attended

BLOCK_KEYS = 64


def sparse_decode(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> Attended:
    """See `ops.sparse_decode`; vectors must be contiguous."""
    batch, num_heads, dim = queries.shape
    kv_heads, listed = slots.shape[1:]
    group = num_heads // kv_heads
    rows = batch * kv_heads
    # Enough programs to fill the device twice, and no part shorter than two tiles.
    parts = min(
        triton.cdiv(2 * multiprocessors(queries.device), rows),
        triton.cdiv(listed, 2 * BLOCK_KEYS),
    )
    parts = max(parts, 1)
    float32 = {"dtype": torch.float32, "device": queries.device}
    partial = torch.empty((rows, parts, group, dim), **float32)
    sums = torch.empty((rows, parts, group), **float32)
    logits = torch.empty((rows, group, listed), **float32)
    attended = Attended(
        torch.empty((batch, num_heads, dim), dtype=queries.dtype, device=queries.device),
        torch.empty((batch, num_heads), **float32),
        torch.empty((batch, kv_heads, listed), **float32),
    )
    lists = (counts, listed, kv_heads, parts, *counts.stride())
    sizes = {
        "GROUP": group,
        "BLOCK_G": max(triton.next_power_of_2(group), 16),
        "DIM": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "BLOCK_N": BLOCK_KEYS,
    }
    _attend[(rows, parts)](
        queries, k_pool, v_pool, slots, partial, sums, logits, scale * math.log2(math.e),
        *queries.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], *slots.stride(), *lists,
        UPCAST=upcasts(_attend, queries.dtype), num_warps=4, num_stages=3, **sizes,
    )  # fmt: skip
    _merge[(rows,)](
        partial, sums, logits, *attended, *lists, LN_2=math.log(2), num_warps=4, **sizes
    )
    return attended


@triton.jit
def _attend(
    QUERIES, K_POOL, V_POOL, SLOTS, PARTIAL, SUMS, LOGITS, scale,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    stride_sb, stride_sh, stride_sn,
    COUNTS, listed, kv_heads, parts, stride_cb, stride_ch,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attention over one part of a list, and the logarithm of its sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, head = row // kv_heads, row % kv_heads
    count = tl.load(COUNTS + request * stride_cb + head * stride_ch).to(tl.int32)
    length = tl.cdiv(tl.cdiv(count, parts), BLOCK_N) * BLOCK_N
    first = part * length
    end = tl.minimum(first + length, count)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    real = (g < GROUP)[:, None]
    wide = (d < DIM)[None, :]
    query = load_group(
        QUERIES, request, head, stride_qb, stride_qh, GROUP, BLOCK_G, DIM, BLOCK_D, UPCAST
    )
    slots = SLOTS + request * stride_sb + head * stride_sh
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    output = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(first, end, BLOCK_N):
        logit, slot = tile_logits(
            query, slots, K_POOL, LOGITS, begin, end, row, head, listed, scale,
            stride_sn, stride_ks, stride_kh, GROUP, BLOCK_G, DIM, BLOCK_D, BLOCK_N, UPCAST,
        )  # fmt: skip
        inside = begin + tl.arange(0, BLOCK_N) < end
        value = tl.load(
            V_POOL + slot[:, None] * stride_vs + head * stride_vh + d[None, :],
            mask=inside[:, None] & wide,
            other=0.0,
        )
        if UPCAST:
            value = value.to(tl.float32)
        higher = tl.maximum(top, tl.max(logit, 1))
        shrink = tl.exp2(top - higher)
        power = tl.exp2(logit - higher[:, None])
        total = total * shrink + tl.sum(power, 1)
        output = output * shrink[:, None]
        output += tl.dot(power.to(value.dtype), value, input_precision="ieee")
        top = higher
    at = (row * parts + part) * GROUP + g
    if first < end:
        tl.store(SUMS + at, top + tl.log2(total), mask=g < GROUP)
        tl.store(
            PARTIAL + at[:, None] * DIM + d[None, :], output / total[:, None], mask=real & wide
        )
    else:
        tl.store(SUMS + at, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=g < GROUP)


@triton.jit
def _merge(
    PARTIAL, SUMS, LOGITS, OUTPUT, LSE, WEIGHTS,
    COUNTS, listed, kv_heads, parts, stride_cb, stride_ch,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, LN_2: tl.constexpr,
):  # fmt: skip
    """Weigh the parts by their sums; then every listed token by the whole sum."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(COUNTS + row // kv_heads * stride_cb + row % kv_heads * stride_ch).to(tl.int32)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    real = (g < GROUP)[:, None]
    lse = log_sum(SUMS, row, parts, GROUP, BLOCK_G)
    output = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for part in range(parts):
        at = (row * parts + part) * GROUP + g
        part_sum = tl.load(SUMS + at, mask=g < GROUP, other=float("-inf"))
        # A part that is empty has written nothing.
        some = part_sum > float("-inf")
        share = tl.where(some, tl.exp2(part_sum - lse), 0.0)
        mask = real & (d < DIM)[None, :] & some[:, None]
        partial = tl.load(PARTIAL + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        output += share[:, None] * partial
    tl.store(
        OUTPUT + (row * GROUP + g)[:, None] * DIM + d[None, :],
        output,
        mask=real & (d < DIM)[None, :],
    )
    tl.store(LSE + row * GROUP + g, lse * LN_2, mask=g < GROUP)
    for begin in range(0, listed, BLOCK_N):
        store_weights(LOGITS, WEIGHTS, lse, begin, row, count, listed, GROUP, BLOCK_G, BLOCK_N)
