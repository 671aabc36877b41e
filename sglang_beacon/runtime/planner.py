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
    Fold,
    ObservationPhase,
    RequestLengths,
    RequestPlan,
)
from sglang_beacon.runtime import phase as phases
from sglang_beacon.runtime.allowance import Allowance


class Planned(NamedTuple):
    """A plan, and the phase once it has run."""

    plan: RequestPlan
    phase: ObservationPhase


def plan_token(
    lengths: RequestLengths,
    allowance: Allowance,
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
    allowance : Allowance
        How those lengths stand against the budget.
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
    freeze = roll = None
    if shape is not None:
        freeze, phase = _freeze(shape, phase, allowance)

    observed, eviction = phase, None
    if allowance.is_used_up:
        kept = allowance.kept(config.keep_ratio, page_size)
        eviction = EvictionPlan(lengths, kept, prompt_tokens, allowance.detach)
        if shape is not None:
            filled = phase.filled
            phase = phases.after_roll(shape, phase, kept, allowance.budget)
            roll = Fold(filled, phase.recent)
    return Planned(RequestPlan(freeze, eviction, observed, roll), phase)


def _freeze(
    shape: BufferShape, phase: ObservationPhase, allowance: Allowance
) -> tuple[Fold | None, ObservationPhase]:
    """FPS that is due before anything else, and the phase after it."""
    counted, budget = allowance.counted, allowance.budget
    at_brink = phases.is_at_brink(shape, counted, budget)
    due = phases.recent_at(shape, counted, budget)
    if phase.frozen and (not at_brink or phase.recent > due):
        # Further from the budget than foreseen: the tree took more of the prompt, or more
        # requests share it.
        phase = phase._replace(frozen=False)
    if phase.frozen or not (at_brink or phase.filled >= shape.rows):
        return None, phase
    carried = min(due, phase.recent) if at_brink else 0
    if phase.filled <= shape.n_beacon:
        return None, phase._replace(frozen=at_brink, recent=carried)
    return Fold(phase.filled, carried), phases.after_fps(shape, phase, at_brink, carried)
