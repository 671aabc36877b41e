"""Reasoning Path Compression: the newest queries, again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.policies.recent_window import RecentWindowPolicy, pooled, with_window


class RPCPolicy(RecentWindowPolicy):
    """Keep what the newest queries attend to on average.

    Each query of the window spreads its attention over the tokens before the window alone; the
    score is the mean of that over all queries and all heads of a layer, averaged over ``kernel``
    neighbours. All heads of a layer, on one rank, keep the same tokens. Cost: one attention of
    ``window`` queries per eviction.

    Reference: Song et al., Reasoning Path Compression, 2025 (arXiv 2505.13866): selector window 32,
    average over 7. The paper's cache grows with each compression, and its prompt is never evicted;
    here the budget stays, and a prompt is safe only where the prefix tree owns it.
    """

    name: ClassVar[str] = "rpc"
    defaults: ClassVar[Mapping[str, Any]] = {**RecentWindowPolicy.defaults, "kernel": 7}

    def score_layer(self, keys: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        window = logits.shape[2]
        before = logits[..., :-window].softmax(-1).mean(dim=(0, 1, 2))
        score = pooled(before[None], self.options["kernel"], "mean")
        return with_window(score, window).expand(len(keys), -1)
