"""The ablation of BeaconKV without farthest point sampling: the first queries and the newest."""

from __future__ import annotations

from typing import ClassVar

from sglang_beacon.core import BufferShape
from sglang_beacon.policies.beacon import BeaconPolicy


class InitialRecentPolicy(BeaconPolicy):
    """Score like BeaconKV, with the request's first ``n_beacon`` queries in place of beacons.

    What it lacks are queries from the middle of the reasoning, and the choice among them. Cost:
    BeaconKV's without FPS.

    Reference: Kim et al., BeaconKV, ICML 2026 (arXiv 2609.04971), Table 3, Initial+Recent.
    """

    name: ClassVar[str] = "initial_recent"

    @property
    def observes(self) -> BufferShape:
        return super().observes._replace(farthest=False)
