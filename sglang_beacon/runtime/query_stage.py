"""Holds the queries of the decode step in flight until the step is over."""

from __future__ import annotations

import torch


class QueryStage:
    """One query per layer, head and row of the batch, written during a step and read after it.

    A captured CUDA graph writes where it wrote when it was captured. So rows that graphs may cover
    have storage that never moves and is written whether or not anyone observes; larger batches run
    eagerly and get storage of their own for the step.

    Parameters
    ----------
    num_layers, num_query_heads, head_dim : int
    captured_rows : int
        Most rows of a captured step; 0 without CUDA graphs.
    dtype, device
        Of the queries.
    """

    def __init__(
        self,
        num_layers: int,
        num_query_heads: int,
        head_dim: int,
        captured_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._captured = torch.empty(
            (num_layers, captured_rows, num_query_heads, head_dim), dtype=dtype, device=device
        )
        self._step: torch.Tensor | None = None

    def begin(self, rows: int, observed: bool) -> None:
        """Before a forward: make room for ``rows`` queries if any of them is wanted."""
        if not observed:
            self._step = None
        elif rows <= self._captured.shape[1]:
            self._step = self._captured[:, :rows]
        else:
            layers, _, heads, head_dim = self._captured.shape
            self._step = self._captured.new_empty((layers, rows, heads, head_dim))

    def write(self, layer: int, queries: torch.Tensor) -> None:
        """During a forward, or the capture of one: take a layer's queries [rows, H_q * D]."""
        target = self._captured if self._step is None else self._step
        rows = queries.shape[0]
        if rows <= target.shape[1]:
            target[layer, :rows].copy_(queries.view(rows, *target.shape[2:]))

    def take(self) -> torch.Tensor | None:
        """After a forward: its queries [num_layers, rows, H_q, D], or None if none is wanted."""
        step, self._step = self._step, None
        return step
