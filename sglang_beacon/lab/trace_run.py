"""Runs a policy over synthetic traces: the server's own planner, policies and memory, no model.

A layer for each trace, with one head. Everything that the policy needs to know is followed token by
token; how far its attention is from that over the whole cache is looked at every `stride` queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from sglang_beacon import policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import CachedKeys, EvictionPlan, ObservationPhase
from sglang_beacon.lab.reasoning_trace import DIM, Trace
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.runtime.compactor import carry_out, choose
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.request import RequestState

# One token of a premise may say nearly all that a query wants of it.
RECALLED = 0.95
# Queries whose weights are added up together.
BLOCK = 64
# A trace has no words.
_NO_DELIMITER = torch.tensor(0)


class Outcome(NamedTuple):
    """What became of a trace.

    Attributes
    ----------
    removed : float
        Share of all tokens that were evicted by the end.
    mass : float
        Attention over the whole cache that lies on retained tokens, mean of queries.
    recall : float
        Share of the premises that were still there when they were needed: at least `RECALLED` of
        the attention that they would get among themselves.
    interactions : float
        Share of query-key pairs that were not read, of those of full attention.
    error : float
        Relative error of the output, mean of queries.
    cosine : float
        Of the output with that over the whole cache, mean of queries.
    """

    removed: float
    mass: float
    recall: float
    interactions: float
    error: float
    cosine: float


class FullAttention:
    """What attention over the whole cache says, computed once for all runs on some traces.

    Parameters
    ----------
    traces : sequence of Trace
        Of one length, with one length of the prompt.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = traces
        self.prompt, self.length = traces[0].prompt, len(traces[0].keys)
        self.keys = torch.stack([trace.keys for trace in traces])
        self.values = torch.stack([trace.values for trace in traces])
        # By step, as a step takes them.
        self.queries = torch.stack([trace.queries for trace in traces], dim=1)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._later: list[torch.Tensor] = []

    def later(self, position: int) -> torch.Tensor:
        """Weights [traces, N] of all queries past a position, added up; whole blocks of queries."""
        if not self._later:
            total = torch.zeros(self.keys.shape[:2])
            for begin in range(self.prompt, self.length, BLOCK)[::-1]:
                end = min(begin + BLOCK, self.length)
                queries = self.queries[begin - self.prompt : end - self.prompt].transpose(0, 1)
                logits = queries @ self.keys[:, :end].transpose(1, 2)
                unborn = torch.arange(end) > torch.arange(begin, end)[:, None]
                total[:, :end] += logits.masked_fill_(unborn, -torch.inf).softmax(2).sum(1)
                self._later.insert(0, total.clone())
            self._later.append(torch.zeros_like(total))
        return self._later[-(-(position + 1 - self.prompt) // BLOCK)]

    def at(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [traces, position + 1] and outputs [traces, DIM] of a generated token."""
        if position not in self._known:
            query, seen = self.queries[position - self.prompt], slice(0, position + 1)
            weights = (self.keys[:, seen] @ query[..., None]).softmax(1)
            outputs = weights.transpose(1, 2) @ self.values[:, seen]
            self._known[position] = weights[..., 0], outputs[:, 0]
        return self._known[position]


class TraceRun:
    """One policy on some traces, each of which is a layer of its own.

    Layers have nothing to do with each other here; together they take fewer and larger operations.

    Parameters
    ----------
    full : FullAttention
        Its traces' premises are looked at by `outcomes` alone.
    config : KVPolicyConfig
        The budget counts all tokens.
    stride : int
        Queries from one whose output is looked at to the next.
    """

    def __init__(self, full: FullAttention, config: KVPolicyConfig, stride: int = 16) -> None:
        self.full = full
        self.stride = stride
        self.policy = policies.create(config)
        self.state = RequestState(config, self.policy, page_size=1)
        self.memory = self.state.memory
        # Keys and queries of a trace carry no rotation.
        still = torch.cat((torch.ones(full.length, 1), torch.zeros(full.length, 1)), dim=1)
        self.rope = RopeTable(still, neox=True)
        # By step, layer and head, as signals want them.
        self._value_norms = full.values.norm(dim=-1).T[..., None]
        # What is held lies at the front: logical positions, keys and values by layer.
        self.positions = torch.arange(full.length).repeat(len(full.traces), 1)
        self.keys, self.values = full.keys.clone(), full.values.clone()
        self.held = full.prompt
        self._slots = torch.arange(full.length)
        self._pools = [list(each[:, :, None]) for each in (self.keys, self.values)]
        self.seen: list[torch.Tensor] = []
        self.recalled: list[list[float]] = [[] for _ in full.traces]

    @property
    def cache(self) -> CachedKeys:
        """What is held, as the server would say."""
        keys, values = self._pools
        return CachedKeys(keys, self._slots[: self.held], values)

    @torch.no_grad()
    def outcomes(self) -> list[Outcome]:
        """Run the traces to their end; what became of each."""
        asked: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for layer, trace in enumerate(self.full.traces):
            for position, premise in zip(trace.needed.tolist(), trace.premises, strict=True):
                asked.setdefault(position, []).append((layer, premise))
        self._begin()
        for position in range(self.full.prompt, self.full.length):
            for layer, premise in asked.get(position, ()):
                self._ask(position, layer, premise)
            self._step(position)
        means = torch.stack(self.seen, dim=-1).double().mean(-1).tolist()
        return [
            Outcome(
                removed=1 - self.held / self.full.length,
                mass=mass,
                recall=fmean(recalled),
                interactions=1 - read,
                error=error,
                cosine=cosine,
            )
            for (mass, read, error, cosine), recalled in zip(means, self.recalled, strict=True)
        ]

    def _begin(self) -> None:
        state, prompt, layers = self.state, self.full.prompt, len(self.full.traces)
        if state.shape is not None:
            state.seed(QueryBuffer(state.shape, layers, 1, DIM, torch.float32, "cpu"), None)
        if state.policy is not None:
            # Nobody sees the prompt's queries.
            state.after_prefill(0, 0, prompt)
        if self.memory is not None:
            self.memory.begin(layers, 1, 1, "none", "cpu")
            self.memory.after_prefill(self.cache, torch.empty(layers, 0, 1, DIM), prompt, 1.0)

    def _step(self, position: int) -> None:
        queries = self.full.queries[position - self.full.prompt][:, None]
        # Until the first eviction, everything lies where it always did.
        if self.held < position:
            self.positions[:, self.held] = position
            self.keys[:, self.held] = self.full.keys[:, position]
            self.values[:, self.held] = self.full.values[:, position]
        self.held += 1
        if (position - self.full.prompt) % self.stride == 0:
            self._look(position, queries)
        state, memory = self.state, self.memory
        if state.policy is None:
            return
        if state.buffer is not None:
            state.buffer.append(state.after_token(), queries)
        if memory is not None:
            norms = self._value_norms[position]
            memory.after_token(self.cache, queries, _NO_DELIMITER, position, 1.0, norms)
        lengths = state.lengths(0, self.held)
        plan = state.plan(lengths, state.settle(lengths, share=0))
        if not plan.is_empty:
            carry_out(plan, state.buffer, self._choose)

    def _choose(self, plan: EvictionPlan, phase: ObservationPhase, probe: bool) -> None:
        assert self.policy is not None
        buffer, memory = self.state.buffer, self.memory
        keep = choose(self.policy, self.cache, self.rope, 1.0, plan, phase, buffer, memory, probe)
        if keep is not None:
            self._keep(keep[:, 0])

    def _keep(self, kept: torch.Tensor) -> None:
        """Move what stays, indices [traces, kept] of what is held, to the front."""
        self.held = kept.shape[1]
        self.positions[:, : self.held] = self.positions.gather(1, kept)
        for pool in (self.keys, self.values):
            pool[:, : self.held] = pool.gather(1, kept[..., None].expand(-1, -1, DIM))

    def _ask(self, position: int, layer: int, premise: torch.Tensor) -> None:
        """Whether what a query wants of a premise is still there."""
        query = self.full.queries[position - self.full.prompt, layer]
        weights = (self.full.keys[layer, premise] @ query).softmax(0)
        kept = weights[torch.isin(premise, self.positions[layer, : self.held])]
        self.recalled[layer].append(float(kept.sum() >= RECALLED))

    def _look(self, position: int, queries: torch.Tensor) -> None:
        """Compare outputs with those over the whole cache."""
        whole, expected = self.full.at(position)
        weights = whole.gather(1, self.positions[:, : self.held])
        mass = weights.sum(1)
        read = torch.full_like(mass, self.held)
        memory = self.memory
        active = memory.active if memory is not None else None
        if memory is None or active is None:
            averages = (weights / mass[:, None])[:, None] @ self.values[:, : self.held]
            outputs = averages[:, 0]
        else:
            active.begin(position)
            keys, slots, values = self.cache
            assert values is not None
            outputs = torch.cat(
                [
                    memory.attend(layer, query, keys[layer], values[layer], slots, 1.0)
                    for layer, query in enumerate(queries)
                ]
            )
            read = torch.stack([each[0] for each in active.counts])
        if memory is not None:
            memory.norms[:] = outputs.norm(dim=-1, keepdim=True)
        error = (outputs - expected).norm(dim=-1) / expected.norm(dim=-1)
        cosine = torch.nn.functional.cosine_similarity(outputs, expected)
        self.seen.append(torch.stack((mass, read / (position + 1), error, cosine), dim=-1))


class ClairvoyantRun(TraceRun):
    """Keeps what queries to come will look at the most: about the best that memory can do."""

    def _choose(self, plan: EvictionPlan, phase: ObservationPhase, probe: bool) -> None:
        newest = int(self.positions[0, self.held - 1])
        wanted = self.full.later(newest).gather(1, self.positions[:, : self.held])
        self._keep(wanted.topk(plan.held_after, dim=1).indices.sort(1).values)
