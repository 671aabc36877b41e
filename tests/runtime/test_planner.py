"""When things happen, from lengths alone: one request, token by token, under random settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_beacon import policies
from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import (
    BufferShape,
    EvictionPlan,
    Fold,
    ObservationPhase,
    RequestLengths,
    RequestPlan,
)
from sglang_beacon.runtime import phase as phases
from sglang_beacon.runtime.allowance import Allowance, allowance
from sglang_beacon.runtime.request import RequestState


@dataclass(frozen=True)
class Case:
    """One request: its settings, its prompt in chunks, and who owns the prompt."""

    policy: str
    budget: int
    eighths: int
    n_prefix: int
    n_recent: int
    n_beacon: int
    page_size: int
    chunks: tuple[int, ...]
    cached: int
    in_tree: bool
    generated: int

    @property
    def config(self) -> KVPolicyConfig:
        sizes = {"n_beacon": self.n_beacon, "window": self.n_recent}
        return KVPolicyConfig(
            policy=self.policy,
            budget=self.budget,
            keep_ratio=self.eighths / 8,
            n_prefix=self.n_prefix,
            n_recent=self.n_recent,
            shared_prefix="pin",
            options={
                key: sizes[key] for key in policies.POLICIES[self.policy].defaults.keys() & sizes
            },
        )

    @property
    def kept(self) -> int:
        """Whole pages within the kept share of the budget."""
        pages = Fraction(self.eighths, 8) * self.budget / self.page_size
        return self.page_size * (pages.numerator // pages.denominator)

    def new_state(self) -> RequestState:
        config = self.config
        return RequestState(config, policies.create(config, self.page_size), self.page_size)


@st.composite
def cases(draw: st.DrawFn, policy: str = "beacon") -> Case:
    page_size = draw(st.sampled_from([1, 16, 64]))
    n_prefix = draw(st.integers(0, 6))
    n_recent = draw(st.integers(1, 20))
    eighths = draw(st.integers(1, 7))
    needed = -(-(n_prefix + n_recent + 1) // page_size) * page_size
    least = -(-8 * needed // eighths)
    return Case(
        policy=policy,
        budget=least + draw(st.integers(0, 80)),
        eighths=eighths,
        n_prefix=n_prefix,
        n_recent=n_recent,
        n_beacon=draw(st.integers(0, 20)),
        page_size=page_size,
        chunks=tuple(draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))),
        cached=page_size * draw(st.integers(0, 3)),
        in_tree=draw(st.booleans()),
        generated=draw(st.integers(1, 250)),
    )


@dataclass
class Step:
    """What happened after one decoded token; private tokens counted before and after the plan."""

    row: int
    before: ObservationPhase
    plan: RequestPlan
    after: ObservationPhase
    private: int
    left: int


@dataclass
class Trace:
    """A request played through: its lengths, and every step."""

    state: RequestState
    pinned: int = 0
    held: int = 0
    steps: list[Step] = field(default_factory=list)


def plan_token(
    state: RequestState, pinned: int, held: int, share: int | None = None
) -> RequestPlan:
    """Plan for a request that holds its part of the tree alone, or answers for ``share`` of it."""
    lengths = state.lengths(pinned, held)
    return state.plan(lengths, state.allowance(lengths, pinned if share is None else share))


def play(case: Case, state: RequestState) -> Trace:
    """Drive a request as an engine does: prefill in chunks, then a plan after each token."""
    trace = Trace(state, pinned=case.cached, held=case.cached)
    for chunk in case.chunks:
        trace.held += chunk
        if case.in_tree:
            trace.pinned = trace.held // case.page_size * case.page_size
        state.after_prefill(chunk, trace.pinned, trace.held)
    for _ in range(case.generated):
        trace.held += 1
        row = state.after_token() if state.shape is not None else -1
        before = state.phase
        plan = plan_token(state, trace.pinned, trace.held)
        private = trace.held - trace.pinned
        if plan.eviction is not None:
            assert plan.eviction.lengths.held == trace.held
            trace.held = plan.eviction.held_after
        left = trace.held - trace.pinned
        trace.steps.append(Step(row, before, plan, state.phase, private, left))
    return trace


@pytest.mark.parametrize("policy", [p for p, cls in policies.POLICIES.items() if cls.evicts])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_evictions(policy: str, data: st.DataObject) -> None:
    """Due exactly at the budget; each leaves whole pages of the kept share, and counts add up."""
    case = data.draw(cases(policy))
    state = case.new_state()
    trace = play(case, state)
    seen = case.cached + sum(case.chunks)
    freed = 0
    evictions = 0
    for step in trace.steps:
        seen += 1
        eviction = step.plan.eviction
        assert (eviction is not None) == (step.private >= case.budget)
        assert step.left < case.budget
        if eviction is None:
            assert step.left == step.private
            continue
        evictions += 1
        assert step.left == eviction.kept == case.kept
        assert eviction.held_after % case.page_size == 0
        assert eviction.lengths.pinned == trace.pinned
        assert eviction.lengths.logical == seen
        assert eviction.lengths.logical == eviction.lengths.held + freed
        freed += eviction.freed
        assert eviction.freed == step.private - case.kept > 0
    assert (state.freed, state.evicted_tokens, state.evictions) == (freed, freed, evictions)
    assert trace.held + freed == seen


@settings(max_examples=60, deadline=None)
@given(case=cases("streaming"))
def test_private_tokens_are_bounded(case: Case) -> None:
    """By the budget, or by one token over a private prompt that is larger; admission knows it."""
    state = case.new_state()
    trace = play(case, state)
    start = trace.steps[0].private - 1
    peak = max(step.private for step in trace.steps)
    assert peak <= max(case.budget, start + 1)
    for index, step in enumerate(trace.steps):
        reserved = step.left + state.tokens_still_needed(step.left)
        assert reserved == case.budget + case.page_size
        assert max((s.private for s in trace.steps[index + 1 :]), default=0) <= reserved
    assert start + state.tokens_still_needed(start) >= peak


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_life_of_the_buffer(case: Case) -> None:
    """Fill, compress when full, freeze at ``budget - n_recent``, roll at an eviction."""
    trace = play(case, case.new_state())
    shape = BufferShape(case.n_beacon, case.n_recent)
    brink = case.budget - case.n_recent
    # Consecutive newest tokens whose queries were seen one by one.
    available = case.chunks[-1]
    frozen = trace.steps[0].private - 1 >= brink
    for step in trace.steps:
        available += 1
        plan = step.plan
        assert 0 <= step.row < shape.rows, "the buffer is never overfilled"
        assert step.before.filled == step.row + 1
        assert step.before.frozen == frozen

        full = step.before.filled == shape.rows
        due = not frozen and (full or step.private >= brink)
        # FPS chooses from all rows; with no more rows than beacons, it would keep them all.
        freezing = due and step.before.filled > case.n_beacon
        assert plan.freeze == (Fold(step.before.filled) if freezing else None)
        frozen = frozen or step.private >= brink

        if plan.eviction is not None:
            assert frozen
            assert plan.observed.frozen
            assert plan.observed.recent == min(case.n_recent, available)
            assert plan.observed.filled <= case.n_beacon + plan.observed.recent
            carried = min(max(step.left - brink, 0), plan.observed.recent)
            assert plan.roll == Fold(plan.observed.filled, carried)
            frozen = step.left >= brink
        else:
            assert plan.roll is None
        assert step.after.frozen == frozen
        assert step.after.filled <= shape.rows - 1, "there is room for the next token"
        if not frozen:
            assert step.after.recent <= step.after.filled < shape.rows


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_planning_twice_is_harmless(case: Case) -> None:
    once = play(case, case.new_state())
    state = case.new_state()
    plan = state.plan

    def twice(lengths: RequestLengths, allowance: Allowance) -> RequestPlan:
        first = plan(lengths, allowance)
        pinned = lengths.pinned
        left = lengths.held if first.eviction is None else first.eviction.held_after
        phase, freed = state.phase, state.freed
        lengths = state.lengths(pinned, left)
        again = plan(lengths, state.allowance(lengths, pinned))
        assert again.is_empty
        assert (state.phase, state.freed) == (phase, freed)
        return first

    state.plan = twice  # type: ignore[method-assign]
    assert play(case, state).steps == once.steps


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_reset_starts_anew(case: Case) -> None:
    """The second life equals the first, and counters of the request run on."""
    state = case.new_state()
    first = play(case, state)
    state.buffer = object()  # type: ignore[assignment]
    evictions, evicted = state.evictions, state.evicted_tokens
    state.reset()
    assert state.buffer is None
    assert state.life == 1
    assert state.phase == ObservationPhase()
    assert (state.freed, state.observed_prompt, state.prompt_tokens) == (0, 0, 0)
    assert (state.evictions, state.evicted_tokens) == (evictions, evicted)
    assert play(case, state).steps == first.steps
    assert (state.evictions, state.evicted_tokens) == (2 * evictions, 2 * evicted)


@settings(max_examples=60, deadline=None)
@given(case=cases(), foreseen=st.integers(0, 200), actual=st.integers(0, 200))
def test_the_tree_may_own_another_part_than_foreseen(
    case: Case, foreseen: int, actual: int
) -> None:
    """The phase after a prefill rests on a forecast; a wrong one must not break the buffer.

    The tree takes less than foreseen, or so much more that the budget is no longer near.
    """
    state = case.new_state()
    held = sum(case.chunks)
    for index in range(len(case.chunks)):
        computed = sum(case.chunks[: index + 1])
        state.after_prefill(case.chunks[index], min(foreseen, computed), computed)
    pinned = min(actual, held) // case.page_size * case.page_size
    assume(pinned <= min(foreseen, held) or held + 1 - pinned < case.budget - case.n_recent)
    for _ in range(case.generated):
        held += 1
        assert state.after_token() < case.n_beacon + case.n_recent
        plan = plan_token(state, pinned, held)
        if plan.eviction is not None:
            assert plan.observed.frozen
            held = plan.eviction.held_after
        assert held - pinned < case.budget
        assert state.phase.frozen == (held - pinned >= case.budget - case.n_recent)
        assert state.phase.recent <= state.phase.filled


def test_the_paper_defaults() -> None:
    """Budget 2048: FPS every 16 tokens, frozen at 2032, evicted at 2048 down to 1792."""
    config = KVPolicyConfig(policy="beacon", budget=2048)
    state = RequestState(config, policies.create(config), 1)
    assert state.after_prefill(100, 0, 100) == 0
    assert state.phase == ObservationPhase(filled=16)
    events: dict[int, RequestPlan] = {}
    held = 100
    for logical in range(101, 2305):
        held += 1
        state.after_token()
        plan = plan_token(state, 0, held)
        if not plan.is_empty:
            events[logical] = plan
        if plan.eviction is not None:
            held = plan.eviction.held_after
    # The second cycle is 240 tokens from 1792 to the brink: full for the 15th time right there.
    full = [*range(116, 2021, 16), *range(2064, 2273, 16)]
    assert sorted(events) == sorted([*full, 2032, 2048, 2288, 2304])
    assert all(events[at] == RequestPlan(Fold(32), observed=events[at].observed) for at in full)
    frozen = [events[at].freeze for at in (2032, 2048, 2288, 2304)]
    assert frozen == [Fold(28), None, Fold(32), None]
    for at in (2048, 2304):
        eviction = events[at].eviction
        assert eviction is not None
        assert (eviction.kept, eviction.freed) == (1792, 256)
        assert eviction.lengths == RequestLengths(logical=at, pinned=0, held=2048)
        assert events[at].observed == ObservationPhase(filled=32, frozen=True, recent=16)
        assert events[at].roll == Fold(32)


def test_a_policy_without_observations_plans_evictions_only() -> None:
    config = KVPolicyConfig(policy="streaming", budget=32)
    state = RequestState(config, policies.create(config), 1)
    assert state.after_prefill(31, 0, 31) == 0
    assert state.phase == ObservationPhase()
    plan = plan_token(state, 0, 32)
    assert plan.eviction == EvictionPlan(RequestLengths(32, 0, 32), 28, 31)
    assert (plan.freeze, plan.roll) == (None, None)


def test_an_overfull_buffer_is_an_error() -> None:
    shape = BufferShape(n_beacon=2, n_recent=3)
    with pytest.raises(ValueError, match="full"):
        phases.after_token(shape, ObservationPhase(filled=5))


@pytest.mark.parametrize(
    ("logical", "pinned", "held"), [(5, 0, 6), (5, 4, 3), (5, -1, 3), (3, 4, 4)]
)
def test_lengths_out_of_order_are_an_error(logical: int, pinned: int, held: int) -> None:
    with pytest.raises(ValueError, match="out of order"):
        RequestLengths(logical, pinned, held)


@pytest.mark.parametrize("kept", [-1, 0, 10, 11])
def test_an_eviction_keeps_some_and_frees_some(kept: int) -> None:
    with pytest.raises(ValueError, match="keep some"):
        EvictionPlan(RequestLengths(14, 4, 14), kept, 0)


def test_a_budget_that_cannot_hold_a_page_is_refused() -> None:
    config = KVPolicyConfig(policy="beacon", budget=70)
    policies.create(config, 1)
    with pytest.raises(ConfigError, match="at page size 64"):
        policies.create(config, 64)


def test_the_tree_took_more_than_foreseen_at_the_brink() -> None:
    """Frozen too early, and still within the last tokens before the budget: no row overflows."""
    config = KVPolicyConfig(policy="beacon", budget=64, shared_prefix="pin")
    state = RequestState(config, policies.create(config), 1)
    state.after_prefill(90, 0, 90)
    for held in range(91, 140):
        state.after_token()
        plan_token(state, 35, held - state.freed)


def test_prompt_tokens_in_the_recent_window_stay_prompt() -> None:
    """The bound on held prompt tokens follows an eviction that keeps prompt tokens as newest."""
    config = KVPolicyConfig(policy="random", budget=64)
    state = RequestState(config, policies.create(config), 1)
    state.after_prefill(50, 0, 50)
    for held in range(51, 65):
        plan = plan_token(state, 0, held)
    assert plan.eviction is not None
    assert plan.eviction.prompt_tokens == 50
    # 14 generated tokens are the newest; 56 stay, so 42 are of the prompt.
    assert state.prompt_tokens == 42


def test_detaching_counts_and_chooses_from_all_tokens() -> None:
    """``copy``: 40 of 64 tokens are the tree's; at the budget it gets them back, once."""
    config = KVPolicyConfig(policy="beacon", budget=64, shared_prefix="copy")
    state = RequestState(config, policies.create(config), 1)
    state.after_prefill(41, 40, 41)
    for held in range(42, 65):
        state.after_token()
        plan = plan_token(state, 40, held)
    eviction = plan.eviction
    assert eviction == EvictionPlan(RequestLengths(64, 40, 64), 56, 41, detach=True)
    assert (eviction.pinned, eviction.held_after, eviction.freed) == (0, 56, 8)
    assert state.detached
    # From then on it holds nothing of the tree.
    state.after_token()
    assert plan_token(state, 0, 57).eviction is None


@pytest.mark.parametrize(
    ("mode", "pinned", "share", "expected"),
    [
        ("pin", 900, 900, Allowance(50, 1000)),
        ("copy", 900, 1, Allowance(950, 1000, detach=True)),
        ("copy", 0, 0, Allowance(50, 1000)),
        ("auto", 400, 400, Allowance(50, 600)),
        ("auto", 900, 500, Allowance(50, 500)),
        ("auto", 900, 501, Allowance(551, 1000, detach=True)),
        ("auto", 900, 900, Allowance(950, 1000, detach=True)),
    ],
)
def test_allowance(mode: str, pinned: int, share: int, expected: Allowance) -> None:
    config = KVPolicyConfig(policy="beacon", budget=1000, shared_prefix=mode)
    lengths = RequestLengths(pinned + 50, pinned, pinned + 50)
    assert allowance(lengths, share, config, least_budget=43) == expected


def test_auto_copies_where_too_little_would_be_left() -> None:
    config = KVPolicyConfig(policy="beacon", budget=80)
    lengths = RequestLengths(60, 40, 60)
    assert not allowance(lengths, 37, config, least_budget=43).detach
    assert allowance(lengths, 38, config, least_budget=43).detach


@settings(max_examples=150, deadline=None)
@given(
    holders=st.integers(1, 40),
    prompt=st.integers(0, 3000),
    generated=st.integers(1, 5000),
    budget=st.integers(64, 3000),
)
def test_auto_needs_no_more_than_the_better_mode(
    holders: int, prompt: int, generated: int, budget: int
) -> None:
    """Equal requests over one prompt, at the length where they hold the most."""

    def peak(mode: str) -> int:
        config = KVPolicyConfig(policy="streaming", budget=budget, shared_prefix=mode)
        most = 0
        for said in range(generated + 1):
            lengths = RequestLengths(prompt + said, prompt, prompt + said)
            share = -(-prompt // holders)
            counted = allowance(lengths, share, config, least_budget=24)
            if counted.is_used_up:
                # It stays at its limit from here on; one that leaves holds all of that alone.
                limit = budget if counted.detach else prompt + holders * counted.budget
                return max(most, holders * limit if counted.detach else limit)
            most = prompt + holders * said
        return most

    # Shares are rounded up: at most one token per request.
    assert peak("auto") <= min(peak("pin"), peak("copy")) + holders


@settings(max_examples=150, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["auto", "copy"]))
def test_holders_come_and_go(data: st.DataObject, mode: str) -> None:
    """Whatever the share does, no row overflows and nothing stays beyond its allowance."""
    case = data.draw(cases())
    config = replace(case.config, shared_prefix=mode)
    state = RequestState(config, policies.create(config, case.page_size), case.page_size)
    held = 0
    for chunk in case.chunks:
        held += chunk
        pinned = held // case.page_size * case.page_size if case.in_tree else 0
        state.after_prefill(chunk, pinned, held)
    share = data.draw(st.integers(0, pinned))
    for _ in range(case.generated):
        held += 1
        assert state.after_token() < case.n_beacon + case.n_recent
        if data.draw(st.integers(0, 9)) == 0:
            share = data.draw(st.integers(0, pinned))
        plan = plan_token(state, pinned, held, share)
        if plan.eviction is not None:
            assert plan.observed.frozen
            assert plan.observed.recent <= case.n_recent
            held, pinned = plan.eviction.held_after, plan.eviction.pinned
            share = min(share, pinned)
        left = state.allowance(state.lengths(pinned, held), share)
        assert not left.is_used_up
        assert state.phase.recent <= state.phase.filled


def test_a_method_that_keeps_everything_plans_nothing() -> None:
    config = KVPolicyConfig(policy="quest", budget=64)
    state = RequestState(config, policies.create(config), page_size=1)
    lengths = RequestLengths(500, 0, 500)
    assert not state.is_bounded
    assert state.plan(lengths, state.settle(lengths, share=0)).is_empty
