"""`key_sketch` as one kernel, a program for a head and a stretch of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_KEYS = 32


def key_sketch(keys: torch.Tensor, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.key_sketch`; vectors must be contiguous."""
    num_keys, kv_heads, dim = keys.shape
    rank = projection.shape[2]
    codes = torch.empty((num_keys, kv_heads, rank), dtype=torch.int8, device=keys.device)
    scales = torch.empty((num_keys, kv_heads), dtype=torch.float32, device=keys.device)
    _sketch[(triton.cdiv(num_keys, BLOCK_KEYS), kv_heads)](
        keys, projection.contiguous(), codes, scales, num_keys, *keys.stride()[:2],
        DIM=dim, BLOCK_D=16, RANK=rank,
        BLOCK_R=max(triton.next_power_of_2(rank), 16), BLOCK_N=BLOCK_KEYS, num_warps=4,
    )  # fmt: skip
    return codes, scales


@triton.jit
def _sketch(
    KEYS, PROJECTION, CODES, SCALES, num_keys, stride_key, stride_head,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    coordinates = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    # In float32, a few dimensions at a time: that product has no tensor cores.
    for begin in range(0, DIM, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)
        key = tl.load(
            KEYS + n[:, None] * stride_key + head * stride_head + d[None, :],
            mask=(n < num_keys)[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        projection = tl.load(
            PROJECTION + (head * DIM + d)[:, None] * RANK + r[None, :],
            mask=(d < DIM)[:, None] & (r < RANK)[None, :],
            other=0.0,
        )
        coordinates += tl.dot(key.to(tl.float32), projection, input_precision="ieee")
    scale = tl.max(tl.abs(coordinates), 1) / 127
    steps = coordinates / tl.maximum(scale, 1e-30)[:, None]
    size = tl.minimum(tl.floor(tl.abs(steps) + 0.5), 127.0)
    code = tl.where(steps < 0, -size, size).to(tl.int8)
    row = n * tl.num_programs(1) + head
    tl.store(
        CODES + row[:, None] * RANK + r[None, :],
        code,
        mask=(n < num_keys)[:, None] & (r < RANK)[None, :],
    )
    tl.store(SCALES + row, scale, mask=n < num_keys)
