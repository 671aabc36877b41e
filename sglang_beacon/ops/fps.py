"""Farthest point sampling of queries by cosine similarity."""

from __future__ import annotations

import torch


def farthest_point_sample(points: torch.Tensor, count: int) -> torch.Tensor:
    """Choose ``count`` geometrically diverse points.

    The seed is the point with the lowest mean cosine similarity to the others; then, repeatedly,
    the point whose largest similarity to the chosen ones is smallest. Ties go to the lower index
    and no index repeats, also among identical or zero vectors (a zero vector has similarity 0 to
    everything).

    Parameters
    ----------
    points : Tensor [..., M, D]
        Any float dtype; similarities are computed in float32.
    count : int
        Points to choose; may be 0.

    Returns
    -------
    Tensor [..., min(count, M)] int64
        Indices in the order chosen; all of them, ascending, when ``M <= count``.

    Notes
    -----
    BeaconKV, Algorithm 1. Needs no M x M matrix: the mean similarity follows from the sum of the
    unit vectors, and each round compares with the newest choice only. Cost ``O(count * M * D)``.
    """
    num_points = points.shape[-2]
    if num_points <= count:
        index = torch.arange(num_points, device=points.device)
        return index.expand(*points.shape[:-2], num_points)

    if count == 0:
        return torch.empty((*points.shape[:-2], 0), dtype=torch.int64, device=points.device)
    unit = torch.nn.functional.normalize(points.float(), dim=-1)
    # Sum of similarities to the *other* points; dividing by M - 1 would not change the order.
    # Products and sums per row, not matrix products: those round equal rows differently by place,
    # and ties would no longer be ties.
    to_others = (unit * unit.sum(-2, keepdim=True)).sum(-1) - unit.square().sum(-1)
    newest = to_others.argmin(-1, keepdim=True)

    chosen = [newest]
    nearest = torch.full(points.shape[:-1], -torch.inf, device=points.device)
    taken = torch.zeros_like(nearest, dtype=torch.bool)
    for _ in range(count - 1):
        taken.scatter_(-1, newest, True)
        latest = unit.gather(-2, newest.unsqueeze(-1).expand(*newest.shape, unit.shape[-1]))
        nearest = torch.maximum(nearest, (unit * latest).sum(-1))
        newest = nearest.masked_fill(taken, torch.inf).argmin(-1, keepdim=True)
        chosen.append(newest)
    return torch.cat(chosen, dim=-1)
