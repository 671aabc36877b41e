"""Expected attention: what queries to come will attend to, judged by those that were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import MAX_TOKENS, ConfigError, KVPolicyConfig
from sglang_beacon.core import Alignment, BufferShape, CachedKeys, Observations
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.recent_window import require_window


class ExpectedAttentionPolicy(Policy):
    """Keep what a normal distribution of future queries is expected to attend to.

    Mean and covariance of the window's queries before RoPE are rotated by the average over the next
    ``n_future`` positions. A key's weight is the softmax over keys of the expected logit plus half
    its variance, averaged over the query heads of a group, and then multiplied by the norm of the
    value. Cost: the logits of ``window`` queries per eviction.

    Reference: Devoto et al., Expected Attention, 2025 (arXiv 2510.00636): 512 positions, of the
    newest 128 queries while decoding. Its prefill form leaves the first four queries out of the
    statistics; while decoding, as here, none is left out.
    """

    name: ClassVar[str] = "expected_attention"
    defaults: ClassVar[Mapping[str, Any]] = {
        "window": 128,
        "n_future": 512,
        "covariance": True,
        "value_norm": True,
    }

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        require_window(self.options["window"])
        if not 1 <= self.options["n_future"] < MAX_TOKENS:
            raise ConfigError("n_future in --kv-policy-config must be positive.")

    @property
    def observes(self) -> BufferShape:
        return BufferShape(0, self.options["window"])

    @property
    def n_newest(self) -> int:
        # Queries stand for the future: none needs its own token.
        return self.config.n_recent

    @property
    def alignment(self) -> Alignment:
        return Alignment(future=self.options["n_future"])

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        assert observations.queries is not None
        assert cache.values is not None
        layers, kv_heads, _ = cache.shape
        scores = []
        for index in range(layers):
            queries = observations.queries[index]
            queries = queries.view(kv_heads, -1, *queries.shape[1:])
            keys = cache.layer(index).float()
            logits = observations.scale * torch.einsum("hgrd,hnd->hgrn", queries, keys)
            expected = logits.mean(2)
            if self.options["covariance"]:
                expected = expected + logits.var(2, correction=0) / 2
            weights = expected.softmax(-1).mean(1)
            if self.options["value_norm"]:
                values = cache.values[index].index_select(0, cache.slots)
                weights = weights * values.float().norm(dim=-1).T
            scores.append(weights)
        return torch.stack(scores)
