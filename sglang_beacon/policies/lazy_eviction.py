"""LazyEviction: tokens that become important again and again, by their longest pause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.signal_settings import SignalSettings


class LazyEvictionPolicy(Policy):
    """Keep the tokens whose next use is still to be expected.

    A token is active when its attention weight exceeds ``threshold``. With the time ``t - a`` since
    it last was, and its longest pause ``m`` between two such times, the score is
    ``2 sigma(-(t - a) / m) * 2 sigma(-1 / m)``; it is 0 for a token that was never active again.
    Of a prompt, the newest ``n_recent`` queries of each prefilled stretch count. Cost: one
    attention without values per token, or per ``note_every`` of those that are generated.

    Reference: Zhang et al., LazyEviction, 2025 (arXiv 2506.15969). The paper tunes the threshold to
    each model; the default is this project's.
    """

    name: ClassVar[str] = "lazy_eviction"
    defaults: ClassVar[Mapping[str, Any]] = {"threshold": 0.01, "note_every": 1}

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        if not 0 < self.options["threshold"] < 1:
            raise ConfigError("threshold in --kv-policy-config must lie between 0 and 1.")
        self._signals = SignalSettings(
            credit=0.0,
            note_every=self.options["note_every"],
            recurrence=self.options["threshold"],
        )

    @property
    def signals(self) -> SignalSettings:
        return self._signals

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        signals = observations.signals
        assert signals is not None
        assert signals.activated is not None
        assert signals.interval is not None
        # Never active again: infinitely unlikely to be.
        pause = signals.interval.clamp(min=1e-6)
        due = 2 * torch.sigmoid((signals.activated - observations.position) / pause)
        return due * 2 * torch.sigmoid(-1 / pause) * (signals.interval > 0)
