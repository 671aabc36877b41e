"""Queries of a step land de-rotated in the right row of the right buffer."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import DEVICE, kernel

from sglang_beacon.ops import RopeTable, derotate, rotate
from sglang_beacon.ops.query_append import query_append

LAYERS, HEADS = 2, 3
ROWS = (5, 8, 5)


def plain_table(rotary_dim: int, neox: bool, gain: float = 1.0) -> RopeTable:
    angles = torch.arange(100)[:, None] * 0.7 ** torch.arange(rotary_dim // 2)
    return RopeTable(gain * torch.cat((angles.cos(), angles.sin()), -1), neox)


def random_step(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dim)
    queries = torch.randn(LAYERS, len(ROWS) + 1, HEADS, dim, generator=generator)
    return queries, torch.tensor([3, 99, 0, 41])


def poisoned_buffers(dim: int) -> list[torch.Tensor | None]:
    """The second request of four observes nothing."""
    first, *others = (torch.full((LAYERS, HEADS, rows, dim), math.nan) for rows in ROWS)
    return [first, None, *others]


def test_the_query_before_rope_comes_back() -> None:
    table = plain_table(8, neox=True)
    queries, positions = random_step(8)
    rotated = rotate(queries, positions[:, None], table)
    buffers = poisoned_buffers(8)
    query_append(rotated, positions, table, buffers, [4, 0, 2, 0])
    for index, row in ((0, 4), (2, 2), (3, 0)):
        buffer = buffers[index]
        assert buffer is not None
        torch.testing.assert_close(buffer[:, :, row], queries[:, index])
        buffer[:, :, row] = math.nan
        assert buffer.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "neox", "gain"),
    [(64, 64, True, 1.0), (128, 128, True, 1.3), (24, 16, True, 1.0), (24, 16, False, 0.9)],
)
def test_kernel(dim: int, rotary_dim: int, neox: bool, gain: float, dtype: torch.dtype) -> None:
    table = plain_table(rotary_dim, neox, gain)
    queries, positions = random_step(dim)
    wide = torch.stack((queries, queries), dim=2).to(dtype).to(DEVICE)[:, :, 1]
    buffers = [b if b is None else b.to(dtype).to(DEVICE) for b in poisoned_buffers(dim)]
    expected = [b if b is None else b.clone() for b in buffers]
    on_device = RopeTable(table.cos_sin.to(DEVICE), neox)
    rows = [4, 0, 7, 1]
    query_append(wide, positions.to(DEVICE), on_device, expected, rows)
    launch = kernel("query_append", "query_append")
    launch(wide, positions.to(DEVICE), on_device, buffers, rows)
    exact = derotate(wide.double(), positions.to(DEVICE)[:, None], on_device)
    for index, (buffer, right, row) in enumerate(zip(buffers, expected, rows, strict=True)):
        if buffer is not None:
            error = (buffer[:, :, row] - exact[:, index]).abs().max()
            assert error <= 2 * (right[:, :, row] - exact[:, index]).abs().max() + 1e-6
            buffer[:, :, row] = right[:, :, row]
            torch.testing.assert_close(buffer, right, rtol=0, atol=0, equal_nan=True)
