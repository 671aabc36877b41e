"""Logits of observation queries over a request's cache, written by FlashInfer's own attention.

Not for serving: writing the logits moves four times the bytes that `beacon_score` moves. It is what
that kernel is compared with on a GPU.
"""

from __future__ import annotations

import torch

from flashinfer_ext.modules import LOGITS_DECODE
from flashinfer_ext.rows import fill_rows, pages_of_heads, plan_rows


def beacon_logits(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    workspace: torch.Tensor,
    logits: torch.Tensor,
) -> torch.Tensor:
    """Attend from each query to all listed keys, and keep what the softmax is taken of.

    Parameters
    ----------
    queries : Tensor [H_q, R, D]
        Of one layer, in the pool's dtype.
    k_pool : Tensor [num_slots, H_kv, D]
    slots : Tensor [N] int64
    scale : float
    workspace : Tensor uint8
        FlashInfer's float workspace.
    logits : Tensor [H_kv, R, group, width] float32
        Modified up to the N-th entry of each row, with base-2 logits; ``width`` is at least N.

    Returns
    -------
    Tensor [H_kv, R, group] float32
        Base-2 logarithm of each row's sum.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    num_heads, num_queries, dim = queries.shape
    kv_heads, listed = k_pool.shape[1], slots.shape[0]
    group = num_heads // kv_heads
    plan = plan_rows(1, kv_heads, listed, queries.device)
    pages = torch.empty(kv_heads * listed, dtype=torch.int32, device=queries.device)
    counts = torch.full((1, kv_heads), listed, device=queries.device)
    fill_rows(slots.expand(1, kv_heads, -1), counts, pages)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", backend="fa2", jit_args=LOGITS_DECODE.jit_args(queries.dtype, dim)
    )
    wrapper.plan(
        torch.arange(0, (kv_heads + 1) * num_queries, num_queries, dtype=torch.int32),
        plan.indptr.cpu(),
        pages,
        plan.last_page_len.cpu(),
        num_qo_heads=group,
        num_kv_heads=1,
        head_dim_qk=dim,
        page_size=1,
        causal=False,
        q_data_type=queries.dtype,
        kv_data_type=queries.dtype,
    )
    rows = queries.view(kv_heads, group, num_queries, dim).transpose(1, 2).flatten(0, 1)
    cache = pages_of_heads(k_pool)
    _, lse = wrapper.run(
        rows.contiguous(), (cache, cache), logits, scale, logits.shape[-1], return_lse=True
    )
    sums: torch.Tensor = lse.view(kv_heads, num_queries, group)
    return sums
