"""Carries out plans on the device: score, select and compact, per layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.core import EvictionPlan, ObservationPhase, Observations, RequestPlan
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.policies.base import Policy
from sglang_beacon.runtime.query_buffer import QueryBuffer


class LayerView(NamedTuple):
    """One layer as the compactor sees it.

    ``keys`` and ``values`` are the pool's buffers [num_slots, H_kv, D]; ``scale`` is the softmax
    scale; ``rope`` is the layer's rotary table.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    rope: RopeTable


class Work(NamedTuple):
    """A plan with what it needs on the device.

    ``slots`` [held] int64 are the request's slots in position order, taken before any was given
    back; None without an eviction.
    """

    plan: RequestPlan
    policy: Policy
    buffer: QueryBuffer | None
    slots: torch.Tensor | None


def run(work: Sequence[Work], layers: Sequence[LayerView]) -> None:
    """Carry out plans, one request after the other.

    Every source slot of a (layer, head) is read before any destination is written, and all
    destinations are private slots that stay with the request, so nothing else can see a write.
    """
    for plan, policy, buffer, slots in work:
        if plan.freeze and buffer is not None:
            buffer.compress(plan.freeze)
        if plan.eviction is not None and slots is not None:
            for index, layer in enumerate(layers):
                _evict(index, layer, plan.eviction, plan.observed, policy, buffer, slots)
        if plan.roll and buffer is not None:
            buffer.compress(plan.roll, plan.carried)


def observe(
    index: int,
    rope: RopeTable,
    scale: float,
    plan: EvictionPlan,
    phase: ObservationPhase,
    buffer: QueryBuffer | None,
) -> Observations:
    """Assemble what a policy may look at in one layer.

    Beacons are rotated to the newest position and see everything; a recent query keeps its own
    position and does not see the tokens after it. Those are the last ones of the cache, since the
    newest ``n_recent`` tokens are never evicted.
    """
    position = plan.lengths.logical - 1
    if buffer is None:
        return Observations(index, position, plan.prompt_tokens, scale)
    rows = buffer.rows[index, :, : phase.filled]
    age = torch.zeros(phase.filled, dtype=torch.int64, device=rows.device)
    age[phase.filled - phase.recent :] = torch.arange(phase.recent - 1, -1, -1, device=rows.device)
    queries = ops.rotate(rows, position - age, rope)
    visible = plan.lengths.held - age
    return Observations(index, position, plan.prompt_tokens, scale, queries, visible)


def _evict(
    index: int,
    layer: LayerView,
    plan: EvictionPlan,
    phase: ObservationPhase,
    policy: Policy,
    buffer: QueryBuffer | None,
    slots: torch.Tensor,
) -> None:
    observations = observe(index, layer.rope, layer.scale, plan, phase, buffer)
    keys = layer.keys[slots].transpose(0, 1)
    keep = policy.keep(keys, observations, plan)
    destination = slots[plan.lengths.pinned : plan.held_after]
    ops.kv_compact(layer.keys, layer.values, slots, keep, destination)
