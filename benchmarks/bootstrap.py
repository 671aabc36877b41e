"""Intervals for differences between two methods that answered the same items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Interval(NamedTuple):
    """An estimate with its 95 % percentile interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def paired(
    first: Sequence[float],
    second: Sequence[float],
    statistic: Callable[[np.ndarray, np.ndarray], np.ndarray],
    seed: int = 0,
) -> Interval:
    """Bootstrap a statistic of two methods over the items both answered.

    Parameters
    ----------
    first, second : sequence of float
        One score per item, in the same order.
    statistic : callable
        Of two arrays ``[..., items]``, over the last dimension.

    Raises
    ------
    ValueError
        When the methods did not answer the same number of items, or none.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} items cannot be paired")
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(a), (RESAMPLES, len(a)))
    low, high = np.quantile(statistic(a[drawn], b[drawn]), [0.025, 0.975])
    return Interval(float(statistic(a, b)), float(low), float(high))


def mean_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How much higher the first one's mean is."""
    difference: np.ndarray = a.mean(-1) - b.mean(-1)
    return difference


def mean_ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many times the second one's mean the first one's is; large where that is zero."""
    ratio: np.ndarray = a.mean(-1) / np.maximum(b.mean(-1), 1e-9)
    return ratio
