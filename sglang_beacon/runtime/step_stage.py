"""Holds what every layer computes in the decode step in flight until the step is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StepStage:
    """One value per layer and row of the batch, written during a step and read after it.

    A captured CUDA graph writes where it wrote when it was captured. So rows that graphs may cover
    have storage that never moves and is written whether or not anyone observes; larger batches run
    eagerly and get storage of their own for the step.

    Parameters
    ----------
    num_layers : int
    value_shape : sequence of int
        Of a layer's value for one row: heads and head size of a query.
    captured_rows : int
        Most rows of a captured step; 0 without CUDA graphs.
    dtype, device
        Of the values.
    """

    def __init__(
        self,
        num_layers: int,
        value_shape: Sequence[int],
        captured_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._captured = torch.empty(
            (num_layers, captured_rows, *value_shape), dtype=dtype, device=device
        )
        self._step: torch.Tensor | None = None

    def begin(self, rows: int, wanted: bool) -> None:
        """Before a forward: make room for ``rows`` values if any of them is wanted."""
        if not wanted:
            self._step = None
        elif rows <= self._captured.shape[1]:
            self._step = self._captured[:, :rows]
        else:
            layers, _, *shape = self._captured.shape
            self._step = self._captured.new_empty((layers, rows, *shape))

    def write(self, layer: int, values: torch.Tensor) -> None:
        """During a forward, or the capture of one: take a layer's values, ``rows`` of them."""
        target = self._captured if self._step is None else self._step
        rows = values.shape[0]
        if rows <= target.shape[1]:
            target[layer, :rows].copy_(values.view(rows, *target.shape[2:]))

    def take(self) -> torch.Tensor | None:
        """After a forward: its values [num_layers, rows, ...], or None if none is wanted."""
        step, self._step = self._step, None
        return step
