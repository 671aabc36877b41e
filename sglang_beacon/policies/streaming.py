"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.policies.base import Policy


class StreamingPolicy(Policy):
    """Keep the first tokens and the most recent ones.

    The score of a token is its place in the cache, so that with the ``n_prefix`` sinks, which are
    never evicted, what stays is sinks + window. Cost: nothing per token.

    Reference: Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024
    (arXiv 2309.17453). Keys keep their own positions here, as everywhere in this project.
    """

    name: ClassVar[str] = "streaming"

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        place = torch.arange(len(cache.slots), device=cache.slots.device, dtype=torch.float32)
        return place.expand(cache.shape)
