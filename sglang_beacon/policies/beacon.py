"""BeaconKV: beacon queries anticipate where future thoughts will look back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon import ops
from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import Alignment, BufferShape, CachedKeys, Observations
from sglang_beacon.ops.beacon_score import AGGREGATIONS
from sglang_beacon.policies.base import Policy


class BeaconPolicy(Policy):
    """Keep what a few diverse past queries, or the recent ones, attend to.

    Queries that revisit early thoughts form few clusters before RoPE. Farthest point sampling
    keeps one beacon per cluster; at an eviction the beacons are rotated to the current position,
    the recent queries keep theirs, and a key's score is the largest attention weight it receives
    from any of them, over the query heads of its group.

    Cost: one vector copy a token, FPS over 32 queries every 16 tokens, and one attention of 32
    queries over the cache per eviction, that is every eighth of a budget.

    Reference: Kim et al., BeaconKV, ICML 2026 (arXiv 2609.04971), Algorithms 1 and 2.
    """

    name: ClassVar[str] = "beacon"
    defaults: ClassVar[Mapping[str, Any]] = {
        "n_beacon": 16,
        "aggregation": "max",
        "align": True,
    }

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        if self.options["n_beacon"] < 0:
            raise ConfigError("n_beacon in --kv-policy-config must not be negative.")
        if self.options["aggregation"] not in AGGREGATIONS:
            raise ConfigError(
                f"aggregation in --kv-policy-config must be one of {', '.join(AGGREGATIONS)}, "
                f"not {self.options['aggregation']!r}."
            )

    @property
    def observes(self) -> BufferShape:
        return BufferShape(self.options["n_beacon"], self.config.n_recent)

    @property
    def alignment(self) -> Alignment:
        return Alignment(unrotated=not self.options["align"])

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        assert observations.queries is not None
        assert observations.visible is not None
        return ops.beacon_score(
            cache.pools,
            cache.slots,
            observations.queries,
            observations.visible,
            observations.scale,
            self.options["aggregation"],
        )
