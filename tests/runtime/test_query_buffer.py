"""A buffer that keeps the first queries instead of the farthest."""

from __future__ import annotations

import torch

from sglang_beacon.core import BufferShape, Fold
from sglang_beacon.runtime.query_buffer import QueryBuffer

LAYERS, HEADS, DIM = 2, 3, 4


def tokens(begin: int, end: int) -> torch.Tensor:
    """Queries [n, heads, dim] that say which token they are of."""
    return torch.arange(begin, end).float()[:, None, None].expand(-1, HEADS, DIM)


def held(buffer: QueryBuffer, filled: int) -> list[int]:
    rows = buffer.rows[:, :, :filled]
    assert (rows == rows[:1, :1, :, :1]).all(), "all layers and heads alike"
    return rows[0, 0, :, 0].int().tolist()


def test_the_first_queries_stay_and_the_newest_follow() -> None:
    shape = BufferShape(n_beacon=3, n_recent=2, farthest=False)
    buffer = QueryBuffer(shape, LAYERS, HEADS, DIM, torch.float32, "cpu")
    for layer in range(LAYERS):
        buffer.fold_prompt(layer, tokens(0, 2), 0, 0, 0)
        buffer.fold_prompt(layer, tokens(2, 7), 2, 2, 1)
    assert held(buffer, 4) == [0, 1, 2, 6]
    assert buffer.positions[0, 0].tolist() == [0, 1, 2]
    buffer.append(4, tokens(7, 8)[0].expand(LAYERS, -1, -1))
    buffer.compress(Fold(5, carried=2))
    assert held(buffer, 5) == [0, 1, 2, 6, 7]
    buffer.compress(Fold(5, carried=1))
    assert held(buffer, 4) == [0, 1, 2, 7]
    buffer.compress(Fold(4))
    assert held(buffer, 3) == [0, 1, 2]
