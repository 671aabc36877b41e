"""What the kernels over lists of slots share: a row is the KV head of one request."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_group(
    QUERIES, request, head, stride_qb, stride_qh,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_G, BLOCK_D] of a KV head's group."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    query = tl.load(
        QUERIES + request * stride_qb + (head * GROUP + g)[:, None] * stride_qh + d[None, :],
        mask=(g < GROUP)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    return query.to(tl.float32) if UPCAST else query


@triton.jit
def tile_logits(
    query, slots, K_POOL, LOGITS, begin, end, row, head, listed, scale,
    stride_sn, stride_ks, stride_kh,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [BLOCK_G, BLOCK_N] of a tile, which are stored too, and its slots."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    place = begin + tl.arange(0, BLOCK_N)
    inside = place < end
    slot = tl.load(slots + place * stride_sn, mask=inside, other=0).to(tl.int64)
    key = tl.load(
        K_POOL + slot[None, :] * stride_ks + head * stride_kh + d[:, None],
        mask=inside[None, :] & (d < DIM)[:, None],
        other=0.0,
    )
    if UPCAST:
        key = key.to(tl.float32)
    logit = tl.dot(query, key, input_precision="ieee") * scale
    logit = tl.where(inside[None, :], logit, float("-inf"))
    tl.store(
        LOGITS + (row * GROUP + g)[:, None] * listed + place[None, :],
        logit,
        mask=(g < GROUP)[:, None] & inside[None, :],
    )
    return logit, slot


@triton.jit
def log_sum(SUMS, row, parts, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """Base-2 logarithm [BLOCK_G] of the parts' sums together; -inf where all are empty."""
    g = tl.arange(0, BLOCK_G)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for part in range(parts):
        at = (row * parts + part) * GROUP + g
        top = tl.maximum(top, tl.load(SUMS + at, mask=g < GROUP, other=0.0))
    # All parts are empty: any finite number does.
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_G], tl.float32)
    for part in range(parts):
        at = (row * parts + part) * GROUP + g
        total += tl.exp2(tl.load(SUMS + at, mask=g < GROUP, other=0.0) - pivot)
    return tl.where(total > 0, pivot + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def store_weights(
    LOGITS, WEIGHTS, lse, begin, row, count, listed,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The group's largest weight on each token of a tile; 0 past the end of the list."""
    g = tl.arange(0, BLOCK_G)
    place = begin + tl.arange(0, BLOCK_N)
    mask = (g < GROUP)[:, None] & (place < count)[None, :]
    logit = tl.load(
        LOGITS + (row * GROUP + g)[:, None] * listed + place[None, :], mask=mask, other=0.0
    )
    weight = tl.where(mask, tl.exp2(logit - lse[:, None]), 0.0)
    tl.store(WEIGHTS + row * listed + place, tl.max(weight, 0), mask=place < listed)
