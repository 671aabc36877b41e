"""SnapKV, applied again and again while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.policies.recent_window import RecentWindowPolicy, pooled


class SnapKVPolicy(RecentWindowPolicy):
    """Keep clusters of tokens that the newest queries attend to.

    The score is the sum of attention weights over the window's queries, averaged over the query
    heads of a group, then the maximum over ``kernel`` neighbours. Cost: one attention of ``window``
    queries per eviction.

    Reference: Li et al., SnapKV, NeurIPS 2024 (arXiv 2404.14469): window 32, maximum over 7. The
    paper compresses a prompt once; here it is applied at each eviction, as BeaconKV's Table 5 does.
    """

    name: ClassVar[str] = "snapkv"
    defaults: ClassVar[Mapping[str, Any]] = {**RecentWindowPolicy.defaults, "kernel": 7}

    def score_layer(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return pooled(weights.sum(2).mean(1), self.options["kernel"], "max")
