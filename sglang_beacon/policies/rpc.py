"""Reasoning Path Compression: the newest queries, again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.policies.recent_window import RecentWindowPolicy, pooled


class RPCPolicy(RecentWindowPolicy):
    """Keep what the newest queries attend to on average.

    The score is the mean attention weight over the window's queries and the query heads of a
    group, averaged over ``kernel`` neighbours. Cost: one attention of ``window`` queries per
    eviction.

    Reference: Song et al., Reasoning Path Compression, 2025 (arXiv 2505.13866): selector window 32,
    average over 7.
    """

    name: ClassVar[str] = "rpc"
    defaults: ClassVar[Mapping[str, Any]] = {**RecentWindowPolicy.defaults, "kernel": 7}

    def score_layer(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return pooled(weights.mean(dim=(1, 2)), self.options["kernel"], "mean")
