"""The score of cached keys under a set of observation queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

AGGREGATIONS = ("max", "mean", "logsumexp")
# Temperature of the soft maximum, in units of attention weight: towards 0 it is the maximum,
# towards infinity it orders keys as the mean does.
SOFTNESS = 0.05


def beacon_score(
    k_pools: Sequence[torch.Tensor],
    slots: torch.Tensor,
    queries: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    aggregation: str = "max",
) -> torch.Tensor:
    """Attention that each cached key receives, aggregated over a group's heads and queries.

    In every layer and KV head, with ``q`` over the query heads of its group:

    ``W[h, q, j] = softmax_j(scale * q . k_j)`` over the keys that q may see;
    ``score[j] = max over those heads and all q of W[h, q, j]``.

    Parameters
    ----------
    k_pools : sequence of Tensor [num_slots, H_kv, D]
        One for each layer; keys are rotated to their own positions.
    slots : Tensor [N] int64
        Where the keys lie, in position order; the same in every layer and head.
    queries : Tensor [layers, H_q, R, D]
        Observation queries, rotated; ``H_q`` is a multiple of ``H_kv``.
    visible : Tensor [R] int64
        Query r sees keys ``[0, visible[r])``; at least 1.
    scale : float
        Softmax scale.
    aggregation : {"max", "mean", "logsumexp"}
        ``max`` is the method; the others are ablations: ``logsumexp`` is a soft maximum
        of W at temperature `SOFTNESS`.

    Returns
    -------
    Tensor [layers, H_kv, N] float32
        Higher means keep.

    Notes
    -----
    BeaconKV, Algorithm 2 and Table 2.
    """
    return torch.stack(
        [
            _score(
                pool.index_select(0, slots).transpose(0, 1),
                layer_queries,
                visible,
                scale,
                aggregation,
            )
            for pool, layer_queries in zip(k_pools, queries, strict=True)
        ]
    )


def observed_weights(
    keys: torch.Tensor, queries: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Weights [H_kv, group * R, N] that queries [H_q, R, D] give to one layer's keys [H_kv, N, D].

    Query r sees keys ``[0, visible[r])``.
    """
    return observed_logits(keys, queries, visible, scale).softmax(-1)


def observed_logits(
    keys: torch.Tensor, queries: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Their scaled logits, minus infinity where a query does not see."""
    num_kv_heads, num_keys, head_dim = keys.shape
    group = queries.shape[0] // num_kv_heads
    grouped = queries.float().reshape(num_kv_heads, group * queries.shape[1], head_dim)
    logits = (grouped @ keys.float().transpose(1, 2)) * scale
    hidden = torch.arange(num_keys, device=keys.device) >= visible.repeat(group)[:, None]
    return logits.masked_fill(hidden, -torch.inf)


def _score(
    keys: torch.Tensor, queries: torch.Tensor, visible: torch.Tensor, scale: float, aggregation: str
) -> torch.Tensor:
    """Scores [H_kv, N] of one layer's keys [H_kv, N, D] under queries [H_q, R, D]."""
    weights = observed_weights(keys, queries, visible, scale)
    if aggregation == "max":
        return weights.amax(1)
    if aggregation == "mean":
        return weights.mean(1)
    return SOFTNESS * (weights / SOFTNESS).logsumexp(1)
