"""Forecasts are checked against what came, and the budget follows the bound."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import EvictionPlan, RequestLengths
from sglang_beacon.policies import create
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.mailbox import Mailbox
from sglang_beacon.runtime.request import RequestState
from sglang_beacon.runtime.retention import Drop, Retention
from sglang_beacon.runtime.signals import Revisits, Signals

LAYERS, KV_HEADS, GROUP = 2, 3, 2
HELD = 50
BUDGET = 64


def test_what_was_sent_with_the_newest_token_waits() -> None:
    mailbox = Mailbox()
    mailbox.send(3, torch.tensor(1.0))
    mailbox.send(3, torch.tensor(2.0))
    mailbox.send(4, torch.tensor(3.0))
    assert mailbox.collect(before=3) == []
    assert [float(value) for value in mailbox.collect(before=4)] == [1.0, 2.0]
    assert [float(value) for value in mailbox.collect(before=9)] == [3.0]
    mailbox.send(10, torch.tensor(4.0))
    mailbox.clear()
    assert mailbox.collect(before=99) == []


class Cache:
    """Signals of a cache whose dropped tokens always get the same share of attention."""

    def __init__(self, share: float) -> None:
        self.signals = Signals(LAYERS, KV_HEADS, HELD)
        self.signals.extend(0, HELD)
        self.signals.value_norm += 3.0
        self.norms = torch.full((LAYERS, KV_HEADS * GROUP), 2.0)
        self.plan = EvictionPlan(RequestLengths(HELD, 10, HELD), kept=30, prompt_tokens=0)
        self.keep = torch.arange(20, HELD).expand(LAYERS, KV_HEADS, -1)
        self.note(share)

    def note(self, share: float) -> None:
        weights = torch.zeros(LAYERS, KV_HEADS, HELD)
        weights[..., 10:20] = share / 10
        weights[..., 30] = 1 - share
        self.signals.note(weights, HELD, 1.0, Revisits(far=32))

    def at(self, logical: int) -> EvictionPlan:
        lengths = RequestLengths(logical, 10, HELD)
        return EvictionPlan(lengths, kept=30, prompt_tokens=0)


def test_bound_of_a_forecast() -> None:
    """Residuals of what was forecast as 0.1 and came as 0.12 widen 0.11 to 0.13."""
    retention, cache = Retention(RecasSettings(alpha=0.2), BUDGET), Cache(0.1)
    retention.probe(cache.signals, cache.at(100), cache.keep, cache.norms)
    assert retention.bound(105) == Drop()
    cache.note(0.12)
    retention.probe(cache.signals, cache.at(110), cache.keep, cache.norms)
    assert retention.bound(110) == Drop(), "still on its way"
    bound = retention.bound(111)
    assert retention.calibration.probes == LAYERS * KV_HEADS
    assert bound.largest == bound.mean == pytest.approx(0.13)
    # Each layer: 6 query heads of 2 * 3 * 0.13, against outputs of norm 2 each.
    expected = math.sqrt(6 * (2 * 3 * 0.13) ** 2) / math.sqrt(6 * 2.0**2)
    assert bound.error == pytest.approx(expected)


def test_an_eviction_checks_the_forecast_it_was_decided_by() -> None:
    retention, cache = Retention(RecasSettings(alpha=0.2), BUDGET), Cache(0.1)
    retention.probe(cache.signals, cache.at(100), cache.keep, cache.norms)
    cache.note(0.3)
    retention.note_eviction(cache.signals, cache.at(103), cache.keep)
    assert retention.bound(110).largest == pytest.approx(0.3)
    # What that probe awaited is gone: the next one has nothing to compare with.
    retention.probe(cache.signals, cache.at(120), cache.keep, cache.norms)
    retention.bound(130)
    assert retention.calibration.probes == LAYERS * KV_HEADS


def test_a_lost_cache_keeps_what_is_known_of_residuals() -> None:
    retention, cache = Retention(RecasSettings(alpha=0.2), BUDGET), Cache(0.1)
    for step in range(3):
        retention.probe(cache.signals, cache.at(100 + step), cache.keep, cache.norms)
    assert retention.bound(110).error < math.inf
    retention.restart()
    assert retention.bound(120) == Drop()
    retention.probe(cache.signals, cache.at(130), cache.keep, cache.norms)
    assert retention.bound(140).error < math.inf


@pytest.mark.parametrize(
    ("max_budget", "budgets"), [(0, [72, 80, 88, 96, 104, 112, 120, 128]), (70, [70]), (64, [])]
)
def test_budgets_grow_by_eighths_up_to_the_limit(max_budget: int, budgets: list[int]) -> None:
    retention = Retention(RecasSettings(max_budget=max_budget), BUDGET)
    seen, budget = [], retention.larger(BUDGET)
    while budget is not None:
        seen.append(budget)
        budget = retention.larger(budget)
    assert seen == budgets


def state(**options: object) -> RequestState:
    config = KVPolicyConfig(policy="recas", budget=BUDGET, options=options)
    return RequestState(config, create(config), page_size=1)


def settled(request: RequestState, held: int, **kwargs: object) -> int:
    """The budget after a decision at ``held`` tokens."""
    lengths = RequestLengths(held, 0, held)
    allowance = request.settle(lengths, 0, **kwargs)  # type: ignore[arg-type]
    plan = request.plan(lengths, allowance)
    assert (plan.eviction is not None) == (held >= request.config.budget)
    return request.config.budget


def test_an_unknown_bound_grows_the_budget_step_by_step() -> None:
    request = state()
    assert settled(request, 63) == 64
    assert settled(request, 64) == 72
    assert settled(request, 71) == 72
    assert settled(request, 100) == 104, "as many steps as it takes"
    assert settled(request, 128) == 128
    assert request.memory is not None
    report = request.memory.report()
    assert report["budget_expansions"] == 8
    assert report["retention"]["evictions_above_target"] == 1
    assert report["retention"]["error_largest"] is None
    assert report["retention"]["delta_bar_largest"] == 1.0


def test_a_bound_below_the_target_evicts_at_once() -> None:
    request = state(epsilon=0.5)
    assert settled(request, 64, agreed=lambda error: 0.4) == 64
    assert request.memory is not None
    assert request.memory.retention.unmet == 0


def test_all_ranks_follow_the_worst() -> None:
    assert settled(state(), 64, agreed=lambda error: 0.0) == 64
    assert settled(state(), 64, agreed=lambda error: 7.0) == 72


def test_a_pool_without_room_keeps_the_budget_and_says_so() -> None:
    request = state()
    asked = []

    def has_room(tokens: int) -> bool:
        asked.append(tokens)
        return len(asked) == 1

    assert settled(request, 72, has_room=has_room) == 72
    assert asked == [8, 8], "steps of 8 tokens: the second finds no room"
    assert request.memory is not None
    assert request.memory.retention.unmet == 1


def test_probes_come_at_their_interval() -> None:
    request = state(probe_interval=10, epsilon=100.0)
    probes = []
    for held in range(30, 60):
        lengths = RequestLengths(held, 0, held)
        plan = request.plan(lengths, request.settle(lengths, 0))
        if plan.probe is not None:
            probes.append(held)
            assert plan.probe.kept == held * 7 // 8
    assert probes == [30, 40, 50]
