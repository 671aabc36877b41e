"""Diagnostics of revisits, against the plainest statement of each and on a model that revisits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import naive
from transformers import AutoModelForCausalLM

from sglang_beacon.lab.random_model import random_prompt
from sglang_beacon.lab.revisit import (
    RevisitTrace,
    Thresholds,
    count_clusters,
    migration,
    principal_components,
    record,
)


@pytest.fixture(scope="module")
def trace(random_qwen3: Path) -> RevisitTrace:
    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    return record(model, random_prompt(60, 3), Thresholds(keys=5, distance=12.0))


def test_attention_is_the_models_own(trace: RevisitTrace, random_qwen3: Path) -> None:
    """The strongest keys and their weights, against eager attention; the model is as it was."""
    model = AutoModelForCausalLM.from_pretrained(
        random_qwen3, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        output = model(torch.tensor([trace.tokens]), output_attentions=True)
    for layer, weights in enumerate(output.attentions):
        top = weights[0].topk(5, dim=-1)
        seen = trace.favourites[layer] >= 0
        torch.testing.assert_close(
            trace.weights[layer][seen], top.values[seen], rtol=1e-4, atol=1e-6
        )
    again = record(model, trace.tokens, trace.thresholds)
    assert torch.equal(again.favourites, trace.favourites)
    assert model.config._attn_implementation == "eager"


def test_distances(trace: RevisitTrace) -> None:
    """The mean over the favourites; a query that sees fewer has all of them."""
    for layer, head, position in ((0, 0, 59), (1, 2, 30), (3, 3, 7), (2, 1, 2), (0, 0, 0)):
        keys = [k for k in trace.favourites[layer, head, position].tolist() if k >= 0]
        assert len(keys) == min(5, position + 1)
        mean = sum(position - key for key in keys) / len(keys)
        assert trace.distance[layer, head, position].item() == pytest.approx(mean)
        assert bool(trace.is_global[layer, head, position]) == (mean >= 12)
        looked = trace.looked_at(layer, head, position)
        assert {i for i, weight in enumerate(looked.tolist()) if weight} <= set(keys)
    assert torch.equal(trace.counts(), trace.is_global.sum(-1))
    assert 0 < trace.counts().sum() < trace.is_global.numel()
    assert trace.rate(20).shape == (3,)
    assert trace.rate(20).mean().item() == pytest.approx(trace.is_global.float().mean().item())


def test_queries_before_rope(trace: RevisitTrace) -> None:
    positions = [3, 17, 40]
    expected = naive.cosines([trace.queries[1, 2, p].tolist() for p in positions])
    got = trace.similarity(1, 2, positions).tolist()
    for row, wanted in zip(got, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)
    likeness = trace.likeness(1, 2, neighbours=2)
    similar = naive.cosines(trace.queries[1, 2].tolist())
    assert likeness[0] == 0
    assert likeness[9].item() == pytest.approx((similar[9][8] + similar[9][7]) / 2, abs=1e-5)


def test_thresholds_shrink_with_the_text() -> None:
    assert Thresholds.of(30_000) == (150, 200)
    assert Thresholds.of(600) == (60, 60)
    assert Thresholds.of(5) == (1, 0.5)


def test_groups_of_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(3, 16)
    queries = centres.repeat_interleave(10, 0) + 0.05 * torch.randn(30, 16, generator=generator)
    assert count_clusters(queries) == 3
    assert count_clusters(queries[:10]) == 1
    assert migration(queries[:10], queries[:10]) == pytest.approx(0, abs=1e-6)
    assert migration(queries[:10], queries[10:20]) > 0.9
    points, shares = principal_components(queries)
    assert points.shape == (30, 2)
    assert sum(shares) > 0.9
    # Groups stay apart.
    means = points.view(3, 10, 2).mean(1)
    assert torch.pdist(means).min() > 10 * (points.view(3, 10, 2) - means[:, None]).std()
    with pytest.raises(ValueError, match="principal components"):
        principal_components(queries[:2])
