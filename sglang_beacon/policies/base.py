"""The interface of a policy, and the mechanics that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon import ops
from sglang_beacon.config import (
    SHARED_KEYS,
    ConfigError,
    KVPolicyConfig,
    least_budget,
    reject_unknown,
)
from sglang_beacon.core import Alignment, BufferShape, CachedKeys, EvictionPlan, Observations
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.policies.signal_settings import SignalSettings


class Policy(ABC):
    """Decides which of a request's cached tokens stay, per layer and KV head.

    A method overrides `score`; what is always kept, the Top-K and the page rounding live here.
    The same object serves in the server, the simulator and the benchmarks.

    Class attributes
    ----------------
    name : str
        Name in the registry and on the command line.
    defaults : Mapping[str, object]
        Options of the method with their defaults; a value given must have the default's type.
    evicts : bool
        Whether a request is held to its budget; otherwise it keeps everything, and only reads less.
    """

    name: ClassVar[str]
    evicts: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: KVPolicyConfig, page_size: int = 1) -> None:
        self.config = config
        self.options = self._checked_options(config.options)
        self.least_budget = least_budget(self.least_kept, config.keep_ratio, page_size)
        if config.budget < self.least_budget:
            raise ConfigError(
                f"--kv-budget {config.budget} is too small for --kv-policy {self.name}: it needs "
                f"at least {self.least_budget} tokens at page size {page_size}."
            )

    @property
    def least_kept(self) -> int:
        """Fewest tokens an eviction may leave: those always kept, and one to choose."""
        return self.config.n_prefix + self.n_newest + 1

    @property
    def n_newest(self) -> int:
        """Newest tokens that are never evicted; a recent query sees where it was itself."""
        return max(self.config.n_recent, self.observes.n_recent if self.observes else 0)

    @property
    def observes(self) -> BufferShape | None:
        """Rows of the query buffer that the method needs; None if it looks at no queries."""
        return None

    @property
    def alignment(self) -> Alignment:
        """Where the query buffer's rows are rotated to before they score."""
        return Alignment()

    @property
    def signals(self) -> SignalSettings | None:
        """What has to be remembered of each token; None if nothing."""
        return self.recas

    @property
    def recas(self) -> RecasSettings | None:
        """Settings of bounds, budget and active sets; None for methods without."""
        return None

    @abstractmethod
    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        """Score the cached tokens of one request, in all layers.

        Parameters
        ----------
        cache : CachedKeys
        observations : Observations

        Returns
        -------
        Tensor [layers, H_kv, N] float32
            Higher means keep; finite.
        """

    def keep(
        self, cache: CachedKeys, observations: Observations, plan: EvictionPlan
    ) -> torch.Tensor:
        """Choose the tokens that stay.

        Parameters
        ----------
        cache : CachedKeys
            Of ``plan.lengths.held`` tokens.
        observations : Observations
        plan : EvictionPlan

        Returns
        -------
        Tensor [layers, H_kv, plan.kept] int64
            Row positions in ``[pinned, held)``, ascending: the request's first ``n_prefix``
            tokens as far as they are not pinned, its last ``n_newest``, and the best of the rest.
        """
        pinned, held = plan.pinned, plan.lengths.held
        score = self.score(cache, observations)[..., pinned:].clone()
        score[..., : max(self.config.n_prefix - pinned, 0)] = torch.inf
        score[..., held - pinned - self.n_newest :] = torch.inf
        return ops.select_topk(score, plan.kept) + pinned

    def _checked_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in given.items():
            if key not in self.defaults:
                raise reject_unknown(
                    key, (*self.defaults, *SHARED_KEYS), "the --kv-policy-config key"
                )
            expected = type(self.defaults[key])
            # JSON writes 1.0 as 1.
            if type(value) is not expected and not (expected is float and type(value) is int):
                raise ConfigError(
                    f"{key} in --kv-policy-config must be of type {expected.__name__}, "
                    f"not {value!r}."
                )
        return {**self.defaults, **given}
