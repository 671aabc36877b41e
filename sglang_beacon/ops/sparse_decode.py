"""Attention of one query per head over lists of slots, a list for each request and KV head."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Attended(NamedTuple):
    """What `sparse_decode` returns.

    Attributes
    ----------
    output : Tensor [B, H_q, D]
        In the queries' dtype; zero where a list is empty.
    lse : Tensor [B, H_q] float32
        Natural logarithm of the sum of the powers; -inf where a list is empty.
    weights : Tensor [B, H_kv, K] float32
        The largest attention weight that any query head of the group gives to a listed token;
        zero past the end of a list.
    """

    output: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor


def sparse_decode(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> Attended:
    """Attend to the listed tokens alone.

    Parameters
    ----------
    queries : Tensor [B, H_q, D]
        ``H_q`` is a multiple of ``H_kv``.
    k_pool, v_pool : Tensor [num_slots, H_kv, D]
    slots : Tensor [B, H_kv, K] int32 or int64
        A list shared by all heads may be expanded instead of copied.
    counts : Tensor [B, H_kv] int32 or int64
        Valid entries of each list; whatever follows them is not read.
    scale : float
        Softmax scale.
    """
    batch, num_heads, dim = queries.shape
    kv_heads, listed = slots.shape[1:]
    group = num_heads // kv_heads
    inside = torch.arange(listed, device=slots.device) < counts[..., None]
    places = torch.where(inside, slots, 0).long()
    heads = torch.arange(kv_heads, device=slots.device)[:, None]
    keys, values = k_pool[places, heads].float(), v_pool[places, heads].float()
    grouped = queries.float().view(batch, kv_heads, group, dim)
    logits = (grouped @ keys.transpose(2, 3)) * scale
    logits = logits.masked_fill(~inside[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    # An empty list has no weights rather than undefined ones.
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    values = values.masked_fill(~inside[..., None], 0.0)
    output = (weights @ values).view(batch, num_heads, dim).to(queries.dtype)
    return Attended(output, lse.view(batch, num_heads), weights.amax(2))
