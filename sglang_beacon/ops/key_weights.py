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
    batch, num_heads, dim = queries.shape
    kv_heads, listed = slots.shape[1:]
    inside = torch.arange(listed, device=slots.device) < counts[..., None]
    places = torch.where(inside, slots, 0).long()
    keys = k_pool[places, torch.arange(kv_heads, device=slots.device)[:, None]].float()
    grouped = queries.float().view(batch, kv_heads, -1, dim)
    logits = (grouped @ keys.transpose(2, 3)) * scale
    logits = logits.masked_fill(~inside[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    # An empty list has no weights rather than undefined ones.
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return Weighed(weights.amax(2), lse.view(batch, num_heads))
