"""BeaconKV and RECAS together: revisits to come, and those that have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.beacon import BeaconPolicy
from sglang_beacon.policies.recas import RecasPolicy


class BeaconRecasPolicy(RecasPolicy, BeaconPolicy):
    """Keep what beacons attend to, and what has been attended to.

    The score is the sum of both: beacons foretell revisits that have not happened yet, RECAS's
    evidence remembers those that have, and its relevance and history speak for the rest. Bounds,
    budget and active set are RECAS's.

    Cost: BeaconKV's and RECAS's together.

    Reference: those of `BeaconPolicy` and `RecasPolicy`; the combination is this project's.
    """

    name: ClassVar[str] = "beacon+recas"
    defaults: ClassVar[Mapping[str, Any]] = {**BeaconPolicy.defaults, **RecasPolicy.defaults}

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        foretold = BeaconPolicy.score(self, cache, observations)
        return foretold + RecasPolicy.score(self, cache, observations)
