"""Attention weights of one query per head over lists of slots; no value is read."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Weighed(NamedTuple):
    """What `key_weights` returns; see `sparse_decode.Attended`.

    ``weights`` [B, H_kv, K] float32 are the largest of each group, ``lse`` [B, H_q] float32 the
    natural logarithm of each query head's sum.
    """

    weights: torch.Tensor
    lse: torch.Tensor


def key_weights(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> Weighed:
    """How much attention each listed token would get from a request's newest queries.

    Parameters are those of `sparse_decode`, without the values.
    """
    weights, lse = group_weights(queries, take_listed(k_pool, slots, counts), counts, scale)
    return Weighed(weights.amax(2), lse.flatten(1))


def take_listed(pool: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The listed vectors of a pool, [B, H_kv, K, D] float32; zero past the end of a list."""
    inside = _inside(slots.shape[2], counts)
    heads = torch.arange(slots.shape[1], device=slots.device)[:, None]
    # Rows of a flat pool: several times as fast as indexing by slot and head, on a CPU.
    row = torch.where(inside, slots, 0).long() * pool.shape[1] + heads
    vectors = (
        pool.flatten(0, 1).index_select(0, row.flatten()).float().view(*row.shape, pool.shape[2])
    )
    return vectors if inside.all() else vectors.masked_fill(~inside[..., None], 0.0)


def group_weights(
    queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, H_kv, group, K] of listed keys [B, H_kv, K, D], and each query head's lse."""
    batch, kv_heads, listed, dim = keys.shape
    grouped = queries.float().view(batch, kv_heads, -1, dim)
    logits = (grouped @ keys.transpose(2, 3)) * scale
    logits = logits.masked_fill(~_inside(listed, counts)[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    # An empty list has no weights rather than undefined ones.
    return (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp(), lse


def _inside(listed: int, counts: torch.Tensor) -> torch.Tensor:
    """Which entries [B, H_kv, K] of the lists are valid."""
    return torch.arange(listed, device=counts.device) < counts[..., None]
