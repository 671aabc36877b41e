"""SnapKV, applied again and again while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.policies.recent_window import RecentWindowPolicy, pooled, with_window


class SnapKVPolicy(RecentWindowPolicy):
    """Keep clusters of tokens that the newest queries attend to.

    The score is the sum of attention weights over the window's queries, averaged over the query
    heads of a group, then the maximum over ``kernel`` neighbours before the window. Cost: one
    attention of ``window`` queries per eviction.

    Reference: Li et al., SnapKV, NeurIPS 2024 (arXiv 2404.14469): window 32, maximum over 7. The
    paper compresses a prompt once; here it is applied at each eviction, as BeaconKV's Table 5 does.
    """

    name: ClassVar[str] = "snapkv"
    defaults: ClassVar[Mapping[str, Any]] = {**RecentWindowPolicy.defaults, "kernel": 7}

    def score_layer(self, keys: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        window = logits.shape[2]
        before = logits.softmax(-1)[..., :-window].sum(2).mean(1)
        return with_window(pooled(before, self.options["kernel"], "max"), window)
