"""`query_fold` as one kernel: a head's rows stay in registers while they are chosen from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def query_fold(rows: torch.Tensor, filled: int, count: int, carried: int = 0) -> None:
    """See `ops.query_fold`; the last dimension must be contiguous."""
    layers, heads, _, dim = rows.shape
    _fold[(layers * heads,)](
        rows,
        filled,
        min(filled, count),
        carried,
        heads,
        *rows.stride()[:3],
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_M=triton.next_power_of_2(filled),
        num_warps=4,
    )


@triton.jit
def _fold(
    ROWS, filled, count, carried, heads, stride_layer, stride_head, stride_row,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    rows = ROWS + head // heads * stride_layer + head % heads * stride_head
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = m < filled
    mask = inside[:, None] & (d < DIM)[None, :]
    row = tl.load(rows + m[:, None] * stride_row + d[None, :], mask=mask, other=0.0)
    vector = row.to(tl.float32)
    unit = vector / tl.maximum(tl.sqrt(tl.sum(vector * vector, 1)), 1e-12)[:, None]

    # The least similar to the others, on the whole; then, again and again, to those chosen.
    value = tl.sum(unit * tl.sum(unit, 0)[None, :], 1) - tl.sum(unit * unit, 1)
    newest = tl.argmin(tl.where(inside, value, float("inf")), 0)
    taken = (m == newest) & (count > 0)
    nearest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for _ in range(1, count):
        latest = tl.sum(tl.where((m == newest)[:, None], unit, 0.0), 0)
        nearest = tl.maximum(nearest, tl.sum(unit * latest[None, :], 1))
        newest = tl.argmin(tl.where(inside & (taken == 0), nearest, float("inf")), 0)
        taken = taken | (m == newest)

    # Everybody has read the rows before anybody writes one.
    tl.debug_barrier()
    rank = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(rows + rank[:, None] * stride_row + d[None, :], row, mask=mask & taken[:, None])
    begin = filled - carried
    tl.store(
        rows + (count + m - begin)[:, None] * stride_row + d[None, :],
        row,
        mask=mask & (m >= begin)[:, None],
    )
