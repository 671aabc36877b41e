"""A query buffer, folded in place to its beacons and its newest queries."""

from __future__ import annotations

import torch

from sglang_beacon.ops.fps import farthest_point_sample


def query_fold(rows: torch.Tensor, filled: int, count: int, carried: int = 0) -> None:
    """Bring each head's farthest points to the front, and after them its newest rows.

    Parameters
    ----------
    rows : Tensor [layers, H_q, R, D]
        Modified. The chosen rows keep their order.
    filled : int
        Rows in use.
    count : int
        How many of them are chosen, by `farthest_point_sample`; all, if there are no more.
    carried : int
        How many of the last ones follow the chosen, chosen or not.
    """
    used = rows[:, :, :filled]
    index = farthest_point_sample(used, count).sort(-1).values
    chosen = used.gather(2, index.unsqueeze(-1).expand(*index.shape, used.shape[-1]))
    folded = torch.cat((chosen, used[:, :, filled - carried :]), dim=2)
    rows[:, :, : folded.shape[2]] = folded
