"""H2O: heavy hitters, by all attention received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.signal_settings import SignalSettings


class H2OPolicy(Policy):
    """Keep the tokens that have received most attention so far, and the newest ones.

    Half of what is kept are the newest tokens. The score of the others is the sum of attention
    weights over all queries since the token came, the largest of its group, not decayed. Of a
    prompt, the newest ``prompt_queries`` of each prefilled stretch count, which have to be kept for
    all layers meanwhile. Cost: one attention without values per token, or per ``note_every`` of
    those that are generated.

    Reference: Zhang et al., H2O, NeurIPS 2023 (arXiv 2306.14048).
    """

    name: ClassVar[str] = "h2o"

    defaults: ClassVar[Mapping[str, Any]] = {
        "recent_share": 0.5,
        "note_every": 1,
        "prompt_queries": 1024,
    }

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        if not 0 <= self.options["recent_share"] < 1:
            raise ConfigError("recent_share in --kv-policy-config must lie in [0, 1).")
        self._signals = SignalSettings(
            decay=1.0,
            credit=0.0,
            significance=0.0,
            note_every=self.options["note_every"],
            prompt_queries=self.options["prompt_queries"],
        )

    @property
    def signals(self) -> SignalSettings:
        return self._signals

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        assert observations.signals is not None
        score = observations.signals.history.clone()
        newest = int(self.options["recent_share"] * self.config.keep_ratio * self.config.budget)
        # Above all weights, which add up to no more than one a query.
        score[..., max(score.shape[-1] - newest, 0) :] += observations.position + 1
        return score
