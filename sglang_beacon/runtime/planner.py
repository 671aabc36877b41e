"""Decides, from lengths alone, what a request needs before its next token.

Pure integer arithmetic: no device value is read, so nothing waits for the device, and every
tensor-parallel rank reaches the same answer.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import (
    BufferShape,
    EvictionPlan,
    ObservationPhase,
    RequestLengths,
    RequestPlan,
)
from sglang_beacon.runtime import phase as phases


class Planned(NamedTuple):
    """A plan, and the phase once it has run."""

    plan: RequestPlan
    phase: ObservationPhase


def plan_token(
    lengths: RequestLengths,
    phase: ObservationPhase,
    config: KVPolicyConfig,
    shape: BufferShape | None,
    page_size: int,
    prompt_tokens: int,
) -> Planned:
    """Plan what follows a decoded token.

    Parameters
    ----------
    lengths : RequestLengths
        After the token; ``pinned`` is page aligned.
    phase : ObservationPhase
        After the token's query was appended.
    config : KVPolicyConfig
    shape : BufferShape or None
        None for a policy that observes no queries.
    page_size : int
        Tokens per page of the pool; an eviction ends on a page boundary.
    prompt_tokens : int
        Upper bound on the leading held tokens that belong to the prompt.

    Returns
    -------
    Planned
        The plan is empty when nothing is due. Planning again before another token is harmless.
    """
    freeze = roll = carried = 0
    if shape is not None:
        freeze, phase = _freeze(lengths.private, phase, config.budget, shape)

    observed, eviction = phase, None
    if lengths.private >= config.budget:
        eviction = EvictionPlan(lengths, config.kept(page_size), prompt_tokens)
        if shape is not None:
            roll = phase.filled
            phase = phases.after_roll(shape, phase, eviction.kept, config.budget)
            carried = phase.recent
    return Planned(RequestPlan(freeze, eviction, observed, roll, carried), phase)


def tokens_still_needed(private: int, config: KVPolicyConfig, page_size: int) -> int:
    """Slots a request may still take: from what it holds to its budget, plus one page.

    The page covers the token that is computed before the eviction which its predecessor caused.
    """
    return max(config.budget - private, 0) + page_size


def _freeze(
    private: int, phase: ObservationPhase, budget: int, shape: BufferShape
) -> tuple[int, ObservationPhase]:
    """FPS that is due before anything else: rows to choose from (0: none), and the phase after."""
    at_brink = phases.is_at_brink(shape, private, budget)
    if phase.frozen and phase.recent > phases.recent_at(shape, private, budget):
        # Fewer private tokens than foreseen: the prefix tree took more of the prompt.
        phase = phase._replace(frozen=False, recent=0)
    if phase.frozen or not (at_brink or phase.filled >= shape.rows):
        return 0, phase
    freeze = phase.filled if phase.filled > shape.n_beacon else 0
    return freeze, phases.after_fps(shape, phase, at_brink)
