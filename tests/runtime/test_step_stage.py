"""Values of a step arrive whole, and captured writes always land in the same place."""

from __future__ import annotations

import pytest
import torch

from sglang_beacon.runtime.step_stage import StepStage

LAYERS, HEADS, DIM = 3, 4, 8


def stage(captured_rows: int) -> StepStage:
    return StepStage(LAYERS, (HEADS, DIM), captured_rows, torch.float32, "cpu")


def queries(rows: int) -> torch.Tensor:
    return torch.randn(LAYERS, rows, HEADS * DIM)


@pytest.mark.parametrize("captured_rows", [0, 4])
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_what_is_written_is_taken(captured_rows: int, rows: int) -> None:
    staging, wanted = stage(captured_rows), queries(rows)
    staging.begin(rows, True)
    for layer in range(LAYERS):
        staging.write(layer, wanted[layer])
    taken = staging.take()
    assert taken is not None
    assert torch.equal(taken, wanted.view(LAYERS, rows, HEADS, DIM))
    assert staging.take() is None


def test_nothing_is_taken_when_nobody_observes() -> None:
    staging = stage(0)
    staging.begin(2, False)
    staging.write(0, queries(2)[0])
    assert staging.take() is None


def test_a_captured_write_lands_where_later_steps_read() -> None:
    """Capture runs without `begin`, padded; a replay writes the same addresses again."""
    staging, padded = stage(8), queries(8)
    for layer in range(LAYERS):
        staging.write(layer, padded[layer])
    staging.begin(5, True)
    taken = staging.take()
    assert taken is not None
    assert torch.equal(taken, padded[:, :5].reshape(LAYERS, 5, HEADS, DIM))
    # A larger, eager step must not move it.
    staging.begin(20, True)
    staging.begin(5, True)
    again = staging.take()
    assert again is not None
    assert again.data_ptr() == taken.data_ptr()
