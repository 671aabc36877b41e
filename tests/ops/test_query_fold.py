"""A folded buffer begins with the farthest points of its rows, in order, then the newest."""

from __future__ import annotations

import math

import pytest
import torch
from support import naive
from support.kernels import DEVICE, kernel

from sglang_beacon.ops.query_fold import query_fold

LAYERS, HEADS, ROWS = 2, 3, 32
FOLDS = [
    # filled, count, carried
    (32, 16, 0),
    (31, 16, 5),
    (20, 16, 4),
    (17, 16, 16),
    (16, 16, 0),
    (9, 16, 3),
    (5, 1, 1),
]


def poisoned_buffer(filled: int, dim: int) -> torch.Tensor:
    rows = torch.full((LAYERS, HEADS, ROWS, dim), math.nan)
    generator = torch.Generator().manual_seed(filled)
    rows[:, :, :filled] = torch.randn(LAYERS, HEADS, filled, dim, generator=generator)
    return rows


@pytest.mark.parametrize(("filled", "count", "carried"), FOLDS)
def test_rows_of_a_folded_buffer(filled: int, count: int, carried: int) -> None:
    before = poisoned_buffer(filled, 8)
    after = before.clone()
    query_fold(after, filled, count, carried)
    for layer in range(LAYERS):
        for head in range(HEADS):
            used = before[layer, head, :filled]
            chosen = sorted(naive.farthest_points(used.double().tolist(), count))
            expected = torch.cat((used[chosen], used[filled - carried :]))
            folded = after[layer, head]
            assert torch.equal(folded[: len(expected)], expected)
            untouched = before[layer, head, len(expected) :]
            torch.testing.assert_close(
                folded[len(expected) :], untouched, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize(("filled", "count", "carried"), FOLDS)
def test_kernel(filled: int, count: int, carried: int, dim: int, dtype: torch.dtype) -> None:
    """On a buffer whose rows lie apart."""
    wide = torch.stack([poisoned_buffer(filled, dim).to(dtype)] * 2, dim=3)
    expected = wide.clone()
    query_fold(expected[:, :, :, 1], filled, count, carried)
    on_device = wide.to(DEVICE)
    kernel("query_fold", "query_fold")(on_device[:, :, :, 1], filled, count, carried)
    torch.testing.assert_close(on_device.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_kernel_breaks_ties_alike() -> None:
    rows = poisoned_buffer(1, 16)[:, :, :1].expand(-1, -1, ROWS, -1).contiguous()
    rows[:, :, 1::3] *= -2
    expected = rows.clone()
    query_fold(expected, 30, 16, 2)
    on_device = rows.to(DEVICE)
    kernel("query_fold", "query_fold")(on_device, 30, 16, 2)
    assert torch.equal(on_device.cpu(), expected)
