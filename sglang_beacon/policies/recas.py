"""RECAS: retention by relevance, history and evidence, under a bound on the attention error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import CachedKeys, Observations, TokenSignals
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.recas_settings import RecasSettings


class RecasPolicy(Policy):
    """Keep tokens by what they were, are and will probably be read for.

    ``u = relevance_weight r + history_weight h + evidence_weight g`` for each token and KV head:
    ``r`` is the newest query's attention, ``h`` the decayed sum of all attention received, and
    ``g`` the undecayed sum of that from far away. Each is the largest of the group and divided by
    its largest value among the tokens that may be evicted: attention sinks, which never are, would
    otherwise leave nothing of ``r`` and ``h``.

    Cost: one attention without values per token, over what is retained.

    Reference: Ning et al., RECAS (Research Square 2026), section 2; the split between local
    attention and revisits is this project's.
    """

    name: ClassVar[str] = "recas"
    defaults: ClassVar[Mapping[str, Any]] = RecasSettings.defaults()

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        self._recas = RecasSettings.of(self.options)
        most = self._recas.max_budget
        if most and most < config.budget:
            raise ConfigError(
                f"max_budget {most} in --kv-policy-config must not be below --kv-budget "
                f"{config.budget}."
            )

    @property
    def recas(self) -> RecasSettings:
        return self._recas

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        signals = observations.signals
        assert signals is not None
        return (
            self._recas.relevance_weight * self._normalised(signals.relevance)
            + self._recas.history_weight * self._normalised(signals.history)
            + self._recas.evidence_weight * self._evidence(signals)
        )

    def _evidence(self, signals: TokenSignals) -> torch.Tensor:
        return self._normalised(signals.evidence.clamp(max=self._recas.evidence_cap))

    def _normalised(self, signal: torch.Tensor) -> torch.Tensor:
        """Divide a signal [layers, H_kv, N] by its largest value among what may be evicted."""
        begin, end = self.config.n_prefix, signal.shape[-1] - self.config.n_recent
        return signal / signal[..., begin:end].amax(-1, keepdim=True).clamp(min=1e-30)
