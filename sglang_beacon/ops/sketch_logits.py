"""Approximate logits of one query per head, from sketches of the keys."""

from __future__ import annotations

import torch


def sketch_logits(
    queries: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Multiply projected queries with the sketches of a request's keys.

    Parameters
    ----------
    queries : Tensor [B, H_q, R] float32
        Projected like the keys.
    codes : Tensor [num_slots, H_kv, R] int8
    scales : Tensor [num_slots, H_kv] float32
        From `key_sketch`.
    slots : Tensor [B, N] int32 or int64
        Each request's slots in position order.
    counts : Tensor [B] int32 or int64
        Valid entries of each row of ``slots``; the others are not read.
    scale : float
        Softmax scale.

    Returns
    -------
    Tensor [B, H_kv, N] float32
        The largest of each group; -inf past the end of a list.
    """
    batch, _, rank = queries.shape
    listed = slots.shape[1]
    kv_heads = codes.shape[1]
    inside = torch.arange(listed, device=slots.device) < counts[:, None]
    places = torch.where(inside, slots, 0).long()
    coordinates = codes[places].float() * scales[places][..., None]
    grouped = queries.float().view(batch, kv_heads, -1, rank)
    logits = torch.einsum("bhgr,bnhr->bhgn", grouped, coordinates).amax(2) * scale
    return logits.masked_fill(~inside[:, None], -torch.inf)
