"""Lists of slots for each request and KV head, as FlashInfer's page tables."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowPlan(NamedTuple):
    """What FlashInfer is told of ``batch * kv_heads`` rows of one width, once.

    ``indptr`` [rows + 1] int32 says where each row's pages begin, and ``last_page_len`` [rows]
    int32 how full its last one is: always full, since a page is one token.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor


def plan_rows(batch: int, kv_heads: int, width: int, device: torch.device | str) -> RowPlan:
    """Rows that never change, however long they are on the device."""
    rows = batch * kv_heads
    indptr = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=device)
    return RowPlan(indptr, torch.ones(rows, dtype=torch.int32, device=device))


def pages_of_heads(pool: torch.Tensor) -> torch.Tensor:
    """A pool [num_slots, H_kv, D] as pages of one token and one head, [num_slots * H_kv, 1, 1, D].

    A view; head h of slot s is page ``s * H_kv + h``.

    Raises
    ------
    ValueError
        If the pool is not contiguous, or has more pages than an int32 can name.
    """
    slots, kv_heads, dim = pool.shape
    if not pool.is_contiguous():
        raise ValueError("FlashInfer reads heads as pages only of a contiguous KV pool")
    if slots * kv_heads >= 2**31:
        raise ValueError(f"{slots} slots of {kv_heads} heads are more pages than an int32 can name")
    return pool.view(slots * kv_heads, 1, 1, dim)


def fill_rows(slots: torch.Tensor, counts: torch.Tensor, pages: torch.Tensor) -> None:
    """Write each list's page numbers to its row.

    Parameters
    ----------
    slots : Tensor [B, H_kv, K] int32 or int64
        ``K`` is at most the rows' width; entries past a list's end may be anything.
    counts : Tensor [B, H_kv] int32 or int64
        Valid entries of each list.
    pages : Tensor [B * H_kv * width] int32
        Modified. Entries past a list's end are page h, which exists; they are masked, not skipped.
    """
    batch, kv_heads, listed = slots.shape
    rows = pages.view(batch, kv_heads, -1)
    head = torch.arange(kv_heads, dtype=torch.int32, device=slots.device)[:, None]
    inside = torch.arange(listed, device=slots.device) < counts[..., None]
    rows[..., listed:] = head
    rows[..., :listed] = torch.where(inside, slots.to(torch.int32), 0) * kv_heads + head
