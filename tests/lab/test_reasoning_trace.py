"""Traces have what they say they have, and premises look like everything else."""

from __future__ import annotations

from statistics import mean, median

import pytest
import torch

from sglang_beacon.lab.reasoning_trace import DIM, Trace, TraceConfig, reasoning_trace

CONFIG = TraceConfig(shortest=4096, longest=8192)


@pytest.fixture(scope="module", params=range(3))
def trace(request: pytest.FixtureRequest) -> Trace:
    return reasoning_trace(CONFIG, seed=request.param)


def weights(trace: Trace, position: int) -> torch.Tensor:
    """Attention of the query at a position to everything up to it."""
    return (trace.keys[: position + 1] @ trace.queries[position - trace.prompt]).softmax(0)


def some_positions(trace: Trace) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(trace.prompt, len(trace.keys), (80,), generator=generator).tolist()


def test_shapes(trace: Trace) -> None:
    length = len(trace.keys)
    assert CONFIG.shortest <= length <= CONFIG.longest
    assert trace.keys.shape == trace.values.shape == (length, DIM)
    assert trace.queries.shape == (length - trace.prompt, DIM)
    assert trace.prompt == round(length * CONFIG.prompt_share)
    number = CONFIG.premises * (CONFIG.phases - 1)
    assert trace.premises.shape == (number, CONFIG.premise_tokens)
    assert trace.premises.flatten().unique().numel() == trace.premises.numel()
    # Early, and needed late.
    assert trace.premises.max() < length * (CONFIG.phases - 1) / CONFIG.phases
    assert trace.needed.min() > length * 0.85
    assert trace.needed.max() + CONFIG.burst <= length


def test_the_same_seed_gives_the_same_trace() -> None:
    first, again, other = (reasoning_trace(CONFIG, seed) for seed in (7, 7, 8))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert len(first.keys) != len(other.keys)


def test_where_attention_goes(trace: Trace) -> None:
    """Sinks and neighbours have most of it, a tenth of the cache nearly all."""
    sinks, neighbours, tenth = [], [], []
    for position in some_positions(trace):
        weight = weights(trace, position)
        sinks.append(float(weight[: CONFIG.sinks].sum()))
        neighbours.append(float(weight[-2 * CONFIG.window :].sum()))
        tenth.append(float(weight.sort(descending=True).values[: position // 10].sum()))
    assert 0.1 < mean(sinks) < 0.4
    assert 0.4 < mean(neighbours) < 0.85
    assert mean(tenth) > 0.96


def test_premises_sleep_and_are_needed(trace: Trace) -> None:
    """All of them together have next to nothing, until one has a good part."""
    spans = trace.premises.flatten()
    asleep = [
        float(weights(trace, position)[spans[spans <= position]].sum())
        for position in some_positions(trace)
    ]
    assert median(asleep) < 0.003
    awake = [
        float(weights(trace, int(start) + 5)[span].sum())
        for span, start in zip(trace.premises, trace.needed, strict=True)
    ]
    assert median(awake) > 0.15


def test_premises_are_looked_at_before_they_are_needed(trace: Trace) -> None:
    """At the end of their phase at the latest; or nobody could know of them."""
    for span, needed in zip(trace.premises, trace.needed.tolist(), strict=True):
        content = trace.keys[span[0], -40:]
        asked = trace.queries[: needed - trace.prompt, -40:] @ content
        assert asked.max() > 0.6 * CONFIG.premise_gain


def test_a_premise_is_not_told_by_its_vectors(trace: Trace) -> None:
    """Norms of keys and values, and content against everybody's, are those of other tokens."""
    spans = trace.premises.flatten()
    others = torch.ones(len(trace.keys), dtype=torch.bool)
    others[spans] = False
    others[: CONFIG.sinks] = False
    for vectors in (trace.keys, trace.values):
        norms = vectors.norm(dim=-1)
        spread = norms[others].std() / len(spans) ** 0.5
        assert abs(norms[spans].mean() - norms[others].mean()) < 4 * spread
