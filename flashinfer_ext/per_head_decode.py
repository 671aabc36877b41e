"""Decode attention over a list of slots for each request and KV head, by FlashInfer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashinfer_ext.modules import MASKED_DECODE
from flashinfer_ext.rows import fill_rows, pages_of_heads, plan_rows

# FlashInfer's CUDA-core kernels know these group sizes; others need tensor cores.
GROUPS = (1, 2, 3, 4, 6, 8, 16)


class Shape(NamedTuple):
    """What a `PerHeadSparseDecode` is built for; ``width`` bounds the lists."""

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int

    @property
    def rows(self) -> int:
        return self.batch * self.kv_heads

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


class PerHeadSparseDecode:
    """`sglang_beacon.ops.sparse_decode` without the weights, through the paged wrapper.

    A row is a request's KV head: its queries are the group's, its pages single vectors of that
    head. All rows are planned once, as full; entries past a list's length on the device are masked
    by a variant of our own. So nothing is planned in a step, and a captured `run` stays valid.

    Parameters
    ----------
    shape : Shape
    dtype : dtype
        Of queries and cache.
    workspace : Tensor uint8
        FlashInfer's float workspace, which may be shared; its device is the one that computes.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, workspace: torch.Tensor) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.shape = shape
        device = workspace.device
        plan = plan_rows(shape.batch, shape.kv_heads, shape.width, device)
        self.pages = torch.zeros(shape.rows * shape.width, dtype=torch.int32, device=device)
        self.row_lengths = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=shape.group not in GROUPS,
            paged_kv_indptr_buffer=plan.indptr,
            paged_kv_indices_buffer=self.pages,
            paged_kv_last_page_len_buffer=plan.last_page_len,
            backend="fa2",
            jit_args=MASKED_DECODE.jit_args(dtype, shape.head_dim),
        )
        self._wrapper.plan(
            plan.indptr.cpu(),
            self.pages,
            plan.last_page_len.cpu(),
            num_qo_heads=shape.group,
            num_kv_heads=1,
            head_dim=shape.head_dim,
            page_size=1,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def run(
        self,
        queries: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the listed tokens alone.

        Parameters are those of `sglang_beacon.ops.sparse_decode`; lists must not be empty.

        Returns
        -------
        output : Tensor [B, H_q, D]
        lse : Tensor [B, H_q] float32
            Natural logarithm, as everywhere in this project; FlashInfer's is base 2.
        """
        shape = self.shape
        fill_rows(slots, counts, self.pages)
        self.row_lengths.copy_(counts.reshape(-1))
        output, lse = self._wrapper.run(
            queries.reshape(shape.rows, shape.group, shape.head_dim),
            (pages_of_heads(k_pool), pages_of_heads(v_pool)),
            self.row_lengths,
            scale,
            return_lse=True,
        )
        whole = shape.batch, shape.query_heads
        return output.view(*whole, shape.head_dim), lse.view(whole) * math.log(2)
