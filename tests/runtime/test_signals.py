"""Signals follow their tokens through evictions, and evidence counts revisits alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_beacon.runtime.signals import Revisits, Signals

LAYERS, KV_HEADS = 2, 2


class ByToken:
    """The definition: a dictionary of tokens for each head, in the order they are held."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.history: dict[int, float] = {}
        self.evidence: dict[int, float] = {}

    def extend(self, begin: int, end: int) -> None:
        for token in range(begin, end):
            self.tokens.append(token)
            self.history[token] = self.evidence[token] = 0.0

    def note(self, weights: list[float], position: int, decay: float, revisits: Revisits) -> None:
        pairs = list(zip(weights, self.tokens, strict=True))
        top = min(revisits.top, len(pairs) // 10)
        favourites = sorted(pairs, reverse=True)[:top]
        far = sum(position - token for _, token in favourites)
        looks_back = bool(top) and far / top >= revisits.threshold
        for weight, token in pairs:
            distance = position - token
            self.history[token] = decay * self.history[token] + weight
            if distance >= revisits.far or (looks_back and distance >= revisits.recent):
                self.evidence[token] += weight

    def keep(self, pinned: int, kept: list[int]) -> None:
        self.tokens = self.tokens[:pinned] + [self.tokens[place] for place in kept]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_equals_the_definition(data: st.DataObject, seed: int) -> None:
    """Any order of prefills, decoded tokens, notes and evictions, each head its own tokens."""
    generator = torch.Generator().manual_seed(seed)
    revisits = Revisits(far=20, top=3, threshold=15, recent=4)
    signals = Signals(LAYERS, KV_HEADS, capacity=8)
    heads = [ByToken() for _ in range(LAYERS * KV_HEADS)]
    seen = 0
    for step in data.draw(st.lists(st.sampled_from("pttnnnk"), min_size=3, max_size=20)):
        held = signals.held
        if step in "pt":
            count = 13 if step == "p" else 1
            signals.extend(seen, seen + count)
            for head in heads:
                head.extend(seen, seen + count)
            seen += count
        elif step == "n" and held:
            weights = torch.rand(LAYERS, KV_HEADS, held, generator=generator)
            signals.note(weights, seen - 1, 0.9, revisits)
            for head, row in zip(heads, weights.flatten(0, 1).tolist(), strict=True):
                head.note(row, seen - 1, 0.9, revisits)
        elif step == "k" and held > 3:
            pinned = data.draw(st.integers(0, held - 3))
            count = data.draw(st.integers(1, held - pinned))
            chosen = [
                sorted(
                    (pinned + torch.randperm(held - pinned, generator=generator)[:count]).tolist()
                )
                for _ in heads
            ]
            signals.keep(pinned, torch.tensor(chosen).view(LAYERS, KV_HEADS, count))
            for head, kept in zip(heads, chosen, strict=True):
                head.keep(pinned, kept)
    rows = zip(
        signals.positions.flatten(0, 1),
        signals.history.flatten(0, 1),
        signals.evidence.flatten(0, 1),
        heads,
        strict=True,
    )
    for positions, history, evidence, head in rows:
        assert positions[: signals.held].tolist() == head.tokens
        expected = [head.history[token] for token in head.tokens]
        assert history[: signals.held].tolist() == pytest.approx(expected, abs=1e-5)
        expected = [head.evidence[token] for token in head.tokens]
        assert evidence[: signals.held].tolist() == pytest.approx(expected, abs=1e-5)


def test_local_attention_is_no_evidence() -> None:
    """A token that is read all the time while it is new, and one that is read once, much later."""
    signals = Signals(1, 1, capacity=64)
    revisits = Revisits(far=32)
    signals.extend(0, 1)
    for position in range(1, 40):
        signals.extend(position, position + 1)
        weights = torch.zeros(1, 1, signals.held)
        weights[..., max(position - 5, 0) :] = 0.2
        if position == 38:
            weights[..., 3] = 0.2
        signals.note(weights, position, 1.0, revisits)
    evidence = signals.evidence[0, 0, : signals.held]
    assert evidence[3] == pytest.approx(0.2)
    assert evidence.count_nonzero() == 1
    assert signals.history[0, 0, 20] == pytest.approx(1.2)


def test_pauses_between_active_times() -> None:
    """The longest, of what is left after an eviction; a token begins as active."""
    signals = Signals(1, 1, capacity=16, recurrence=0.1)
    active = {1: (0,), 2: (0, 2), 3: (), 7: (1,), 8: (0, 1), 9: (2,)}
    signals.extend(0, 1)
    for position in range(1, 10):
        signals.extend(position, position + 1)
        weights = torch.full((1, 1, signals.held), 0.05)
        weights[..., list(active.get(position, ()))] = 0.2
        signals.note(weights, position, 1.0, Revisits(far=32))
    seen = signals.view()
    assert seen.activated is not None
    assert seen.interval is not None
    assert seen.activated[0, 0].tolist() == [8, 8, 9, *range(3, 10)]
    assert seen.interval[0, 0].tolist() == [6, 6, 7, *[0] * 7]
    signals.keep(0, torch.tensor([[[0, 2, 9]]]))
    after = signals.view()
    assert after.activated is not None
    assert after.interval is not None
    assert (after.activated.flatten().tolist(), after.interval.flatten().tolist()) == (
        [8, 9, 9], [6, 7, 0]
    )  # fmt: skip


def test_a_head_that_looks_back_revisits_what_is_nearer() -> None:
    """Its favourites are far away on average, so all but the newest tokens count."""
    signals = Signals(1, 2, capacity=300)
    signals.extend(0, 300)
    weights = torch.full((1, 2, 300), 1e-4)
    weights[0, 0, :30] = 0.01
    weights[0, 1, 270:] = 0.01
    weights[0, :, 250] = 0.005
    signals.note(weights, 299, 1.0, Revisits(far=100, top=30, threshold=200, recent=16))
    assert signals.evidence[0, 0, 250] == pytest.approx(0.005)
    assert signals.evidence[0, 1, 250] == 0
    assert signals.evidence[0, :, 290].count_nonzero() == 0


def test_evidence_does_not_fade_and_history_does() -> None:
    signals = Signals(1, 1, capacity=4)
    signals.extend(0, 2)
    revisits = Revisits(far=50)
    signals.note(torch.tensor([[[0.6, 0.4]]]), 100, 0.5, revisits)
    for position in range(101, 111):
        signals.note(torch.zeros(1, 1, 2), position, 0.5, revisits)
    assert signals.evidence[0, 0].tolist()[:2] == pytest.approx([0.6, 0.4])
    assert signals.history[0, 0, 0] == pytest.approx(0.6 / 2**10)
    assert not signals.relevance[..., :2].any()


def test_what_anything_gets_does_not_count() -> None:
    """Attention at most `significance` times the average adds up to nothing."""
    signals = Signals(1, 1, capacity=100)
    signals.extend(0, 100)
    weights = torch.full((1, 1, 100), 0.009)
    weights[..., 3] = 0.05
    for position in range(200, 220):
        signals.note(weights, position, 1.0, Revisits(far=50), significance=4.0)
    assert signals.evidence[0, 0].count_nonzero() == 1
    assert signals.evidence[0, 0, 3] == pytest.approx(1.0)
    assert signals.history[0, 0].count_nonzero() == 1
    assert signals.relevance[0, 0, 50] == pytest.approx(0.009)


def test_a_head_start_fades() -> None:
    signals = Signals(1, 1, capacity=8)
    signals.extend(0, 2, history=0.5, evidence=1.0)
    for position in range(2, 5):
        signals.note(torch.zeros(1, 1, 2), position, 0.5, Revisits(far=50))
    assert signals.history[0, 0, :2].tolist() == pytest.approx([0.5 / 8] * 2)
    assert signals.evidence[0, 0, :2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("held", "weight", "counts"),
    [
        (100, 0.009, False),
        (100, 0.011, True),  # A hundredth of all, if not eight times the average.
        (2000, 0.0039, False),
        (2000, 0.0041, True),  # Eight times the average, if not a hundredth of all.
    ],
)
def test_what_is_eight_times_the_average_or_a_hundredth_of_all_counts(
    held: int, weight: float, counts: bool
) -> None:
    signals = Signals(1, 1, held)
    signals.extend(0, held)
    weights = torch.zeros(1, 1, held)
    weights[..., 3] = weight
    signals.note(weights, held, 1.0, Revisits(far=32), significance=8.0)
    assert bool(signals.evidence[0, 0, 3] > 0) is counts
    assert bool(signals.history[0, 0, 3] > 0) is counts
