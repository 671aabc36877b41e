"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_beacon.core import Observations
from sglang_beacon.policies.base import Policy


class StreamingPolicy(Policy):
    """Keep the first tokens and the most recent ones.

    The score of a token is its place in the cache, so that with the ``n_prefix`` sinks, which are
    never evicted, what stays is sinks + window. Cost: nothing per token.

    Reference: Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024
    (arXiv 2309.17453). Keys keep their own positions here, as everywhere in this project.
    """

    name: ClassVar[str] = "streaming"

    def score(self, keys: torch.Tensor, observations: Observations) -> torch.Tensor:
        num_heads, num_keys, _ = keys.shape
        place = torch.arange(num_keys, device=keys.device, dtype=torch.float32)
        return place.expand(num_heads, num_keys)
