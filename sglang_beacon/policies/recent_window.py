"""What methods share that score by the newest queries alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import BufferShape, CachedKeys, Observations
from sglang_beacon.ops.beacon_score import observed_logits
from sglang_beacon.policies.base import Policy

MAX_WINDOW = 1024


class RecentWindowPolicy(Policy):
    """Observes the last ``window`` queries, and never evicts their tokens.

    A ``kernel`` among the options is the width of a pooling.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"window": 32}

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        super().__init__(config, page_size)
        require_window(self.observes.n_recent)
        kernel = self.options.get("kernel", 1)
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError("kernel in --kv-policy-config must be a positive odd number.")

    @property
    def observes(self) -> BufferShape:
        return BufferShape(0, self.options["window"])

    @abstractmethod
    def score_layer(self, keys: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Score one layer.

        Parameters
        ----------
        keys : Tensor [H_kv, N, D]
            Rotated to their own positions.
        logits : Tensor [H_kv, group, R, N] float32
            Of each observed query, minus infinity where it does not see.

        Returns
        -------
        Tensor [H_kv, N] float32
        """

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        layers = enumerate(attention_logits(cache, observations))
        return torch.stack([self.score_layer(cache.layer(i), logits) for i, logits in layers])


def require_window(size: int) -> None:
    """Refuse a window of no queries, or of too many."""
    if not 1 <= size <= MAX_WINDOW:
        raise ConfigError(f"window in --kv-policy-config must lie between 1 and {MAX_WINDOW}.")


def attention_weights(cache: CachedKeys, observations: Observations) -> Iterator[torch.Tensor]:
    """Weights [H_kv, group, R, N] float32 of the observed queries, layer by layer."""
    return (logits.softmax(-1) for logits in attention_logits(cache, observations))


def attention_logits(cache: CachedKeys, observations: Observations) -> Iterator[torch.Tensor]:
    """Logits likewise, minus infinity where a query does not see."""
    queries, visible = observations.queries, observations.visible
    assert queries is not None
    assert visible is not None
    layers, kv_heads, held = cache.shape
    for index in range(layers):
        logits = observed_logits(cache.layer(index), queries[index], visible, observations.scale)
        yield logits.view(kv_heads, -1, len(visible), held)


def pooled(scores: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """Smooth scores [H_kv, N] over neighbours: ``kind`` is ``"max"``, or ``"mean"`` with zeros."""
    pool = torch.nn.functional.max_pool1d if kind == "max" else torch.nn.functional.avg_pool1d
    return pool(scores, kernel, stride=1, padding=kernel // 2)


def with_window(scores: torch.Tensor, window: int) -> torch.Tensor:
    """Scores [H_kv, N] of all tokens, given those before the window: its own stay in any case."""
    return torch.nn.functional.pad(scores, (0, window))
