"""The bounds are true: on the output always, on the mass each under its own condition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_beacon.ops.page_bounds import page_bounds
from sglang_beacon.ops.page_extrema import page_extrema
from sglang_beacon.runtime.bounds import (
    CalibratedDrop,
    certified_drop,
    exact_drop,
    output_error,
)

PAGE = 4


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """Logits' factors and values in float64: a query [D], keys [N, D], values [N, D], kept [N]."""
    num_keys, dim = draw(st.integers(2, 33)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    temperature = draw(st.sampled_from([0.01, 0.3, 1.0, 5.0, 40.0]))
    query = torch.randn(dim, generator=generator, dtype=torch.float64) * temperature
    keys = torch.randn(num_keys, dim, generator=generator, dtype=torch.float64)
    values = torch.randn(num_keys, dim, generator=generator, dtype=torch.float64)
    kept = torch.rand(num_keys, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    kept[draw(st.integers(0, num_keys - 1))] = True
    if draw(st.booleans()):
        # As far apart as values of one norm can be: dropped ones opposite to the kept.
        values = torch.nn.functional.normalize(values[:1], dim=-1).expand(num_keys, -1)
        values = torch.where(kept[:, None], values, -values)
    return query, keys, values, kept


@settings(max_examples=5000, deadline=None)
@given(case=attention_cases())
def test_output_error_and_certified_mass(case: tuple[torch.Tensor, ...]) -> None:
    check_bounds(*case)


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None)
@given(case=attention_cases())
def test_no_counterexample_in_many_cases(case: tuple[torch.Tensor, ...]) -> None:
    check_bounds(*case)


def check_bounds(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor
) -> None:
    logits = keys @ query
    weights = logits.softmax(-1)
    delta = weights[~kept].sum()
    full = weights @ values
    sparse = logits[kept].softmax(-1) @ values[kept]
    bound = output_error(values.norm(dim=-1).max(), delta)
    assert (full - sparse).norm() <= bound + 1e-9

    ordered = torch.cat((weights[kept], weights[~kept]))[None]
    exact = exact_drop(ordered, kept.sum()[None])
    assert float(exact) == pytest.approx(float(delta), abs=1e-9, rel=1e-6)

    pages = -(-len(keys) // PAGE)
    low, high = page_extrema(
        keys[:, None].float(), torch.arange(len(keys))[None], torch.tensor([len(keys)]), PAGE
    )
    bounds = page_bounds(query[None, None].float(), low, high, torch.tensor([pages]), 1.0)[0, 0]
    padded = torch.nn.functional.pad((~kept).float(), (0, pages * PAGE - len(keys)))
    lse_active = logits[kept].logsumexp(0)
    certified = certified_drop(lse_active.float(), bounds, padded.view(pages, PAGE).sum(1))
    # Logits are of the order of 100 at the most, in float32.
    assert certified >= float(delta) * (1 - 1e-3) - 1e-7


def test_a_tight_case() -> None:
    """Half of the mass dropped, values opposite: the bound is met exactly."""
    values = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    full, sparse = values.mean(0), values[0]
    bound = output_error(torch.tensor(1.0), torch.tensor(0.5))
    assert (full - sparse).norm() == bound


def test_a_small_mass_is_not_lost_to_rounding() -> None:
    for mass in (1e-4, 1e-9):
        weights = torch.tensor([[0.5, 0.5, mass / 2, mass / 2]])
        dropped = exact_drop(weights, torch.tensor([2, 4]))[0].tolist()
        assert dropped == [pytest.approx(mass, rel=1e-6), 0]


def test_nothing_dropped_and_nothing_attended_to() -> None:
    bounds, sizes = torch.tensor([1.0, -math.inf]), torch.tensor([3.0, 0.0])
    assert certified_drop(torch.tensor(2.0), bounds, torch.zeros(2)) == 0
    assert certified_drop(torch.tensor(-math.inf), bounds, sizes) == 1


# Calibration.


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5])
def test_coverage_of_exchangeable_residuals(alpha: float) -> None:
    """Skewed residuals, drawn independently: at least 1 - alpha, within binomial error."""
    generator = torch.Generator().manual_seed(1)
    drop = CalibratedDrop(alpha, window=200)
    predicted = torch.rand(6000, generator=generator) * 0.2
    error = torch.distributions.Exponential(20.0).sample((6000,)) - 0.03
    for guess, off in zip(predicted.tolist(), error.tolist(), strict=True):
        drop.observe([guess], [min(max(guess + off, 0.0), 1.0)])
    assert drop.coverage is not None
    tolerance = 4 * math.sqrt(alpha * (1 - alpha) / drop.probes)
    # No more than what the discreteness of 200 residuals adds.
    assert 1 - alpha - tolerance <= drop.coverage <= 1 - alpha + tolerance + 1 / 200


def test_the_finite_sample_correction() -> None:
    """With alpha 0.1, nine residuals are the fewest that say anything: then the largest counts."""
    drop = CalibratedDrop(0.1, window=100)
    for n in range(9):
        assert drop.bound(0.2) == 1.0
        drop.observe([0.2], [0.2 + n / 100])
    assert drop.quantile == pytest.approx(0.08)
    assert drop.bound(0.2) == pytest.approx(0.28)
    assert drop.coverage == 1.0


def test_old_residuals_are_forgotten() -> None:
    drop = CalibratedDrop(0.5, window=3)
    for true in (0.9, 0.9, 0.9, 0.1, 0.1, 0.1):
        drop.observe([0.0], [true])
    assert drop.quantile == pytest.approx(0.1)
    assert drop.probes == 6


def test_residuals_of_one_moment_come_and_go_together() -> None:
    drop = CalibratedDrop(0.25, window=2)
    for true in ([0.9, 0.8, 0.7], [0.3, 0.2], [0.1, 0.1, 0.1]):
        drop.observe([0.0] * len(true), true)
    # Of 0.1, 0.1, 0.1, 0.2 and 0.3 the fifth.
    assert drop.quantile == pytest.approx(0.3)
    assert drop.probes == 8
    # The first moment had no bound yet, which is the bound 1; then 0.9 and 0.9 held.
    assert drop.covered == 8


def test_bounds_are_shares() -> None:
    drop = CalibratedDrop(0.5, window=10)
    for _ in range(5):
        drop.observe([0.9], [0.2])
    assert drop.bound(0.5) == 0.0
    assert CalibratedDrop(0.5, window=10).coverage is None


@pytest.mark.parametrize(("alpha", "window"), [(0.0, 5), (1.0, 5), (-0.1, 5), (0.1, 0)])
def test_settings_that_make_no_sense_are_refused(alpha: float, window: int) -> None:
    with pytest.raises(ValueError, match=r"alpha|window"):
        CalibratedDrop(alpha, window)
