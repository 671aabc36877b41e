"""Ranking by bounds on the keys of each page (after Quest, Tang et al., ICML 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_beacon import ops
from sglang_beacon.runtime.bounds import certified_drop
from sglang_beacon.runtime.selectors.base import Query, Ranking, Selector

# Keys that share a bound on their logits.
PAGE = 16


class PageSelector(Selector):
    """Reads bounds on the keys of each page, then the keys of the pages that may matter.

    What lies in no chosen page is bounded for certain, without having been read.
    """

    name = "pages"

    def __init__(self, layers: int) -> None:
        self._extrema: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers
        self._covered = [0] * layers

    def restart(self) -> None:
        self._covered = [0] * len(self._covered)

    def cost(self, tokens: int) -> float:
        return 2 * tokens / PAGE

    def rank(self, query: Query, sizes: Sequence[int]) -> Ranking:
        low, high = self._cover(query)
        heads, pages = low.shape[:2]
        held = len(query.slots)
        device = query.slots.device
        bounds = ops.page_bounds(
            query.queries[None],
            low[None],
            high[None],
            torch.full((1,), pages, device=device),
            query.scale,
        )[0].view(heads, -1, pages)
        token = torch.arange(held, device=device)
        page = token // PAGE
        forced = torch.zeros(pages, dtype=torch.bool, device=device)
        forced[page[query.forced]] = True
        ranks = bounds.amax(1).masked_fill(forced, torch.inf)
        in_order = torch.sort(ranks, dim=-1, descending=True, stable=True).indices
        tokens = torch.full((pages,), PAGE, device=device)
        tokens[-1] = held - (pages - 1) * PAGE
        # How many tokens come before each page, and so each token's place.
        before = tokens[in_order].cumsum(-1) - tokens[in_order]
        before = torch.zeros_like(before).scatter_(1, in_order, before)
        place = before[:, page] + token % PAGE
        order = torch.empty_like(place).scatter_(1, place, token.expand_as(place))
        drop = [self._drop(query, order, bounds, tokens, before, size) for size in sizes]
        return Ranking(order, torch.stack(drop, dim=-1))

    def _drop(
        self,
        query: Query,
        order: torch.Tensor,
        bounds: torch.Tensor,
        tokens: torch.Tensor,
        before: torch.Tensor,
        size: int,
    ) -> torch.Tensor:
        heads, group, _ = bounds.shape
        first = order[:, :size]
        counts = torch.full((1, heads), first.shape[1], device=order.device)
        attended = ops.key_weights(
            query.queries[None], query.k_pool, query.slots[first][None], counts, query.scale
        )
        left = tokens - (size - before).clamp(min=0).minimum(tokens)
        delta = certified_drop(
            attended.lse.view(heads, group), bounds, left[:, None].expand_as(bounds)
        )
        return delta.amax(1)

    def _cover(self, query: Query) -> tuple[torch.Tensor, torch.Tensor]:
        """Extrema of all pages; only those of pages with new tokens are computed."""
        layer, held = query.layer, len(query.slots)
        known = self._covered[layer] // PAGE
        fresh = query.slots[None, known * PAGE :]
        counts = torch.full((1,), fresh.shape[1], device=fresh.device)
        low, high = (each[0] for each in ops.page_extrema(query.k_pool, fresh, counts, PAGE))
        before = self._extrema[layer]
        if known and before is not None:
            low = torch.cat((before[0][:, :known], low), dim=1)
            high = torch.cat((before[1][:, :known], high), dim=1)
        self._extrema[layer], self._covered[layer] = (low, high), held
        return low, high
