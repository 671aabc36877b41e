"""R-KV: importance, and less of what is said already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.policies.recent_window import RecentWindowPolicy, pooled, with_window


class RKVPolicy(RecentWindowPolicy):
    """Keep tokens that are attended to and unlike the others.

    ``mix I - (1 - mix) R``. Importance ``I`` is the attention of the window's queries to the tokens
    before it, by the largest logit of a group, averaged over the queries; then the maximum over
    ``kernel`` neighbours. Redundancy ``R`` is the softmax over tokens of the mean cosine similarity
    of their keys to all others', where each token's newest neighbour above ``similar`` does not
    count, so that the newest of many alike survives.

    Cost: one attention of ``window`` queries and all pairs of keys per eviction.

    Reference: Cai et al., R-KV, 2025 (arXiv 2505.24133): window 8, mix 0.1, similar 0.5.
    """

    name: ClassVar[str] = "rkv"
    defaults: ClassVar[Mapping[str, Any]] = {
        "window": 8,
        "kernel": 7,
        "mix": 0.1,
        "similar": 0.5,
    }

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        if not 0 <= self.options["mix"] <= 1:
            raise ConfigError("mix in --kv-policy-config must lie between 0 and 1.")

    def score_layer(self, keys: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        window = logits.shape[2]
        before = logits[..., :-window].amax(1).softmax(-1).mean(1)
        importance = with_window(pooled(before, self.options["kernel"], "max"), window)
        mix: float = self.options["mix"]
        return mix * importance - (1 - mix) * self._redundancy(keys)

    def _redundancy(self, keys: torch.Tensor) -> torch.Tensor:
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        similarity = unit @ unit.transpose(1, 2)
        similarity.diagonal(dim1=1, dim2=2).zero_()
        place = torch.arange(keys.shape[1], device=keys.device)
        newest = torch.where(similarity > self.options["similar"], place, -1).amax(-1, keepdim=True)
        # Rows without a similar key have nothing to forget: their own place holds a zero.
        newest = torch.where(newest < 0, place[:, None], newest)
        redundancy: torch.Tensor = similarity.scatter_(2, newest, 0.0).mean(1).softmax(-1)
        return redundancy
