"""`beacon_score` in two kernels for all layers: softmax statistics, then scores.

Attention weights are never written: both kernels compute the logits, which costs less than moving
them. Logits are in base 2. A program has a stretch of the keys and all the queries of a KV head;
the second kernel puts the stretches' statistics together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_beacon.ops.beacon_score import AGGREGATIONS, SOFTNESS
from sglang_beacon.ops.launch import offset_table, upcasts

BLOCK_KEYS = 64
STRETCH = 512
"""Keys of a program."""


def beacon_score(
    k_pools: Sequence[torch.Tensor],
    slots: torch.Tensor,
    queries: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    aggregation: str = "max",
) -> torch.Tensor:
    """See `ops.beacon_score`; pools must be laid out alike, with contiguous vectors."""
    first = k_pools[0]
    offsets = offset_table(k_pools)
    layers, query_heads, num_queries, dim = queries.shape
    kv_heads, num_keys = first.shape[1], slots.shape[0]
    # In the keys' dtype, as the model itself multiplies them, a group's rows one after the other.
    rows = query_heads // kv_heads * num_queries
    queries = queries.to(first.dtype).reshape(layers, kv_heads, rows, dim)
    stretches = triton.cdiv(num_keys, STRETCH)
    statistics = queries.new_empty((layers, kv_heads, stretches, 2, rows), dtype=torch.float32)
    score = queries.new_empty((layers, kv_heads, num_keys), dtype=torch.float32)
    block_rows = min(max(triton.next_power_of_2(rows), 16), 128)
    sizes = {
        "DIM": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "BLOCK_R": block_rows,
        "BLOCK_N": BLOCK_KEYS,
        "STRETCH": STRETCH,
        "UPCAST": upcasts(_score, first.dtype),
        "num_warps": 8 if block_rows == 128 else 4,
    }
    arguments = (
        queries, first, offsets, slots, visible, statistics, num_keys, rows, num_queries, kv_heads,
        stretches, scale * math.log2(math.e), *first.stride()[:2],
    )  # fmt: skip
    grid = (layers * kv_heads, stretches)
    _statistics[(*grid, triton.cdiv(rows, block_rows))](*arguments, **sizes)
    _score[grid](*arguments, score, SOFTNESS, AGGREGATION=AGGREGATIONS.index(aggregation), **sizes)
    return score


@triton.jit
def _statistics(
    QUERIES, POOLS, OFFSETS, SLOTS, VISIBLE, STATISTICS, num_keys, rows, num_queries, kv_heads,
    stretches, scale, stride_slot, stride_head,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Largest logit of each row in a stretch, and the sum of the powers relative to it."""
    head, stretch, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys = POOLS + tl.multiple_of(tl.load(OFFSETS + head // kv_heads), 16)
    keys += head % kv_heads * stride_head
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    query, limit = _queries(
        QUERIES + head * rows * DIM, VISIBLE, r, rows, num_queries, DIM, BLOCK_D, UPCAST
    )
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    end = tl.minimum((stretch + 1) * STRETCH, num_keys)
    for begin in range(stretch * STRETCH, end, BLOCK_N):
        logits = _logits(
            query, limit, keys, SLOTS, begin, end, stride_slot, scale,
            DIM, BLOCK_D, BLOCK_N, UPCAST,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(logits, 1))
        # Nothing visible yet: any finite number does.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - pivot) + tl.sum(tl.exp2(logits - pivot[:, None]), 1)
        top = higher
    statistics = STATISTICS + (head * stretches + stretch) * 2 * rows + r
    tl.store(statistics, top, mask=r < rows)
    tl.store(statistics + rows, total, mask=r < rows)


@triton.jit
def _score(
    QUERIES, POOLS, OFFSETS, SLOTS, VISIBLE, STATISTICS, num_keys, rows, num_queries, kv_heads,
    stretches, scale, stride_slot, stride_head, SCORE, softness,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, UPCAST: tl.constexpr, AGGREGATION: tl.constexpr,
):  # fmt: skip
    """Weights of a stretch's keys, aggregated over all rows."""
    head, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = POOLS + tl.multiple_of(tl.load(OFFSETS + head // kv_heads), 16)
    keys += head % kv_heads * stride_head
    end = tl.minimum((stretch + 1) * STRETCH, num_keys)
    for first_row in range(0, rows, BLOCK_R):
        r = first_row + tl.arange(0, BLOCK_R)
        query, limit = _queries(
            QUERIES + head * rows * DIM, VISIBLE, r, rows, num_queries, DIM, BLOCK_D, UPCAST
        )
        log_sum = _log_sum(STATISTICS + head * stretches * 2 * rows, r, rows, stretches, BLOCK_R)
        for begin in range(stretch * STRETCH, end, BLOCK_N):
            logits = _logits(
                query, limit, keys, SLOTS, begin, end, stride_slot, scale,
                DIM, BLOCK_D, BLOCK_N, UPCAST,
            )  # fmt: skip
            weights = tl.exp2(logits - log_sum[:, None])
            if AGGREGATION == 0:
                new = tl.max(weights, 0)
            elif AGGREGATION == 1:
                new = tl.sum(weights, 0) / rows
            else:
                powers = tl.where((r < rows)[:, None], tl.exp(weights / softness), 0.0)
                new = tl.sum(powers, 0)
            place = begin + tl.arange(0, BLOCK_N)
            score = SCORE + head * num_keys + place
            # The rows' blocks before this one were this program's too.
            if first_row > 0:
                before = tl.load(score, mask=place < end, other=0.0)
                new = tl.maximum(before, new) if AGGREGATION == 0 else before + new
            if AGGREGATION == 2 and first_row + BLOCK_R >= rows:
                new = softness * tl.log(new)
            tl.store(score, new, mask=place < end)
        tl.debug_barrier()


@triton.jit
def _queries(
    queries, VISIBLE, r, rows, num_queries,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows [BLOCK_R, BLOCK_D] of a KV head's queries, and how many keys each may see."""
    d = tl.arange(0, BLOCK_D)
    inside = (r < rows)[:, None] & (d < DIM)[None, :]
    query = tl.load(queries + r[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    limit = tl.load(VISIBLE + r % num_queries, mask=r < rows, other=0)
    return query.to(tl.float32) if UPCAST else query, limit


@triton.jit
def _logits(
    query, limit, keys, SLOTS, begin, end, stride_slot, scale,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Logits [BLOCK_R, BLOCK_N] from the key at ``begin``; -inf where a key may not be seen."""
    place = begin + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(SLOTS + place, mask=place < end, other=0)
    inside = (place < end)[None, :] & (d < DIM)[:, None]
    key = tl.load(keys + slot[None, :] * stride_slot + d[:, None], mask=inside, other=0.0)
    if UPCAST:
        key = key.to(tl.float32)
    logits = tl.dot(query, key, input_precision="ieee") * scale
    seen = (place < end)[None, :] & (place[None, :] < limit[:, None])
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def _log_sum(statistics, r, rows, stretches, BLOCK_R: tl.constexpr):
    """Base-2 logarithm of each row's whole sum; 0 for rows that are not there."""
    inside = r < rows
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for stretch in range(stretches):
        at = statistics + stretch * 2 * rows + r
        top = tl.maximum(top, tl.load(at, mask=inside, other=0.0))
    total = tl.zeros([BLOCK_R], tl.float32)
    for stretch in range(stretches):
        at = statistics + stretch * 2 * rows + r
        part = tl.exp2(tl.load(at, mask=inside, other=0.0) - top)
        total += part * tl.load(at + rows, mask=inside, other=1.0 / stretches)
    return top + tl.log2(total)
