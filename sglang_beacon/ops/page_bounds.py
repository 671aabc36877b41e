"""The largest logit that any key of a page can have, without reading the keys."""

from __future__ import annotations

import torch


def page_bounds(
    queries: torch.Tensor, low: torch.Tensor, high: torch.Tensor, pages: torch.Tensor, scale: float
) -> torch.Tensor:
    """Bound the logits of whole pages from above.

    ``q . k <= sum over d of max(q_d low_d, q_d high_d)`` for every key between ``low`` and
    ``high``.

    Parameters
    ----------
    queries : Tensor [B, H_q, D]
    low, high : Tensor [B, H_kv, P, D] float32
        From `page_extrema`.
    pages : Tensor [B] int32 or int64
        Pages that have keys, the first ones of each request.
    scale : float
        Softmax scale, not negative.

    Returns
    -------
    Tensor [B, H_q, P] float32
        -inf for pages without keys.

    Notes
    -----
    Tang et al., Quest, ICML 2024 (arXiv 2406.10774), equation 3.
    """
    batch, num_heads, dim = queries.shape
    kv_heads, num_pages = low.shape[1:3]
    grouped = queries.float().view(batch, kv_heads, -1, dim)
    positive, negative = grouped.clamp(min=0), grouped.clamp(max=0)
    bounds = positive @ high.transpose(2, 3) + negative @ low.transpose(2, 3)
    bounds = (bounds * scale).view(batch, num_heads, num_pages)
    beyond = torch.arange(num_pages, device=queries.device) >= pages[:, None, None]
    return bounds.masked_fill(beyond, -torch.inf)
