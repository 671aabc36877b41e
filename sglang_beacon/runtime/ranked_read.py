"""Attends to the first tokens of a ranking, as few as an error allows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.runtime.bounds import output_error
from sglang_beacon.runtime.selectors.base import Ranking


class Rows(NamedTuple):
    """One layer's newest step of several requests, which need not be of one length.

    Attributes
    ----------
    queries : Tensor [B, H_q, D]
    slots : Tensor [B, N] int64
        All that each request holds, the newest token last; whatever follows is a slot too.
    held : Tensor [B] int64
        0 for a row that is none.
    value_norm : Tensor [B, H_kv] float32
        The largest norm of the values held, apart from the newest.
    norms : Tensor [B, H_q] float32
        Of the outputs of the step before; 0 before the first.
    """

    queries: torch.Tensor
    slots: torch.Tensor
    held: torch.Tensor
    value_norm: torch.Tensor
    norms: torch.Tensor


class Read(NamedTuple):
    """What `read_ranked` returns.

    Attributes
    ----------
    output : Tensor [B, H_q, D]
    counts : Tensor [B, H_kv] int64
        Tokens read.
    dropped : Tensor [B, H_kv] float32
        Bound on the mass of the others.
    errors : Tensor [B] float32
        Bound on the relative error of the layer's output.
    weights : Tensor [B, H_kv, N] float32
        Of what was read, in the order of the ranking.
    """

    output: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor
    errors: torch.Tensor
    weights: torch.Tensor


def read_ranked(
    rows: Rows,
    ranking: Ranking,
    sizes: torch.Tensor,
    epsilon: float | torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
) -> Read:
    """Attend to the smallest sizes that the error allows; without an access from the host.

    Parameters
    ----------
    rows : Rows
    ranking : Ranking
        Of every row, for its ``sizes``.
    sizes : Tensor [B, sizes] int64
        Increasing; 0 where one is not to be used. Everything may be read in any case.
    epsilon : float or Tensor [B] float32
    k_pool, v_pool : Tensor [num_slots, H_kv, D]
    scale : float
    """
    heads, query_heads = k_pool.shape[1], rows.queries.shape[1]
    last = (rows.held - 1).clamp(min=0)[:, None]
    newest = v_pool[rows.slots.gather(1, last)[:, 0]].float().norm(dim=-1)
    value_norm = torch.maximum(rows.value_norm, newest)
    sizes = torch.cat((sizes, rows.held[:, None]), dim=1)
    drop = torch.nn.functional.pad(ranking.drop, (0, 1))
    tolerance = epsilon * rows.norms.norm(dim=-1) / math.sqrt(query_heads)
    fits = output_error(value_norm[..., None], drop) <= tolerance[:, None, None]
    # The first that fits, and everything does.
    choice = (fits & (sizes > 0)[:, None]).int().argmax(-1, keepdim=True)
    counts = sizes[:, None].expand(-1, heads, -1).gather(2, choice)[..., 0]
    dropped = drop.gather(2, choice)[..., 0]
    listed = rows.slots[:, None].expand(-1, heads, -1).gather(2, ranking.order)
    attended = ops.sparse_decode(rows.queries, k_pool, v_pool, listed, counts, scale)
    bound = math.sqrt(query_heads // heads) * output_error(value_norm, dropped).norm(dim=-1)
    errors = bound / attended.output.float().flatten(1).norm(dim=-1).clamp(min=1e-30)
    return Read(attended.output, counts, dropped, errors, attended.weights)


def in_order(heads: int, held: int, device: torch.device | str) -> Ranking:
    """Everything, as it lies in the row."""
    order = torch.arange(held, device=device).expand(heads, -1)
    return Ranking(order, torch.zeros(heads, 0, device=device))
