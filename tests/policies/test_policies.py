"""What every policy owes its callers, and what each method promises."""

from __future__ import annotations

import importlib
import re
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import naive

from sglang_beacon import policies
from sglang_beacon.config import ConfigError, KVPolicyConfig, kept_tokens
from sglang_beacon.core import (
    BufferShape,
    CachedKeys,
    EvictionPlan,
    Observations,
    RequestLengths,
    TokenSignals,
)
from sglang_beacon.policies import POLICIES, POLICY_NAMES, Policy

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 8


# A method that keeps everything has nothing to choose.
EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]


@dataclass(frozen=True)
class Case:
    """One eviction: the settings it happens under, and the lengths before it."""

    budget: int
    n_prefix: int
    n_recent: int
    page_size: int
    pinned: int
    extra: int
    freed: int
    prompt_tokens: int
    num_queries: int
    seed: int

    def policy(self, name: str, **options: Any) -> Policy:
        if "window" in POLICIES[name].defaults:
            options = {"window": self.n_recent, **options}
        config = KVPolicyConfig(
            policy=name,
            budget=self.budget,
            keep_ratio=0.5,
            n_prefix=self.n_prefix,
            n_recent=self.n_recent,
            options=options,
        )
        policy = policies.create(config, self.page_size)
        assert policy is not None
        return policy

    @property
    def held(self) -> int:
        return self.pinned + self.budget + self.extra

    def plan(self, policy: Policy) -> EvictionPlan:
        lengths = RequestLengths(self.held + self.freed, self.pinned, self.held)
        kept = kept_tokens(policy.config.budget, policy.config.keep_ratio, self.page_size)
        return EvictionPlan(lengths, kept, self.prompt_tokens)

    def cache(self) -> CachedKeys:
        generator = torch.Generator().manual_seed(self.seed)
        keys, values = torch.randn(2, LAYERS, self.held, KV_HEADS, DIM, generator=generator)
        return CachedKeys(list(keys), torch.arange(self.held), list(values))

    def observations(self, policy: Policy) -> Observations:
        position = self.held + self.freed - 1
        generator = torch.Generator().manual_seed(self.seed + 1)
        signals = None
        if policy.signals is not None:
            count = 5 if policy.signals.recurrence else 3
            remembered = torch.rand(count, LAYERS, KV_HEADS, self.held, generator=generator)
            signals = TokenSignals(*remembered)
        if policy.observes is None:
            return Observations(position, self.prompt_tokens, 0.5, signals=signals)
        queries = torch.randn(LAYERS, HEADS, self.num_queries, DIM, generator=generator)
        hidden = torch.randint(0, self.n_recent, (self.num_queries,), generator=generator)
        visible = self.held - hidden
        return Observations(position, self.prompt_tokens, 0.5, queries, visible, signals)

    def kept(self, policy: Policy) -> torch.Tensor:
        return policy.keep(self.cache(), self.observations(policy), self.plan(policy))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from([1, 16, 64]))
    n_prefix = draw(st.integers(0, 20))
    n_recent = draw(st.integers(1, 20))
    needed = -(-(n_prefix + n_recent + 1) // page_size) * page_size
    budget = 2 * needed + draw(st.integers(0, 40))
    pinned = page_size * draw(st.integers(0, 3))
    extra = draw(st.integers(0, 30))
    return Case(
        budget=budget,
        n_prefix=n_prefix,
        n_recent=n_recent,
        page_size=page_size,
        pinned=pinned,
        extra=extra,
        freed=draw(st.integers(0, 1000)),
        prompt_tokens=draw(st.integers(0, pinned + budget + extra)),
        num_queries=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 100)),
    )


EXAMPLE = Case(64, 4, 16, 1, 0, 0, 100, 0, 6, 0)


@pytest.mark.parametrize("name", EVICTING)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_what_every_eviction_keeps(name: str, case: Case) -> None:
    """The right number, in order, private; the first and the last tokens among them."""
    policy = case.policy(name)
    plan = case.plan(policy)
    kept = case.kept(policy)
    assert kept.dtype == torch.int64
    assert kept.shape == (LAYERS, KV_HEADS, plan.kept)
    assert plan.held_after % case.page_size == 0
    must = {p for p in range(case.pinned, case.held) if p < case.n_prefix}
    must |= set(range(case.held - case.n_recent, case.held))
    for head in kept.flatten(0, 1).tolist():
        assert head == sorted(set(head))
        assert head[0] >= case.pinned
        assert head[-1] < case.held
        assert must <= set(head)


@pytest.mark.parametrize("name", EVICTING)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_the_rest_goes_by_score(name: str, case: Case) -> None:
    """Scores are finite float32 of all cached keys; ties go to the lower position."""
    policy = case.policy(name)
    score = policy.score(case.cache(), case.observations(policy))
    assert score.shape == (LAYERS, KV_HEADS, case.held)
    assert score.dtype == torch.float32
    assert torch.isfinite(score).all()
    newest = range(case.held - case.n_recent, case.held)
    heads = zip(score.flatten(0, 1).tolist(), case.kept(policy).flatten(0, 1).tolist(), strict=True)
    for scores, kept in heads:
        fixed = [p for p in range(case.pinned, case.held) if p < case.n_prefix or p in newest]
        others = [p for p in range(case.pinned, case.held) if p not in fixed]
        count = case.plan(policy).kept - len(fixed)
        chosen = naive.top([scores[p] for p in others], count)
        assert kept == sorted(fixed + [others[i] for i in chosen])


@pytest.mark.parametrize("name", EVICTING)
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_deterministic_and_without_side_effects(name: str, case: Case) -> None:
    policy = case.policy(name)
    first = case.kept(policy)
    torch.rand(3)
    cache, seen = case.cache(), case.observations(policy)
    again = policy.keep(cache, seen, case.plan(policy))
    assert torch.equal(first, again)
    assert torch.equal(first, case.kept(case.policy(name)))
    for pool, before in zip(cache.pools, case.cache().pools, strict=True):
        assert torch.equal(pool, before)


@pytest.mark.parametrize("name", EVICTING)
def test_keeping_does_not_change_the_score(name: str) -> None:
    """A policy may hand out a tensor of its own; the mechanics must not write to it."""
    policy = EXAMPLE.policy(name)
    score = policy.score(EXAMPLE.cache(), EXAMPLE.observations(policy)).clone()
    policy.score = lambda cache, observations: score  # type: ignore[method-assign]
    before = score.clone()
    EXAMPLE.kept(policy)
    assert torch.equal(score, before)


# The methods.


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_streaming_keeps_sinks_and_a_window(case: Case) -> None:
    policy = case.policy("streaming")
    sinks = list(range(case.pinned, max(case.n_prefix, case.pinned)))
    window = case.plan(policy).kept - len(sinks)
    expected = sinks + list(range(case.held - window, case.held))
    assert case.kept(policy).tolist() == [[expected] * KV_HEADS] * LAYERS


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_random_protects_the_prompt(case: Case) -> None:
    """No generated token is kept beyond the window while a prompt token goes."""
    policy = case.policy("random")
    prompt = set(range(case.pinned, case.prompt_tokens))
    window = set(range(case.held - case.n_recent, case.held))
    prefix = set(range(case.pinned, max(case.pinned, case.n_prefix)))
    for kept in case.kept(policy).flatten(0, 1).tolist():
        chosen = set(kept) - window - prefix
        if prompt - set(kept):
            assert chosen <= prompt


def test_random_depends_on_seed_and_position_alone() -> None:
    def kept(case: Case, **options: Any) -> list[list[int]]:
        return case.kept(case.policy("random", **options)).flatten(0, 1).tolist()

    torch.manual_seed(1)
    before = kept(EXAMPLE)
    torch.manual_seed(2)
    assert kept(EXAMPLE) == before
    assert kept(replace(EXAMPLE, seed=9)) == before, "not on the keys"
    assert kept(EXAMPLE, seed=0) == before
    different = [
        kept(EXAMPLE, seed=1),
        kept(replace(EXAMPLE, freed=EXAMPLE.freed + 1)),
    ]
    assert all(other != before for other in different)
    assert len({tuple(head) for head in before}) == LAYERS * KV_HEADS, "each head draws its own"


def test_random_does_not_disturb_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    EXAMPLE.kept(EXAMPLE.policy("random"))
    assert torch.equal(torch.rand(4), expected)


def test_random_is_uniform() -> None:
    """Over many positions every token is kept about equally often."""
    policy = EXAMPLE.policy("random")
    times = torch.zeros(EXAMPLE.held)
    for freed in range(300):
        for head in replace(EXAMPLE, freed=freed).kept(policy).flatten(0, 1):
            times[head] += 1
    # 1,200 draws of 12 out of 44: mean 327, standard deviation 15.
    free = times[4:-16]
    assert free.min() > 327 - 5 * 15
    assert free.max() < 327 + 5 * 15


def test_beacon_observes_what_it_was_told() -> None:
    policy = EXAMPLE.policy("beacon", n_beacon=3)
    assert policy.observes == BufferShape(n_beacon=3, n_recent=16)
    assert EXAMPLE.policy("beacon").observes == BufferShape(n_beacon=16, n_recent=16)
    assert EXAMPLE.policy("streaming").observes is None
    assert EXAMPLE.policy("random").observes is None


def test_beacon_keeps_what_one_query_of_one_head_looks_at() -> None:
    """A key that a single query head reads survives in its KV head, and needs no other reader."""
    keys = torch.zeros(EXAMPLE.held, KV_HEADS, DIM)
    keys[20, :, 0] = 30.0
    keys[25, :, 1] = 30.0
    cache = CachedKeys([keys], torch.arange(EXAMPLE.held))
    queries = torch.zeros(1, HEADS, 6, DIM)
    queries[0, 1, 3, 0] = 1.0
    visible = torch.full((6,), EXAMPLE.held)
    policy = EXAMPLE.policy("beacon")
    seen = Observations(163, 0, 1.0, queries, visible)
    (score,) = policy.score(cache, seen)
    assert score[0].argmax() == 20
    assert score[0, 20] > 0.99
    assert score[0, 25] == pytest.approx(1 / EXAMPLE.held)
    torch.testing.assert_close(score[1], torch.full((EXAMPLE.held,), 1 / EXAMPLE.held))
    # With nothing else to tell keys apart, the lowest positions win.
    expected = [*range(15), 20, *range(48, 64)]
    assert policy.keep(cache, seen, EXAMPLE.plan(policy))[0, 0].tolist() == expected


def test_beacon_aggregations_differ() -> None:
    scores = []
    for aggregation in ("max", "mean", "logsumexp"):
        policy = EXAMPLE.policy("beacon", aggregation=aggregation)
        scores.append(policy.score(EXAMPLE.cache(), EXAMPLE.observations(policy)))
    assert not torch.allclose(scores[0], scores[1])
    assert not torch.allclose(scores[0], scores[2])
    assert not torch.allclose(scores[1], scores[2])


# The registry.


def test_registry() -> None:
    assert list(POLICY_NAMES) == ["none", *POLICIES]
    ours = {"beacon", "recas", "beacon+recas"}
    rivals = {"expected_attention", "h2o", "initial_recent", "keydiff", "lazy_eviction", "quest"}
    windows = {"rkv", "rpc", "scissorhands", "snapkv", "tova"}
    assert set(POLICIES) == ours | rivals | windows | {"streaming", "random"}
    assert policies.create(KVPolicyConfig()) is None
    for name, cls in POLICIES.items():
        module = importlib.import_module(f"sglang_beacon.policies.{name.replace('+', '_')}")
        assert cls.name == name
        assert cls.__module__ == module.__name__, "one method per module, named like it"
        assert "Reference:" in (cls.__doc__ or "")
        assert "Cost:" in (cls.__doc__ or "")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("keep_ratio", [0.25, 0.5, 7 / 8, 0.9])
def test_the_least_budget_is_the_one_named(name: str, page_size: int, keep_ratio: float) -> None:
    """The error for a small budget names the smallest that works."""

    def create(budget: int) -> Policy | None:
        config = KVPolicyConfig(policy=name, budget=budget, keep_ratio=keep_ratio)
        return policies.create(config, page_size)

    too_small = re.escape(f"--kv-budget 5 is too small for --kv-policy {name}")
    with pytest.raises(ConfigError, match=too_small):
        create(5)
    least = next(budget for budget in range(5, 1000) if _accepted(create, budget))
    with pytest.raises(ConfigError, match=f"at least {least} tokens at page size {page_size}"):
        create(least - 1)


def _accepted(create: Any, budget: int) -> bool:
    try:
        create(budget)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("beacn", {}, "--kv-policy 'beacn' is unknown: did you mean 'beacon'?"),
        (
            "zzz",
            {},
            f"--kv-policy 'zzz' is unknown: it must be one of {', '.join(sorted(POLICY_NAMES))}.",
        ),
        (
            "beacon",
            {"n_beacons": 16},
            "the --kv-policy-config key 'n_beacons' is unknown: did you mean 'n_beacon'?",
        ),
        (
            "beacon",
            {"n_recents": 16},
            "the --kv-policy-config key 'n_recents' is unknown: did you mean 'n_recent'?",
        ),
        (
            "streaming",
            {"n_beacon": 16},
            "the --kv-policy-config key 'n_beacon' is unknown: did you mean 'n_recent'?",
        ),
        ("beacon", {"n_beacon": -1}, "n_beacon in --kv-policy-config must not be negative."),
        (
            "beacon",
            {"n_beacon": 16.0},
            "n_beacon in --kv-policy-config must be of type int, not 16.0.",
        ),
        (
            "beacon",
            {"n_beacon": True},
            "n_beacon in --kv-policy-config must be of type int, not True.",
        ),
        (
            "beacon",
            {"aggregation": "median"},
            "aggregation in --kv-policy-config must be one of max, mean, logsumexp, not 'median'.",
        ),
        (
            "random",
            {"seed": "7"},
            "seed in --kv-policy-config must be of type int, not '7'.",
        ),
    ],
)
def test_wrong_names_and_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policies.create(KVPolicyConfig(policy=name, options=options))
    assert str(caught.value) == message


def test_settings_without_a_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="name it by --kv-policy"):
        policies.create(KVPolicyConfig(options={"n_beacon": 8}))


@pytest.mark.parametrize("seed", [-1, 10**14])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed in --kv-policy-config"):
        policies.create(KVPolicyConfig(policy="random", options={"seed": seed}))


class OwnPolicy(Policy):
    """Keeps the tokens in the lowest slots."""

    name = "own"

    def score(self, cache: CachedKeys, observations: Observations) -> torch.Tensor:
        layers, kv_heads, held = cache.shape
        return -cache.slots.float().expand(layers, kv_heads, held)


def test_a_policy_of_ones_own_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(Own=OwnPolicy, other=int))
    own = policies.create(KVPolicyConfig(policy="mine:Own", budget=256))
    assert isinstance(own, OwnPolicy)
    for name, message in {
        "mine:Else": "--kv-policy mine:Else cannot be imported: ",
        "no.such:Own": "--kv-policy no.such:Own cannot be imported: No module named 'no'.",
        ":Own": "--kv-policy :Own cannot be imported: Empty module name.",
        "mine:other": "--kv-policy mine:other is not a subclass of sglang_beacon.policies.Policy.",
    }.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            policies.create(KVPolicyConfig(policy=name))


def test_a_request_imports_nothing() -> None:
    config = KVPolicyConfig(policy="mine:Own")
    assert config.with_request({"kv_policy": "mine:Own", "kv_budget": 99}).budget == 99
    with pytest.raises(ConfigError, match="would import code: start the server with --kv-policy"):
        config.with_request({"kv_policy": "os:system"})
