"""Exact, deterministic Top-K per row."""

from __future__ import annotations

import torch


def select_topk(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest scores of each row, in ascending order.

    Parameters
    ----------
    scores : Tensor [..., N] float
        ``inf`` forces an entry in, ``-inf`` keeps it out while others are left; no NaN.
    count : int
        At most N.

    Returns
    -------
    Tensor [..., count] int64
        Ties go to the lower index.
    """
    # A stable sort, since `torch.topk` leaves the order of ties open.
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(-1).values
