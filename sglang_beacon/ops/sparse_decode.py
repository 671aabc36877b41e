"""Attention of one query per head over lists of slots, a list for each request and KV head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_beacon.ops.key_weights import group_weights, take_listed


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
    listed = slots.shape[2]
    slots = slots[..., : int(counts.max())]
    keys, values = (take_listed(pool, slots, counts) for pool in (k_pool, v_pool))
    weights, lse = group_weights(queries, keys, counts, scale)
    output = (weights @ values).view(queries.shape).to(queries.dtype)
    largest = torch.nn.functional.pad(weights.amax(2), (0, listed - slots.shape[2]))
    return Attended(output, lse.flatten(1), largest)
