"""H2O: heavy hitters, by all attention received."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.signal_settings import SignalSettings


class H2OPolicy(Policy):
    """Keep the tokens that have received most attention so far, and the newest ones.

    The score is the sum of attention weights over all queries since the token came, the largest of
    its group, not decayed. Cost: one attention without values per token.

    Reference: Zhang et al., H2O, NeurIPS 2023 (arXiv 2306.14048).
    """

    name: ClassVar[str] = "h2o"

    @property
    def signals(self) -> SignalSettings:
        return SignalSettings(decay=1.0)

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        assert observations.signals is not None
        return observations.signals.history
