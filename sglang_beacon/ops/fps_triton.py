"""`farthest_point_sample` as one kernel, a program for each head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def farthest_point_sample(points: torch.Tensor, count: int) -> torch.Tensor:
    """See `ops.fps`; the last dimension must be contiguous."""
    *lead, num_points, dim = points.shape
    if num_points <= count:
        index = torch.arange(num_points, device=points.device)
        return index.expand(*lead, num_points)
    if count == 0:
        return torch.empty((*lead, 0), dtype=torch.int64, device=points.device)
    if len(lead) > 2 or points.stride(-1) != 1:
        points = points.reshape(1, -1, num_points, dim)
    while points.dim() < 4:
        points = points.unsqueeze(0)
    outer, inner = points.shape[:2]
    chosen = torch.empty((*lead, count), dtype=torch.int64, device=points.device)
    nearest = torch.empty((outer * inner, num_points), dtype=torch.float32, device=points.device)
    block_d = triton.next_power_of_2(dim)
    _fps[(outer * inner,)](
        points,
        chosen,
        nearest,
        num_points,
        inner,
        *points.stride()[:3],
        COUNT=count,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_M=min(triton.next_power_of_2(num_points), max(4096 // block_d, 16)),
        num_warps=4,
    )
    return chosen


@triton.jit
def _fps(
    X, CHOSEN, NEAREST, num_points, inner, stride_outer, stride_inner, stride_point,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    x = X + head // inner * stride_outer + head % inner * stride_inner
    nearest = NEAREST + head * num_points
    chosen = CHOSEN + head * COUNT

    total = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, num_points, BLOCK_M):
        total += tl.sum(_unit(x, begin, num_points, stride_point, DIM, BLOCK_D, BLOCK_M), 0)

    # The least similar to the others, on the whole; then, again and again, to those chosen.
    best = float("inf")
    newest = 0
    for begin in range(0, num_points, BLOCK_M):
        unit = _unit(x, begin, num_points, stride_point, DIM, BLOCK_D, BLOCK_M)
        place = begin + tl.arange(0, BLOCK_M)
        inside = place < num_points
        to_others = tl.sum(unit * total[None, :], 1) - tl.sum(unit * unit, 1)
        tl.store(nearest + place, float("-inf"), mask=inside)
        best, newest = _lower(best, newest, tl.where(inside, to_others, float("inf")), begin)
    tl.store(chosen, newest.to(tl.int64))

    for turn in range(1, COUNT):
        latest = _unit(x, newest, newest + 1, stride_point, DIM, BLOCK_D, 1)
        best = float("inf")
        following = 0
        for begin in range(0, num_points, BLOCK_M):
            unit = _unit(x, begin, num_points, stride_point, DIM, BLOCK_D, BLOCK_M)
            place = begin + tl.arange(0, BLOCK_M)
            inside = place < num_points
            known = tl.load(nearest + place, mask=inside, other=float("inf"))
            near = tl.maximum(known, tl.sum(unit * latest, 1))
            # What is chosen is as near as can be, for ever.
            near = tl.where(place == newest, float("inf"), near)
            tl.store(nearest + place, near, mask=inside)
            best, following = _lower(best, following, near, begin)
        newest = following
        tl.store(chosen + turn, newest.to(tl.int64))


@triton.jit
def _unit(
    x, begin, end, stride_point,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Unit vectors [BLOCK_M, BLOCK_D] of the points from ``begin``; zero past ``end``."""
    point = begin + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (point < end)[:, None] & (d < DIM)[None, :]
    vector = tl.load(x + point[:, None] * stride_point + d[None, :], mask=inside, other=0.0)
    vector = vector.to(tl.float32)
    norm = tl.sqrt(tl.sum(vector * vector, 1))
    return vector / tl.maximum(norm, 1e-12)[:, None]


@triton.jit
def _lower(best, place, values, begin):
    """The lowest value so far and its place; of equals the first."""
    lowest = tl.min(values, 0)
    index = begin + tl.argmin(values, 0)
    return tl.minimum(best, lowest), tl.where(lowest < best, index, place)
