"""KeyDiff: keys unlike the others."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy


class KeyDiffPolicy(Policy):
    """Keep keys that point away from the mean direction of all keys.

    The score is minus the cosine similarity to the mean of the normalised keys. It looks at no
    query. Cost: one pass over the keys per eviction.

    Reference: Park et al., KeyDiff, 2025 (arXiv 2504.15364).
    """

    name: ClassVar[str] = "keydiff"

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        scores = []
        for index in range(len(cache.pools)):
            unit = torch.nn.functional.normalize(cache.layer(index).float(), dim=-1)
            anchor = torch.nn.functional.normalize(unit.mean(1, keepdim=True), dim=-1)
            scores.append(-(unit * anchor).sum(-1))
        return torch.stack(scores)
