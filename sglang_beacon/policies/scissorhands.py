"""Scissorhands: tokens that are pivotal again and again."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_beacon.policies.recent_window import RecentWindowPolicy


class ScissorhandsPolicy(RecentWindowPolicy):
    """Keep tokens that many of the newest queries attend to more than to an average token.

    The score counts the window's queries, over the query heads of a group, whose weight on the
    token exceeds the mean of what they see; ties go to the larger total weight. Cost: one attention
    of ``window`` queries per eviction.

    Reference: Liu et al., Scissorhands, NeurIPS 2023 (arXiv 2305.17118), Algorithm 2. The paper's
    history window is as long as its queries are kept; here they are the window's.
    """

    name: ClassVar[str] = "scissorhands"

    def score_layer(self, keys: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.softmax(-1)
        seen = logits.isfinite().sum(-1, keepdim=True)
        pivotal = (weights > 1 / seen).float()
        total = weights.sum(dim=(1, 2))
        return pivotal.sum(dim=(1, 2)) + total / total.amax(-1, keepdim=True).clamp(min=1e-30) / 2
