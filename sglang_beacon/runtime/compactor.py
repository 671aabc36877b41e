"""Carries out plans on the device: score, select and compact, in all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.core import (
    Alignment,
    CachedKeys,
    EvictionPlan,
    ObservationPhase,
    Observations,
    RequestPlan,
)
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.policies.base import Policy
from sglang_beacon.runtime.memory import Memory
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.tracer import Tracer


class KVView(NamedTuple):
    """The model's cache as the compactor sees it.

    ``keys`` and ``values`` are each layer's pool [num_slots, H_kv, D]; ``scale`` is the softmax
    scale and ``rope`` the rotary table of all layers.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scale: float
    rope: RopeTable


class Work(NamedTuple):
    """A plan with what it needs on the device.

    ``source`` [held] int64 are the request's slots in position order, taken before any was given
    back, if the plan looks at the cache; ``target`` [kept] int64 those its tokens move to, if it
    evicts.
    """

    plan: RequestPlan
    policy: Policy
    buffer: QueryBuffer | None
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    memory: Memory | None = None
    tracer: Tracer | None = None


def run(work: Sequence[Work], cache: KVView) -> None:
    """Carry out plans, one request after the other, in the order they were made.

    Every source slot of a (layer, head) is read before it is overwritten, and all targets are
    private slots that stay with the request, so nothing else can see a write. A target may have
    been a source of this plan or of an earlier one: what is given back can be given out again.
    """
    for item in work:
        carry_out(item.plan, item.buffer, partial(_choose, item, cache))


def carry_out(
    plan: RequestPlan,
    buffer: QueryBuffer | None,
    choose: Callable[[EvictionPlan, ObservationPhase, bool], None],
) -> None:
    """Do what a plan asks for, in its order.

    ``choose`` knows the cache: it chooses what an eviction keeps, and carries it out unless told
    that this is a probe.
    """
    if plan.freeze is not None and buffer is not None:
        buffer.compress(plan.freeze)
    if plan.eviction is not None:
        choose(plan.eviction, plan.observed, False)
    elif plan.probe is not None:
        choose(plan.probe, plan.observed, True)
    if plan.roll is not None and buffer is not None:
        buffer.compress(plan.roll)


def observe(
    alignment: Alignment,
    rope: RopeTable,
    scale: float,
    plan: EvictionPlan,
    phase: ObservationPhase,
    buffer: QueryBuffer | None,
    memory: Memory | None,
) -> Observations:
    """Assemble what a policy may look at.

    Beacons are rotated to the newest position and see everything; a recent query keeps its own
    position and does not see the tokens after it. Those are the last ones of the cache, since the
    newest ``n_recent`` tokens are never evicted. Queries that stand for the future see everything.
    """
    position = plan.lengths.logical - 1
    signals = None if memory is None or memory.signals is None else memory.signals.view()
    if buffer is None:
        return Observations(position, plan.prompt_tokens, scale, signals=signals)
    rows = buffer.rows[:, :, : phase.filled]
    age = torch.zeros(phase.filled, dtype=torch.int64, device=rows.device)
    age[phase.filled - phase.recent :] = torch.arange(phase.recent - 1, -1, -1, device=rows.device)
    if alignment.future:
        ahead = ops.average_rotation(rope, position + 1, alignment.future)
        queries = ops.rotate(rows, torch.zeros_like(age), ahead)
        age = torch.zeros_like(age)
    else:
        own = position - age
        if alignment.unrotated:
            own[: phase.filled - phase.recent] = 0
        queries = ops.rotate(rows, own, rope)
    visible = plan.lengths.held - age
    return Observations(position, plan.prompt_tokens, scale, queries, visible, signals)


def choose(
    policy: Policy,
    keys: CachedKeys,
    rope: RopeTable,
    scale: float,
    plan: EvictionPlan,
    phase: ObservationPhase,
    buffer: QueryBuffer | None,
    memory: Memory | None,
    probe: bool,
    tracer: Tracer | None = None,
) -> torch.Tensor | None:
    """What an eviction keeps, as `Policy.keep` says; None if it is a probe, and nothing moves.

    What is remembered of the tokens follows.
    """
    seen = observe(policy.alignment, rope, scale, plan, phase, buffer, memory)
    keep = policy.keep(keys, seen, plan)
    if probe:
        assert memory is not None
        memory.probe(plan, keep)
        return None
    if tracer is not None:
        tracer.eviction(policy, keys, seen, plan, keep)
    if memory is not None:
        memory.note_eviction(plan, keep)
    return keep


def _choose(
    work: Work, cache: KVView, plan: EvictionPlan, phase: ObservationPhase, probe: bool
) -> None:
    assert work.source is not None
    keys = CachedKeys(cache.keys, work.source, cache.values)
    keep = choose(
        work.policy,
        keys,
        cache.rope,
        cache.scale,
        plan,
        phase,
        work.buffer,
        work.memory,
        probe,
        work.tracer,
    )
    if keep is None:
        return
    assert work.target is not None
    # Tokens of a request that leaves the tree move from before its own slots into those.
    forward = not plan.detach
    ops.kv_compact(cache.keys, cache.values, work.source, keep, work.target, forward)
