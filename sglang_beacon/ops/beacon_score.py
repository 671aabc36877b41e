"""The score of cached keys under a set of observation queries."""

from __future__ import annotations

import torch

AGGREGATIONS = ("max", "mean", "logsumexp")
# Temperature of the soft maximum, in units of attention weight: towards 0 it is the maximum,
# towards infinity it orders keys as the mean does.
SOFTNESS = 0.05


def beacon_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    aggregation: str = "max",
) -> torch.Tensor:
    """Attention that each cached key receives, aggregated over a group's heads and queries.

    ``W[h, q, j] = softmax_j(scale * q . k_j)`` over the keys that q may see;
    ``score[j] = max over the query heads of the group and over all q of W[h, q, j]``.

    Parameters
    ----------
    keys : Tensor [H_kv, N, D]
        Cached keys, rotated to their own positions.
    queries : Tensor [H_q, R, D]
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
    Tensor [H_kv, N] float32
        Higher means keep.

    Notes
    -----
    BeaconKV, Algorithm 2 and Table 2.
    """
    num_kv_heads, num_keys, head_dim = keys.shape
    group = queries.shape[0] // num_kv_heads
    grouped = queries.float().reshape(num_kv_heads, group * queries.shape[1], head_dim)
    logits = (grouped @ keys.float().transpose(1, 2)) * scale
    hidden = torch.arange(num_keys, device=keys.device) >= visible.repeat(group)[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    if aggregation == "max":
        return weights.amax(1)
    if aggregation == "mean":
        return weights.mean(1)
    return SOFTNESS * (weights / SOFTNESS).logsumexp(1)
