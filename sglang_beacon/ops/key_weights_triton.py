"""`key_weights` in two kernels: logits and the sums of their parts, then weights.

As in `sparse_decode`, without the values, which are half of what attention reads.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_beacon.ops.key_weights import Weighed
from sglang_beacon.ops.launch import upcasts
from sglang_beacon.ops.list_blocks import load_group, log_sum, store_weights, tile_logits

BLOCK_KEYS = 64
PART = 256
"""Keys of a program."""


def key_weights(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> Weighed:
    """See `ops.key_weights`; vectors must be contiguous."""
    batch, num_heads, dim = queries.shape
    kv_heads, listed = slots.shape[1:]
    group = num_heads // kv_heads
    rows, parts = batch * kv_heads, max(triton.cdiv(listed, PART), 1)
    float32 = {"dtype": torch.float32, "device": queries.device}
    sums = torch.empty((rows, parts, group), **float32)
    logits = torch.empty((rows, group, listed), **float32)
    weighed = Weighed(
        torch.empty((batch, kv_heads, listed), **float32),
        torch.empty((batch, num_heads), **float32),
    )
    lists = (counts, listed, kv_heads, *counts.stride())
    sizes = {
        "GROUP": group,
        "BLOCK_G": max(triton.next_power_of_2(group), 16),
        "BLOCK_N": BLOCK_KEYS,
        "PART": PART,
        "num_warps": 4,
    }
    _part_logits[(rows, parts)](
        queries, k_pool, slots, sums, logits, scale * math.log2(math.e),
        *queries.stride()[:2], *k_pool.stride()[:2], *slots.stride(), *lists,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
        UPCAST=upcasts(_part_logits, queries.dtype), **sizes,
    )  # fmt: skip
    _weights[(rows, parts)](sums, logits, *weighed, *lists, LN_2=math.log(2), **sizes)
    return weighed


@triton.jit
def _part_logits(
    QUERIES, K_POOL, SLOTS, SUMS, LOGITS, scale,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_sb, stride_sh, stride_sn,
    COUNTS, listed, kv_heads, stride_cb, stride_ch,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Logits of one part of a list, and the logarithm of the sum of their powers."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, head = row // kv_heads, row % kv_heads
    count = tl.load(COUNTS + request * stride_cb + head * stride_ch).to(tl.int32)
    end = tl.minimum((part + 1) * PART, count)
    g = tl.arange(0, BLOCK_G)
    query = load_group(
        QUERIES, request, head, stride_qb, stride_qh, GROUP, BLOCK_G, DIM, BLOCK_D, UPCAST
    )
    slots = SLOTS + request * stride_sb + head * stride_sh
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for begin in range(part * PART, end, BLOCK_N):
        logit, _ = tile_logits(
            query, slots, K_POOL, LOGITS, begin, end, row, head, listed, scale,
            stride_sn, stride_ks, stride_kh, GROUP, BLOCK_G, DIM, BLOCK_D, BLOCK_N, UPCAST,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(logit, 1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logit - higher[:, None]), 1)
        top = higher
    # A part past the end of the list has no sum.
    part_sum = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    at = (row * tl.num_programs(1) + part) * GROUP + g
    tl.store(SUMS + at, part_sum, mask=g < GROUP)


@triton.jit
def _weights(
    SUMS, LOGITS, WEIGHTS, LSE, COUNTS, listed, kv_heads, stride_cb, stride_ch,
    LN_2: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Weights of one part, by the sum over all of them."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    count = tl.load(COUNTS + row // kv_heads * stride_cb + row % kv_heads * stride_ch).to(tl.int32)
    g = tl.arange(0, BLOCK_G)
    lse = log_sum(SUMS, row, parts, GROUP, BLOCK_G)
    if part == 0:
        tl.store(LSE + row * GROUP + g, lse * LN_2, mask=g < GROUP)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, listed), BLOCK_N):
        store_weights(LOGITS, WEIGHTS, lse, begin, row, count, listed, GROUP, BLOCK_G, BLOCK_N)
