"""BeaconKV and RECAS together: revisits to come, and those that have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.beacon import BeaconPolicy
from sglang_beacon.policies.recas import RecasPolicy


class BeaconRecasPolicy(RecasPolicy, BeaconPolicy):
    """Keep what beacons attend to, and what has been revisited.

    The score is ``BeaconKV's + evidence_weight g``: beacons foretell revisits that have not
    happened yet, evidence remembers those that have. RECAS's relevance and history have no part
    in it, since the recent queries among the observations say what they would. Bounds, budget and
    active set are RECAS's.

    Cost: BeaconKV's and RECAS's together.

    Reference: those of `BeaconPolicy` and `RecasPolicy`; the combination is this project's.
    """

    name: ClassVar[str] = "beacon+recas"
    defaults: ClassVar[Mapping[str, Any]] = {**BeaconPolicy.defaults, **RecasPolicy.defaults}

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        assert observations.signals is not None
        foretold = BeaconPolicy.score(self, cache, observations)
        return foretold + self._weighted_evidence(observations.signals)
