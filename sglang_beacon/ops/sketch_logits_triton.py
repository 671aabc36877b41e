"""`sketch_logits` as one kernel, a program for each KV head and stretch of its keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_KEYS = 128


def sketch_logits(
    queries: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `ops.sketch_logits`; the last dimensions must be contiguous."""
    batch, num_heads, rank = queries.shape
    listed, kv_heads = slots.shape[1], codes.shape[1]
    logits = torch.empty((batch, kv_heads, listed), dtype=torch.float32, device=queries.device)
    _sketch_logits[(batch * kv_heads, triton.cdiv(listed, BLOCK_KEYS))](
        queries, codes, scales, slots, counts, logits, scale, listed, kv_heads,
        *queries.stride()[:2], *slots.stride(), counts.stride(0),
        *codes.stride()[:2], *scales.stride(),
        GROUP=num_heads // kv_heads, RANK=rank, BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_N=BLOCK_KEYS, num_warps=4,
    )  # fmt: skip
    return logits


@triton.jit
def _sketch_logits(
    QUERIES, CODES, SCALES, SLOTS, COUNTS, LOGITS, scale, listed, kv_heads,
    stride_qb, stride_qh, stride_sb, stride_sn, stride_count, stride_code, stride_code_head,
    stride_scale, stride_scale_head,
    GROUP: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request, head = row // kv_heads, row % kv_heads
    count = tl.load(COUNTS + request * stride_count)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < count
    r = tl.arange(0, BLOCK_R)
    slot = tl.load(SLOTS + request * stride_sb + place * stride_sn, mask=inside, other=0)
    slot = slot.to(tl.int64)
    code = tl.load(
        CODES + slot[:, None] * stride_code + head * stride_code_head + r[None, :],
        mask=inside[:, None] & (r < RANK)[None, :],
        other=0,
    ).to(tl.float32)
    step = tl.load(SCALES + slot * stride_scale + head * stride_scale_head, mask=inside, other=0.0)
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for g in range(GROUP):
        query = QUERIES + request * stride_qb + (head * GROUP + g) * stride_qh + r
        q = tl.load(query, mask=r < RANK, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.sum(code * q[None, :], 1))
    logit = tl.where(inside, best * step * scale, float("-inf"))
    tl.store(LOGITS + row * listed + place, logit, mask=place < listed)
