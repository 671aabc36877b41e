"""Random eviction of generated tokens: the baseline every scored method has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy

MAX_SEED = 2**32


class RandomPolicy(Policy):
    """Keep the prompt, and a uniform random choice of the generated tokens per head.

    Scores are uniform in [0, 1), one higher for prompt tokens, so that generated tokens go first
    and a prompt larger than the budget is itself thinned at random. The draw depends on the seed
    and the logical position alone: the same request is compressed in the same way at any batch
    size. Cost: one draw per cached token and eviction.

    Reference: the random baseline with the prompt protected of arXiv 2609.03430.
    """

    name: ClassVar[str] = "random"
    defaults: ClassVar[Mapping[str, Any]] = {"seed": 0}

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        if not 0 <= self.options["seed"] < MAX_SEED:
            raise ConfigError(f"seed in --kv-policy-config must lie between 0 and {MAX_SEED - 1}.")

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        generator = torch.Generator(cache.slots.device)
        # An odd multiplier keeps neighbouring seeds apart.
        generator.manual_seed(self.options["seed"] * 1_000_003 + observations.position)
        score = torch.rand(cache.shape, generator=generator, device=cache.slots.device)
        score[..., : observations.prompt_tokens] += 1
        return score
