"""Utility as it is written down, what evidence is worth, and settings that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_beacon import policies
from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import CachedKeys, EvictionPlan, Observations, RequestLengths, TokenSignals
from sglang_beacon.policies import Policy
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.signals import Revisits, Signals

LAYERS, KV_HEADS, HELD, DIM = 2, 3, 40, 8
PREFIX, RECENT = 2, 3


def create(name: str, **options: Any) -> Policy:
    config = KVPolicyConfig(
        policy=name, budget=HELD, n_prefix=PREFIX, n_recent=RECENT, options=options
    )
    policy = policies.create(config)
    assert policy is not None
    return policy


def cache(held: int = HELD) -> CachedKeys:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(LAYERS, held, KV_HEADS, DIM, generator=generator)
    return CachedKeys(list(keys), torch.arange(held))


def signals(held: int = HELD) -> TokenSignals:
    generator = torch.Generator().manual_seed(1)
    return TokenSignals(*torch.rand(3, LAYERS, KV_HEADS, held, generator=generator))


def test_utility_is_the_weighted_sum_of_normalised_signals() -> None:
    """Sinks and the newest tokens, however large their signals, do not set the measure."""
    weights = {"relevance_weight": 0.5, "history_weight": 2.0, "evidence_weight": 3.0}
    cap = 0.6
    remembered = signals()
    for signal in remembered[:3]:
        signal[..., 0] = 1000.0
    score = create("recas", **weights, evidence_cap=cap).score(
        cache(), Observations(99, 0, 1.0, signals=remembered)
    )
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            for token in range(HELD):
                expected = 0.0
                for weight, signal in zip(weights.values(), remembered[:3], strict=True):
                    values = signal[layer, head].tolist()
                    if signal is remembered.evidence:
                        values = [min(value, cap) for value in values]
                    expected += weight * values[token] / max(values[PREFIX : HELD - RECENT])
                assert score[layer, head, token].item() == pytest.approx(expected, rel=1e-5)


def test_together_they_add_up_in_attention_mass() -> None:
    """Evidence is not divided by its largest value, which BeaconKV's weights would drown in."""
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(LAYERS, 2 * KV_HEADS, 4, DIM, generator=generator)
    seen = Observations(99, 0, 0.3, queries, torch.full((4,), HELD), signals())
    rest: dict[str, Any] = {"relevance_weight": 0.5, "history_weight": 2.0}
    both = create("beacon+recas", evidence_weight=7.0, evidence_cap=0.3, **rest)
    beacon = create("beacon").score(cache(), seen)
    recas = create("recas", evidence_weight=0.0, **rest).score(cache(), seen)
    assert seen.signals is not None
    evidence = 7 * seen.signals.evidence.clamp(max=0.3)
    assert torch.allclose(both.score(cache(), seen), beacon + recas + evidence)


@pytest.mark.parametrize("name", ["recas", "beacon+recas"])
@pytest.mark.parametrize("evidence_weight", [10.0, 0.0])
def test_an_anchor_at_rest_lives_by_its_evidence(name: str, evidence_weight: float) -> None:
    """Token 10 was revisited once, long ago; everything since was read by its neighbours."""
    held = 400
    remembered = Signals(LAYERS, KV_HEADS, held)
    for position in range(held):
        remembered.extend(position, position + 1)
        weights = torch.full((LAYERS, KV_HEADS, position + 1), 1e-4)
        weights[..., max(position - 8, 0) :] = 0.1
        if position == 100:
            weights[..., 10] = 0.2
        remembered.note(weights, position, 0.95, Revisits(far=32), RecasSettings().significance)
    # Beacons that look anywhere but there.
    keys = cache(held)
    queries = torch.zeros(LAYERS, KV_HEADS, 4, DIM)
    for layer, pool in enumerate(keys.pools):
        pool[10] = 0
        queries[layer] = pool[300:304].transpose(0, 1)
    seen = Observations(held - 1, 0, 2.0, queries, torch.full((4,), held), remembered.view())
    plan = EvictionPlan(RequestLengths(held, 0, held), kept=120, prompt_tokens=0)
    policy = create(name, evidence_weight=evidence_weight)
    kept = policy.keep(keys, seen, plan)
    survives = (kept == 10).any(-1)
    assert survives.all() if evidence_weight else not survives.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("relevance_weight", -1),
        ("history_weight", -0.5),
        ("evidence_weight", float("nan")),
        ("credit", -1),
        ("significance", -0.1),
        ("evidence_cap", 0.0),
        ("decay", 0),
        ("decay", 1.5),
        ("note_every", 0),
        ("far_distance", -1),
        ("top_keys", 0),
        ("look_back", -1),
        ("delimiters", ["Wait"]),
        ("delimiters", [-3]),
        ("prompt_evidence", -1),
        ("epsilon", -0.1),
        ("epsilon", 0.0),
        ("alpha", 0.0),
        ("alpha", 1.0),
        ("alpha", 2),
        ("probe_interval", 0),
        ("calibration_probes", 0),
        ("max_budget", -1),
        ("max_budget", HELD - 1),
        ("selector", "magic"),
        ("ladder", []),
        ("ladder", [64, 64]),
        ("ladder", [128, 64]),
        ("ladder", [0, 64]),
        ("ladder", [16.0, 64]),
        ("sketch_rank", 0),
        ("epsilon", "0.1"),
        ("ladder", 64),
    ],
)
@pytest.mark.parametrize("name", ["recas", "beacon+recas"])
def test_a_malformed_setting_is_refused_by_its_name(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name, **{field: value})
    assert str(caught.value).startswith(field)
    assert str(caught.value).count(".") <= 2


def test_settings_from_json() -> None:
    policy = create("recas", epsilon=1, ladder=[8, 16], delimiters=[3])
    assert policy.recas == RecasSettings(epsilon=1, ladder=(8, 16), delimiters=(3,))
