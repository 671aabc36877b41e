"""Ranking by attention itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_beacon.runtime.selectors.base import Query, Ranking, Selector, ranked


class ExactSelector(Selector):
    """Reads every key, and saves the values of the tokens that do not matter."""

    name = "exact"

    def cost(self, tokens: int) -> float:
        return tokens

    def rank(self, query: Query, sizes: Sequence[int]) -> Ranking:
        weights = query.weights()
        wanted = torch.tensor(sizes, device=weights.device)
        return ranked(weights, query.forced, wanted)._replace(weights=weights)
