"""The smallest and largest key of each page, element by element."""

from __future__ import annotations

import torch


def page_extrema(
    k_pool: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound the keys of a request, ``page`` consecutive ones at a time.

    Parameters
    ----------
    k_pool : Tensor [num_slots, H_kv, D]
    slots : Tensor [B, N] int32 or int64
        Each request's slots in position order.
    counts : Tensor [B] int32 or int64
        Valid entries of each row of ``slots``; the others are not read.
    page : int
        Keys of a page; the last one may have fewer.

    Returns
    -------
    low, high : Tensor [B, H_kv, ceil(N / page), D] float32
        Zero for pages that have no key.
    """
    batch, listed = slots.shape
    pages = -(-listed // page)
    inside = torch.arange(pages * page, device=slots.device) < counts[:, None]
    padded = torch.nn.functional.pad(slots, (0, pages * page - listed))
    keys = k_pool[torch.where(inside, padded, 0).long()].float()
    keys = keys.view(batch, pages, page, *keys.shape[2:])
    outside = ~inside.view(batch, pages, page, 1, 1)
    empty = outside[:, :, 0]
    low = keys.masked_fill(outside, torch.inf).amin(2).masked_fill(empty, 0.0)
    high = keys.masked_fill(outside, -torch.inf).amax(2).masked_fill(empty, 0.0)
    return low.transpose(1, 2).contiguous(), high.transpose(1, 2).contiguous()
