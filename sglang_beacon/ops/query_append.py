"""Queries of a decode step, taken back to before RoPE and appended to their requests' buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_beacon.ops.rope import RopeTable, derotate


def query_append(
    queries: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable,
    buffers: Sequence[torch.Tensor | None],
    rows: Sequence[int],
) -> None:
    """De-rotate one query per layer and head of each request, and write it to a buffer row.

    Parameters
    ----------
    queries : Tensor [layers, B, H_q, D]
        Rotated to their positions.
    positions : Tensor [B] int64
        Logical position of each request's newest token.
    table : RopeTable
    buffers : sequence of Tensor [layers, H_q, R, D], or None
        One for each request, modified; None for one that observes nothing.
    rows : sequence of int
        The row of each buffer; of no meaning where there is none.
    """
    unrotated = derotate(queries, positions[:, None], table)
    for index, (buffer, row) in enumerate(zip(buffers, rows, strict=True)):
        if buffer is not None:
            buffer[:, :, row] = unrotated[:, index]
