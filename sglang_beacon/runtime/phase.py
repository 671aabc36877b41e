"""The life of a query buffer, as integer arithmetic on lengths.

A buffer fills with one query a token and is brought back to ``n_beacon`` rows by FPS when it is
full (continual FPS). Once the cache is within ``n_recent`` tokens of its budget, the rows so far
are frozen as beacons, and the queries that follow are the recent ones. After an eviction both are
rolled into ``n_beacon`` rows and the cycle starts again.

Recent queries are always those of the newest tokens. So where a phase begins closer to the budget
than ``n_recent`` tokens (a long prompt that counts, an eviction that frees little, a budget that
shrank because fewer requests share a prefix), the queries of the tokens already past that point
count as recent, as far as they are still there: `recent_at` says how many.
"""

from __future__ import annotations

from sglang_beacon.core import BufferShape, ObservationPhase


def is_at_brink(shape: BufferShape, counted: int, budget: int) -> bool:
    """Whether the next ``n_recent`` tokens fill the budget: the beacons are frozen."""
    return counted >= budget - shape.n_recent


def recent_at(shape: BufferShape, counted: int, budget: int) -> int:
    """Newest tokens, of ``counted`` ones, that lie past ``budget - n_recent``."""
    return min(max(counted - (budget - shape.n_recent), 0), shape.n_recent)


def after_prefill(
    shape: BufferShape, observed: int, stretch: int, counted: int, budget: int
) -> ObservationPhase:
    """Phase after a prefill: ``observed`` queries seen in all, ``stretch`` of them just now."""
    # One row stays free: the first decoded token is computed before the first decision.
    recent = min(recent_at(shape, counted, budget), shape.n_recent - 1, stretch)
    beacons = min(observed, shape.n_beacon)
    return ObservationPhase(beacons + recent, is_at_brink(shape, counted, budget), recent)


def after_token(shape: BufferShape, phase: ObservationPhase) -> ObservationPhase:
    """Phase after one decoded token's query was appended."""
    if phase.filled >= shape.rows:
        raise ValueError(f"the query buffer is full: {phase}")
    return ObservationPhase(phase.filled + 1, phase.frozen, phase.recent + 1)


def after_fps(
    shape: BufferShape, phase: ObservationPhase, frozen: bool, carried: int
) -> ObservationPhase:
    """Phase after FPS over all filled rows; ``carried`` rows follow the chosen."""
    return ObservationPhase(min(phase.filled, shape.n_beacon) + carried, frozen, carried)


def after_roll(
    shape: BufferShape, phase: ObservationPhase, counted: int, budget: int
) -> ObservationPhase:
    """Phase after an eviction left ``counted`` tokens and FPS merged all filled rows."""
    carried = min(recent_at(shape, counted, budget), phase.recent)
    return after_fps(shape, phase, is_at_brink(shape, counted, budget), carried)
