"""How far an eviction may reach: a forecast of what it drops, its errors, and a budget that grows.

Every `probe_interval` tokens the policy is asked what it would evict now, and the attention history
of those tokens forecasts what a query will give them. The next probe, or the eviction itself, sees
what the newest query really gave them; the residuals widen later forecasts to bounds that hold for
a share ``1 - alpha``, as far as residuals are exchangeable (`runtime.bounds`). They are of queries
that were there: what later queries would have given to an evicted token, nobody can know.

In a layer whose heads' outputs have the norm ``||o||`` together, an eviction is off by at most
``error = sqrt(sum over query heads of (2 V_max delta)^2) / ||o||``. When an eviction is due and the
largest error of all layers is above the target, the budget grows by an eighth instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_beacon.core import EvictionPlan
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.bounds import CalibratedDrop
from sglang_beacon.runtime.mailbox import Mailbox
from sglang_beacon.runtime.signals import Signals

# What the budget grows by, as a share of what was asked for.
STEPS = 8


class Forecast(NamedTuple):
    """On the host: predicted mass [layers, H_kv], and the error that each unit of it causes."""

    predicted: torch.Tensor
    gain: torch.Tensor


class Drop(NamedTuple):
    """Bounds on what the latest eviction dropped.

    ``largest`` and ``mean`` are of the mass over layers and heads, ``error`` is of the worst layer;
    infinite while nothing is known.
    """

    largest: float = 1.0
    mean: float = 1.0
    error: float = math.inf


class Retention:
    """Forecasts, calibration and budget of one request.

    Attributes
    ----------
    expansions : int
        How often the budget grew.
    evictions, unmet : int
        How many evictions there were, and how many of them above the target.
    largest : Drop
        The largest of each bound over all evictions.
    mean : float
        Mean bound on the mass that an eviction dropped.
    """

    def __init__(self, settings: RecasSettings, budget: int) -> None:
        self.settings = settings
        self.calibration = CalibratedDrop(settings.alpha, settings.calibration_probes)
        self.expansions = self.evictions = self.unmet = 0
        self.largest = Drop(0.0, 0.0, 0.0)
        self.mean = 0.0
        self._step = max(budget // STEPS, 1)
        self._limit = settings.limit(budget)
        self._mailbox = Mailbox()
        self._forecast: Forecast | None = None
        # On the device: what the latest probe would have evicted, by row position.
        self._awaited: torch.Tensor | None = None

    def restart(self) -> None:
        """The cache was lost; what is known of residuals stays."""
        self._mailbox.clear()
        self._forecast = self._awaited = None

    # On the device.

    def probe(
        self, signals: Signals, plan: EvictionPlan, keep: torch.Tensor, norms: torch.Tensor
    ) -> None:
        """Forecast what an eviction would drop, and see what the one before would have dropped.

        Parameters
        ----------
        signals : Signals
        plan : EvictionPlan
            Of an eviction that does not take place.
        keep : Tensor [layers, H_kv, plan.kept] int64
            What the policy would keep.
        norms : Tensor [layers, H_q] float32
            Of the newest attention outputs.
        """
        unknown = torch.full_like(signals.value_norm, torch.nan)
        true = unknown if self._awaited is None else _mass(signals.relevance, self._awaited)
        self._awaited = _dropped(plan, keep)
        predicted = _mass(signals.history, self._awaited) / max(signals.noted, 1e-30)
        group = norms.shape[1] // signals.value_norm.shape[1]
        layer_norm = norms.norm(dim=1, keepdim=True).clamp(min=1e-30)
        gain = 2 * math.sqrt(group) * signals.value_norm / layer_norm
        self._mailbox.send(plan.lengths.logical - 1, torch.stack((true, predicted, gain)))

    def note_eviction(self, signals: Signals, plan: EvictionPlan, keep: torch.Tensor) -> None:
        """See what the newest query gave to the tokens that are evicted now."""
        true = _mass(signals.relevance, _dropped(plan, keep))
        unknown = torch.full_like(true, torch.nan)
        self._mailbox.send(plan.lengths.logical - 1, torch.stack((true, unknown, unknown)))
        self._awaited = None

    # On the host.

    def bound(self, logical: int) -> Drop:
        """What an eviction after ``logical`` tokens drops at the most."""
        for true, predicted, gain in self._mailbox.collect(before=logical - 1):
            if self._forecast is not None and not true.isnan().any():
                guesses = self._forecast.predicted.flatten().tolist()
                self.calibration.observe(guesses, true.flatten().tolist())
            if not predicted.isnan().any():
                self._forecast = Forecast(predicted, gain)
        quantile = self.calibration.quantile
        if self._forecast is None or math.isinf(quantile):
            return Drop()
        delta = (self._forecast.predicted + quantile).clamp(0, 1)
        error = (self._forecast.gain * delta).norm(dim=1).max()
        return Drop(float(delta.max()), float(delta.mean()), float(error))

    def larger(self, budget: int) -> int | None:
        """The next budget; None at the limit."""
        return min(budget + self._step, self._limit) if budget < self._limit else None

    def count(self, drop: Drop) -> None:
        """An eviction takes place under this bound."""
        self.evictions += 1
        self.unmet += drop.error > self.settings.epsilon
        self.mean += (drop.mean - self.mean) / self.evictions
        self.largest = Drop(*map(max, zip(self.largest, drop, strict=True)))


def _dropped(plan: EvictionPlan, keep: torch.Tensor) -> torch.Tensor:
    """Which row positions [layers, H_kv, held] an eviction gives up."""
    dropped = torch.zeros(
        (*keep.shape[:2], plan.lengths.held), dtype=torch.bool, device=keep.device
    )
    dropped[..., plan.pinned :] = True
    return dropped.scatter_(2, keep, False)


def _mass(signal: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """Sum [layers, H_kv] of a signal over some row positions."""
    return torch.where(dropped, signal[..., : dropped.shape[2]], 0.0).sum(-1)
