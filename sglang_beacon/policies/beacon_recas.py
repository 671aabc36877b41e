"""BeaconKV and RECAS together: revisits to come, and those that have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.core import CachedKeys, Observations, TokenSignals
from sglang_beacon.policies.beacon import BeaconPolicy
from sglang_beacon.policies.recas import RecasPolicy


class BeaconRecasPolicy(RecasPolicy, BeaconPolicy):
    """Keep what beacons attend to, and what has been attended to.

    ``u = b + relevance_weight r + history_weight h + evidence_weight min(g, evidence_cap)``: ``b``
    is BeaconKV's score, ``r`` and ``h`` are RECAS's, and evidence is taken as it is, in attention
    mass. Beacons foretell revisits that have not happened yet, evidence remembers those that have.
    All of it is as large as attention weights are: a term that outweighs the others, as RECAS's own
    evidence would, keeps whatever was looked at twice, and plain text looks at most of itself
    twice. Bounds, budget and active set are RECAS's.

    Cost: BeaconKV's and RECAS's together.

    Reference: those of `BeaconPolicy` and `RecasPolicy`; the combination is this project's.
    """

    name: ClassVar[str] = "beacon+recas"
    defaults: ClassVar[Mapping[str, Any]] = {
        **BeaconPolicy.defaults,
        **RecasPolicy.defaults,
        "relevance_weight": 0.0,
        "history_weight": 0.1,
        "evidence_cap": 0.01,
    }

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        foretold = BeaconPolicy.score(self, cache, observations)
        return foretold + RecasPolicy.score(self, cache, observations)

    def _evidence(self, signals: TokenSignals) -> torch.Tensor:
        return signals.evidence.clamp(max=self._recas.evidence_cap)
