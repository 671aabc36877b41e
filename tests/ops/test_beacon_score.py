"""The score against a loop over KV heads, query heads of the group, queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import naive
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon import ops
from sglang_beacon.ops.beacon_score import AGGREGATIONS, SOFTNESS


def beacon_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    *aggregation: str,
) -> torch.Tensor:
    """Scores of one layer's keys [H_kv, N, D], scattered over a pool that has NaN around them."""
    num_keys = keys.shape[1]
    slots = torch.randperm(num_keys + 5, generator=torch.Generator().manual_seed(0))[:num_keys]
    pool = torch.full((num_keys + 5, keys.shape[0], keys.shape[2]), math.nan, dtype=keys.dtype)
    pool[slots] = keys.transpose(0, 1)
    (score,) = ops.beacon_score([pool], slots, queries[None], visible, scale, *aggregation)
    return score


def by_loops(
    keys: torch.Tensor,
    queries: torch.Tensor,
    visible: list[int],
    scale: float,
    aggregation: str,
) -> list[list[float]]:
    group = len(queries) // len(keys)
    result = []
    for kv_head, head_keys in enumerate(keys.double().tolist()):
        rows = []
        for query_head in range(kv_head * group, (kv_head + 1) * group):
            for query, limit in zip(queries[query_head].double().tolist(), visible, strict=True):
                rows.append(naive.attention(query, head_keys, limit, scale))
        columns = list(zip(*rows, strict=True))
        if aggregation == "max":
            result.append([max(column) for column in columns])
        elif aggregation == "mean":
            result.append([math.fsum(column) / len(column) for column in columns])
        else:
            result.append(
                [
                    SOFTNESS * math.log(math.fsum(math.exp(w / SOFTNESS) for w in column))
                    for column in columns
                ]
            )
    return result


def random_case(
    num_kv_heads: int, group: int, num_queries: int, num_keys: int, dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(num_kv_heads, num_keys, dim, generator=generator)
    queries = torch.randn(num_kv_heads * group, num_queries, dim, generator=generator)
    visible = torch.randint(1, num_keys + 1, (num_queries,), generator=generator)
    return keys, queries, visible


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    num_queries=st.integers(1, 7),
    num_keys=st.integers(1, 40),
    dim=st.integers(1, 8),
    scale=st.sampled_from([0.25, 1.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_equals_the_loops(
    aggregation: str,
    num_kv_heads: int,
    group: int,
    num_queries: int,
    num_keys: int,
    dim: int,
    scale: float,
    seed: int,
) -> None:
    keys, queries, visible = random_case(num_kv_heads, group, num_queries, num_keys, dim, seed)
    score = beacon_score(keys, queries, visible, scale, aggregation)
    expected = torch.tensor(by_loops(keys, queries, visible.tolist(), scale, aggregation))
    assert score.dtype == torch.float32
    torch.testing.assert_close(score, expected, atol=2e-6, rtol=1e-5)


def test_the_method_takes_the_maximum() -> None:
    keys, queries, visible = random_case(2, 2, 3, 9, 4, seed=1)
    assert torch.equal(
        beacon_score(keys, queries, visible, 0.5), beacon_score(keys, queries, visible, 0.5, "max")
    )


def test_a_worked_example() -> None:
    """Weights 3/4 and 1/4 by the first query; the second sees the first key alone."""
    keys = torch.tensor([[[math.log(3.0)], [0.0]]])
    queries = torch.ones(1, 2, 1)
    visible = torch.tensor([2, 1])
    for aggregation, expected in (("max", [1.0, 0.25]), ("mean", [0.875, 0.125])):
        score = beacon_score(keys, queries, visible, 1.0, aggregation)
        torch.testing.assert_close(score, torch.tensor([expected]))


@settings(max_examples=25, deadline=None)
@given(group=st.integers(1, 4), num_queries=st.integers(1, 8), seed=st.integers(0, 1000))
def test_bounds(group: int, num_queries: int, seed: int) -> None:
    """Mean weights sum to 1; mean <= max <= soft max <= max + T log(number of rows)."""
    case = random_case(2, group, num_queries, 21, 4, seed)
    largest, mean, soft = (beacon_score(*case, 1.0, a) for a in ("max", "mean", "logsumexp"))
    torch.testing.assert_close(mean.sum(-1), torch.ones(2))
    assert (mean <= largest + 1e-6).all()
    assert (largest <= soft + 1e-6).all()
    assert (soft <= largest + SOFTNESS * math.log(group * num_queries) + 1e-6).all()
    assert (largest.sum(-1) >= 1 - 1e-5).all()
    assert (largest >= 0).all()
    assert (largest <= 1 + 1e-6).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_keys_nobody_may_see_do_not_count(aggregation: str) -> None:
    keys, queries, _ = random_case(2, 3, 4, 12, 4, seed=2)
    visible = torch.tensor([1, 7, 3, 7])
    score = beacon_score(keys, queries, visible, 1.0, aggregation)
    hidden = keys.clone()
    hidden[:, 7:] = 1e4
    assert torch.equal(beacon_score(hidden, queries, visible, 1.0, aggregation), score)
    short = beacon_score(keys[:, :7], queries, visible, 1.0, aggregation)
    torch.testing.assert_close(score[:, :7], short)
    nothing = SOFTNESS * math.log(12) if aggregation == "logsumexp" else 0.0
    torch.testing.assert_close(score[:, 7:], torch.full((2, 5), nothing))


def test_a_query_head_serves_its_own_kv_head() -> None:
    """Heads of a group are consecutive; changing them touches one row of the score alone."""
    keys, queries, visible = random_case(3, 2, 4, 15, 4, seed=3)
    before = beacon_score(keys, queries, visible, 1.0)
    changed = queries.clone()
    changed[2:4] = -3 * queries[2:4]
    after = beacon_score(keys, changed, visible, 1.0)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.allclose(before[1], after[1])
    swapped = queries[[1, 0, 3, 2, 5, 4]]
    torch.testing.assert_close(beacon_score(keys, swapped, visible, 1.0), before)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_large_logits_stay_finite(aggregation: str) -> None:
    keys, queries, visible = random_case(2, 2, 4, 15, 4, seed=4)
    score = beacon_score(1e4 * keys, queries, visible, 1.0, aggregation)
    assert torch.isfinite(score).all()
    expected = by_loops(1e4 * keys, queries, visible.tolist(), 1.0, aggregation)
    torch.testing.assert_close(score, torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keys_are_scored_in_float32(dtype: torch.dtype) -> None:
    keys, queries, visible = random_case(2, 2, 4, 33, 16, seed=5)
    keys = keys.to(dtype)
    score = beacon_score(keys, queries, visible, 0.25)
    assert score.dtype == torch.float32
    assert torch.equal(score, beacon_score(keys.float(), queries, visible, 0.25))


def test_layers_do_not_mix() -> None:
    cases = [random_case(2, 2, 4, 15, 4, seed) for seed in (6, 7, 8)]
    pools = [keys.transpose(0, 1) for keys, _, _ in cases]
    queries = torch.stack([queries for _, queries, _ in cases])
    visible = cases[0][2]
    score = ops.beacon_score(pools, torch.arange(15), queries, visible, 0.3)
    for (keys, own, _), layer in zip(cases, score, strict=True):
        torch.testing.assert_close(layer, beacon_score(keys, own, visible, 0.3))


# The kernel.

CASES = {
    # KV heads, group, queries, keys, dim
    "one of each": (1, 1, 1, 1, 16),
    "odd": (2, 3, 7, 45, 24),
    "pages of 64": (2, 2, 32, 128, 64),
    "a stretch and a key": (1, 4, 32, 513, 64),
    "head size 128": (2, 1, 32, 70, 128),
    "two blocks of rows": (1, 8, 25, 600, 64),
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel(case: str, aggregation: str, dtype: torch.dtype) -> None:
    """Two layers in strided pools with NaN around the keys; at most twice as wrong as torch."""
    kv_heads, group, num_queries, num_keys, dim = CASES[case]
    layers = 2
    generator = torch.Generator().manual_seed(num_keys)
    storage = torch.full((layers, num_keys + 3, 2, kv_heads, dim), math.nan, dtype=dtype)
    slots = torch.randperm(num_keys + 3, generator=generator)[:num_keys]
    storage[:, slots] = torch.randn(layers, num_keys, 2, kv_heads, dim, generator=generator).to(
        dtype
    )
    queries = torch.randn(layers, kv_heads * group, num_queries, dim, generator=generator)
    # What the kernel multiplies; rounding the queries is no fault of its own.
    queries = queries.to(dtype).float()
    visible = torch.randint(1, num_keys + 1, (num_queries,), generator=generator)
    pools = list(storage.to(DEVICE)[:, :, 1])
    arguments = [x.to(DEVICE) for x in (slots, queries, visible)]
    launch = kernel("beacon_score", "beacon_score")
    score = poisoned(lambda: launch(pools, *arguments, dim**-0.5, aggregation)).cpu()
    exact = torch.tensor(
        [
            by_loops(pool[slots].transpose(0, 1), own, visible.tolist(), dim**-0.5, aggregation)
            for pool, own in zip(storage[:, :, 1], queries, strict=True)
        ]
    )
    by_torch = ops.beacon_score(pools, *arguments, dim**-0.5, aggregation).cpu()
    assert (score - exact).abs().max() <= 2 * (by_torch - exact).abs().max() + 1e-6


def test_kernel_of_large_logits() -> None:
    keys = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(1)) * 1e4
    queries = torch.randn(1, 4, 5, 16, generator=torch.Generator().manual_seed(2))
    arguments = (
        [keys.to(DEVICE)],
        *(x.to(DEVICE) for x in (torch.arange(40), queries, torch.full((5,), 40))),
    )
    score = kernel("beacon_score", "beacon_score")(*arguments, 1.0)
    torch.testing.assert_close(score, ops.beacon_score(*arguments, 1.0))
