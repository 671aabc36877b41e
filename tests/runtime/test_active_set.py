"""Steps read no more than they need, and what they say of their error is true."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime import selectors
from sglang_beacon.runtime.active_set import ActiveSet

KV_HEADS, GROUP, DIM = 2, 2, 16
HEADS = KV_HEADS * GROUP
LADDER = (16, 32, 64)


class Layer:
    """One layer's cache, and attention over all of it."""

    def __init__(self, held: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(held, KV_HEADS, DIM, generator=self.generator)
        self.values = torch.randn(held, KV_HEADS, DIM, generator=self.generator)
        self.slots = torch.randperm(held, generator=self.generator)
        self.norms = torch.zeros(HEADS)

    def queries(self) -> torch.Tensor:
        return torch.randn(HEADS, DIM, generator=self.generator)

    def full(self, queries: torch.Tensor, scale: float) -> torch.Tensor:
        keys, values = (each[self.slots].transpose(0, 1) for each in (self.keys, self.values))
        logits = queries.view(KV_HEADS, GROUP, DIM) @ keys.transpose(1, 2) * scale
        return (logits.softmax(-1) @ values).view(HEADS, DIM)

    def step(self, active: ActiveSet, queries: torch.Tensor, scale: float, step: int) -> float:
        """Attend to the active set; returns the true relative error of the layer's output."""
        active.begin(step)
        value_norm = self.values[self.slots[:-1]].norm(dim=-1).amax(0)
        output = active.attend(
            0, queries, self.keys, self.values, self.slots, scale, value_norm, self.norms
        )
        active.end(step)
        self.norms = output.norm(dim=-1)
        return float((output - self.full(queries, scale)).norm() / output.norm())


def create(selector: str, **options: object) -> ActiveSet:
    chosen = RecasSettings(ladder=LADDER, probe_interval=1, sketch_rank=DIM, **options)  # type: ignore[arg-type]
    ranking = selectors.create(chosen, selector, layers=1)
    assert ranking is not None
    return ActiveSet(chosen, ranking, n_prefix=2, n_recent=4, layers=1, device="cpu")


@pytest.mark.parametrize("selector", ["exact", "pages"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sharp=st.floats(0.1, 4.0),
    epsilon=st.sampled_from([1e-3, 0.02, 0.5, 5.0]),
)
def test_the_error_is_at_most_what_is_reported(
    selector: str, seed: int, sharp: float, epsilon: float
) -> None:
    layer, active = Layer(150, seed), create(selector, epsilon=epsilon)
    errors = [layer.step(active, layer.queries(), sharp, step) for step in range(4)]
    active.begin(10)
    report = active.report
    assert report.steps == 4
    assert max(errors) <= report.error + 1e-5
    assert report.mean <= report.largest <= 1
    assert (report.unmet > 0) == (report.error > epsilon)


def test_easy_queries_read_little_and_hard_ones_all() -> None:
    for sharp, least, most in ((0.0, 1.0, 1.0), (8.0, 0.1, 0.25)):
        layer, active = Layer(160), create("exact", epsilon=0.05)
        for step in range(20):
            layer.step(active, layer.queries(), sharp, step)
        active.begin(30)
        assert least <= active.report.ratio <= most


def test_the_smallest_size_that_fits_is_taken() -> None:
    """A head whose attention lies in 20 tokens reads 32 of them, the other one everything."""
    layer, active = Layer(200), create("exact", epsilon=1e-3)
    queries = torch.zeros(HEADS, DIM)
    queries[:GROUP, 0] = 40.0
    layer.keys[:, 0, 0] = 0.0
    layer.keys[layer.slots[50:70], 0, 0] = 1.0
    for step in range(2):
        assert layer.step(active, queries, 1.0, step) < 1e-3
    active.begin(10)
    # All in the first step, whose output nobody knew before.
    assert active.report.ratio == pytest.approx((1 + (32 / 200 + 1) / 2) / 2)


def test_a_short_cache_is_read_whole() -> None:
    """Where ranking and reading would cost more than reading everything, nothing is ranked."""
    layer, active = Layer(30), create("exact", epsilon=10.0)
    assert [layer.step(active, layer.queries(), 1.0, step) for step in range(3)] == [
        pytest.approx(0, abs=1e-6)
    ] * 3
    active.begin(10)
    assert active.report.ratio == 1.0


@pytest.mark.parametrize("selector", ["exact", "pages", "sketch"])
def test_a_dormant_premise_wakes_up(selector: str) -> None:
    """It is left out while nobody needs it, stays in the cache, and is read when it is needed."""
    layer, active = Layer(200), create(selector, epsilon=0.3)
    wanted = layer.keys[layer.slots[40]].clone()
    layer.keys[:, :, 1:] *= 0.2
    topic = torch.zeros(HEADS, DIM)
    topic[:, 0] = 12.0
    layer.keys[..., 0] = -1.0
    layer.keys[layer.slots[100:110], :, 0] = 1.0
    layer.keys[layer.slots[40]] = wanted / wanted.norm(dim=-1, keepdim=True)
    layer.keys[layer.slots[40], :, 0] = -1.0
    for step in range(30):
        layer.step(active, topic, 1.0, step)
    active.begin(100)
    assert active.report.ratio < 0.8
    premise = layer.keys[layer.slots[40]].repeat_interleave(GROUP, 0) * 20
    before = active.report
    error = layer.step(active, premise, 1.0, 101)
    active.begin(200)
    # It read what the premise says; bounds on its page may ask for everything else as well.
    assert error < 0.3
    said = layer.values[layer.slots[40]].repeat_interleave(GROUP, 0)
    assert torch.allclose(layer.full(premise, 1.0), said, atol=0.2)
    read = active.report.ratio * active.report.steps - before.ratio * before.steps
    assert read < 1 or selector == "pages"


def test_nothing_is_left_out_where_nothing_is_allowed_to_be() -> None:
    layer, active = Layer(150), create("exact", epsilon=1e-30)
    for step in range(3):
        assert layer.step(active, layer.queries(), 1.0, step) == pytest.approx(0, abs=1e-6)
    active.begin(10)
    assert active.report.ratio == 1.0
    assert active.report.error == 0
    assert math.isclose(active.report.unmet, 0)
