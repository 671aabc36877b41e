"""`query_append` as one kernel, a program for each layer and request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_beacon.ops.rope import RopeTable


def query_append(
    queries: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable,
    buffers: Sequence[torch.Tensor | None],
    rows: Sequence[int],
) -> None:
    """See `ops.query_append`; buffers are contiguous and of the queries' dtype."""
    targets = [
        (index, (buffer.data_ptr() - queries.data_ptr()) // queries.element_size(), row,
         buffer.shape[2])
        for index, (buffer, row) in enumerate(zip(buffers, rows, strict=True))
        if buffer is not None
    ]  # fmt: skip
    if not targets:
        return
    pinned = torch.tensor(targets, dtype=torch.int64, pin_memory=queries.is_cuda)
    layers, _, heads, dim = queries.shape
    _append[(len(targets), layers)](
        queries,
        positions,
        table.cos_sin,
        pinned.to(queries.device, non_blocking=True),
        *queries.stride()[:3],
        positions.stride(0),
        table.cos_sin.stride(0),
        HEADS=heads,
        BLOCK_H=triton.next_power_of_2(heads),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        ROTARY=table.cos_sin.shape[1],
        NEOX=table.neox,
        num_warps=4,
    )


@triton.jit
def _append(
    QUERIES, POSITIONS, COS_SIN, TARGETS,
    stride_layer, stride_row, stride_head, stride_position, stride_table,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    target, layer = TARGETS + tl.program_id(0) * 4, tl.program_id(1).to(tl.int64)
    index, offset = tl.load(target), tl.multiple_of(tl.load(target + 1), 16)
    row, num_rows = tl.load(target + 2), tl.load(target + 3)
    query = QUERIES + layer * stride_layer + index * stride_row
    buffer = QUERIES + offset + layer * (HEADS * num_rows * DIM) + row * DIM
    position = tl.load(POSITIONS + index * stride_position).to(tl.int64)

    # Dimension d turned together with `partner`; the first of a pair gets +sin, the second -sin.
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROTARY // 2
    if NEOX:
        first, pair = d < half, d % half
        partner = tl.where(first, d + half, d - half)
    else:
        first, pair = d % 2 == 0, d // 2
        partner = tl.where(first, d + 1, d - 1)
    turns = d < ROTARY
    cos = tl.load(COS_SIN + position * stride_table + pair, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(COS_SIN + position * stride_table + half + pair, mask=turns, other=0.0)
    sin = tl.where(first, sin.to(tl.float32), -sin.to(tl.float32))

    h = tl.arange(0, BLOCK_H)
    heads = query + h[:, None] * stride_head
    inside = (h < HEADS)[:, None] & (d < DIM)[None, :]
    own = tl.load(heads + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(heads + partner[None, :], mask=inside & turns[None, :], other=0.0)
    # Undoing a turn by dividing through cos^2 + sin^2 also undoes a gain folded into the table.
    unrotated = (own * cos + other.to(tl.float32) * sin) / (cos * cos + sin * sin)
    tl.store(buffer + h[:, None] * (num_rows * DIM) + d[None, :], unrotated, mask=inside)
