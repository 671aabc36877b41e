"""`select_topk` as one kernel: a bitwise search for the threshold, a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def select_topk(scores: torch.Tensor, count: int) -> torch.Tensor:
    """See `ops.select_topk`."""
    *lead, num_keys = scores.shape
    rows = scores.float().reshape(-1, num_keys).contiguous()
    chosen = torch.empty((len(rows), count), dtype=torch.int64, device=scores.device)
    if count:
        _select[(len(rows),)](
            rows,
            chosen,
            num_keys,
            count,
            BLOCK=min(triton.next_power_of_2(num_keys), 2048),
            num_warps=4,
        )
    return chosen.view(*lead, count)


@triton.jit
def _select(SCORES, CHOSEN, num_keys, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scores = SCORES + row * num_keys
    chosen = CHOSEN + row * count

    # The largest threshold that at least `count` keys reach, bit by bit. The row stays in the L1
    # cache, so reading it 33 times costs little.
    threshold = tl.full([], -2147483648, tl.int64)
    for bit in range(32):
        candidate = threshold + (tl.full([], 1, tl.int64) << (31 - bit))
        reached = 0
        for begin in range(0, num_keys, BLOCK):
            key = _ordered(scores, begin, num_keys, BLOCK)
            reached += tl.sum((key >= candidate.to(tl.int32)).to(tl.int32))
        threshold = tl.where(reached >= count, candidate, threshold)
    threshold = threshold.to(tl.int32)

    above = 0
    for begin in range(0, num_keys, BLOCK):
        above += tl.sum((_ordered(scores, begin, num_keys, BLOCK) > threshold).to(tl.int32))

    # All above it, and the first of those that are equal to it, in order.
    wanted = count - above
    equals = 0
    written = 0
    for begin in range(0, num_keys, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = _ordered(scores, begin, num_keys, BLOCK)
        equal = (key == threshold).to(tl.int32)
        taken = (key > threshold) | ((equal != 0) & (equals + tl.cumsum(equal, 0) <= wanted))
        rank = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + rank, place.to(tl.int64), mask=taken)
        equals += tl.sum(equal)
        written += tl.sum(taken.to(tl.int32))


@triton.jit
def _ordered(scores, begin, num_keys, BLOCK: tl.constexpr):
    """Scores as integers of the same order, and the lowest integer past the end."""
    place = begin + tl.arange(0, BLOCK)
    inside = place < num_keys
    score = tl.load(scores + place, mask=inside, other=0.0)
    # Both zeros are one number, though not one pattern of bits.
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(inside, ordered, -2147483648)
