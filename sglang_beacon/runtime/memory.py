"""What a request remembers of its tokens, and under RECAS what bounds its errors."""

from __future__ import annotations

import math
from typing import Any

import torch

from sglang_beacon import ops
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import CachedKeys, EvictionPlan
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.policies.signal_settings import SignalSettings
from sglang_beacon.runtime import selectors
from sglang_beacon.runtime.active_set import ActiveSet
from sglang_beacon.runtime.retention import Retention
from sglang_beacon.runtime.signals import Revisits, Signals


class Memory:
    """State of one request beyond its cache, from admission to release.

    Attributes
    ----------
    settings : SignalSettings
    prompt_queries : int
        Newest queries of each prefilled stretch that `after_prefill` is to be given.
    retention : Retention or None
        Under RECAS.
    signals : Signals or None
        Allocated by whoever computes the request, dropped when its cache is lost.
    active : ActiveSet or None
        Under RECAS, where steps do not read everything.
    norms : Tensor [layers, H_q] float32
        Of the newest attention outputs; with ``signals``.
    """

    def __init__(
        self, settings: SignalSettings, recas: RecasSettings | None, config: KVPolicyConfig
    ) -> None:
        self.settings = settings
        self.prompt_queries = settings.prompt_queries or config.n_recent
        self.retention = Retention(recas, config.budget) if recas is not None else None
        self._recas = recas
        self._config = config
        self.revisits = Revisits(
            settings.far_distance or 2 * config.n_recent,
            settings.top_keys,
            settings.look_back,
            config.n_recent,
        )
        self.signals: Signals | None = None
        self.active: ActiveSet | None = None

    def restart(self) -> None:
        """The cache was lost."""
        self.signals = None
        if self.retention is not None:
            self.retention.restart()
        if self.active is not None:
            self.active.restart()

    def begin(
        self, layers: int, query_heads: int, kv_heads: int, selector: str, device: Any
    ) -> None:
        """Allocate for a model; ``selector`` is the one to use where the settings say ``auto``."""
        recurrence = self.settings.recurrence
        self.signals = Signals(layers, kv_heads, self._config.budget, device, recurrence)
        self.norms = torch.zeros(layers, query_heads, device=device)
        self._delimiters = torch.tensor(self.settings.delimiters, dtype=torch.int64, device=device)
        if self._recas is not None and self.active is None:
            name = selector if self._recas.selector == "auto" else self._recas.selector
            chosen = selectors.create(self._recas, name, layers)
            if chosen is not None:
                always = self._config.n_prefix, self._config.n_recent
                self.active = ActiveSet(self._recas, chosen, *always, layers, device)

    def after_prefill(
        self,
        cache: CachedKeys,
        queries: torch.Tensor,
        prompt: int,
        scale: float,
    ) -> None:
        """Take in a stretch of computed tokens.

        Parameters
        ----------
        cache : CachedKeys
            Of all tokens held, with their values.
        queries : Tensor [layers, n, H_q, D]
            Of the newest tokens, rotated.
        prompt : int
            How many of the tokens are of the prompt.
        scale : float
        """
        signals = self.signals
        assert signals is not None
        held, before = len(cache.slots), signals.held
        said = max(before, min(prompt, held))
        credit = self.settings.credit
        signals.extend(before, said, credit, self.settings.prompt_evidence)
        signals.extend(said, held, credit)
        assert cache.values is not None
        signals.see_values(cache.values, cache.slots[before:])
        for index in range(queries.shape[1]):
            seen = held - queries.shape[1] + 1 + index
            self._note(cache, queries[:, index], seen, seen - 1, scale)

    def after_token(
        self,
        cache: CachedKeys,
        queries: torch.Tensor,
        token: torch.Tensor,
        position: int,
        scale: float,
        value_norms: torch.Tensor | None = None,
    ) -> None:
        """Take in a decode step.

        Parameters
        ----------
        cache : CachedKeys
            Of all tokens held, with their values.
        queries : Tensor [layers, H_q, D]
            Rotated.
        token : Tensor [] int64
            What the step computed.
        position : int
            Its logical position.
        scale : float
        value_norms : Tensor [layers, H_kv] float32, optional
            Of the token's values; where they are not known, they are computed.
        """
        signals = self.signals
        assert signals is not None
        signals.extend(position, position + 1, self.settings.credit)
        if value_norms is None:
            assert cache.values is not None
            signals.see_values(cache.values, cache.slots[-1:])
        else:
            signals.see_norms(value_norms)
        if self.settings.delimiters:
            signals.see_token(token, position, self._delimiters)
        weights = self.active.take_weights() if self.active is not None else None
        if position % self.settings.note_every == 0:
            self._note(cache, queries, len(cache.slots), position, scale, weights)
        if self.active is not None:
            self.active.end(position)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one layer over the active set [H_q, D]; see `ActiveSet.attend`."""
        assert self.active is not None
        assert self.signals is not None
        norms = self.signals.value_norm[layer], self.norms[layer]
        return self.active.attend(layer, queries, k_pool, v_pool, slots, scale, *norms)

    def note_eviction(self, plan: EvictionPlan, keep: torch.Tensor) -> None:
        """Follow an eviction that keeps ``keep`` [layers, H_kv, plan.kept]."""
        assert self.signals is not None
        if self.retention is not None:
            self.retention.note_eviction(self.signals, plan, keep)
        self.signals.keep(plan.pinned, keep)
        if self.active is not None:
            self.active.restart()

    def probe(self, plan: EvictionPlan, keep: torch.Tensor) -> None:
        """See what an eviction would drop that does not take place."""
        assert self.signals is not None
        assert self.retention is not None
        self.retention.probe(self.signals, plan, keep, self.norms)

    def report(self) -> dict[str, Any] | None:
        """What is known of the errors so far, for who asked for the request.

        ``delta_bar`` are bounds on dropped attention mass, ``error`` on the relative error of a
        layer's attention output; None where nothing is known. ``retention`` is about what was
        evicted, as the queries of that time saw it, ``active`` about what steps left out, up to the
        latest probe.
        """
        retention, active = self.retention, self.active
        if retention is None:
            return None
        report: dict[str, Any] = {
            "epsilon": retention.settings.epsilon,
            "budget_expansions": retention.expansions,
            "retention": {
                "delta_bar_largest": retention.largest.largest,
                "delta_bar_mean": retention.mean,
                "error_largest": _finite(retention.largest.error),
                "evictions_above_target": retention.unmet,
                "probes": retention.calibration.probes,
                "coverage": retention.calibration.coverage,
            },
        }
        if active is not None:
            done = active.report
            report["active"] = {
                "selector": active.selector.name,
                "steps": done.steps,
                "ratio": done.ratio,
                "delta_bar_largest": done.largest,
                "delta_bar_mean": done.mean,
                "error_largest": done.error,
                "above_target": done.unmet,
                "coverage": active.selector.coverage,
            }
        return report

    def _note(
        self,
        cache: CachedKeys,
        queries: torch.Tensor,
        visible: int,
        position: int,
        scale: float,
        weights: torch.Tensor | None = None,
    ) -> None:
        assert self.signals is not None
        if weights is None:
            limit = torch.tensor([visible], device=cache.slots.device)
            weights = ops.beacon_score(cache.pools, cache.slots, queries[:, :, None], limit, scale)
        settings = self.settings
        decay = settings.decay**settings.note_every
        self.signals.note(weights, position, decay, self.revisits, settings.significance)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
