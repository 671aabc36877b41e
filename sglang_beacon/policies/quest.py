"""Quest: keep everything, and read the pages that may matter."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.recas_settings import RecasSettings


class QuestPolicy(Policy):
    """Read as many tokens per step as the budget says, of a cache that is never evicted from.

    Each page of 16 keys keeps its smallest and largest value per dimension, which bound every logit
    in it. A step reads the pages with the highest bounds, a KV head's pages for all the query heads
    of its group. It saves reading, not memory: a request takes as many slots as without a policy.

    Reference: Tang et al., Quest, ICML 2024 (arXiv 2406.10774). The paper reads everything in the
    first two layers; here all layers are alike. Cost: two vectors per page and step.
    """

    name: ClassVar[str] = "quest"
    evicts: ClassVar[bool] = False

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        self._settings = RecasSettings(
            selector="pages",
            ladder=(config.budget,),
            epsilon=1e6,
            note_every=2**20,
            max_budget=config.budget,
        )

    @property
    def recas(self) -> RecasSettings:
        return self._settings

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        raise NotImplementedError("nothing is evicted")
