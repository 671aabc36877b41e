"""Runs a policy over a synthetic trace: the server's own planner, policies and memory, no model.

One layer, one head. Everything that the policy needs to know is followed token by token; how far
its attention is from that over the whole cache is looked at every `stride` queries.
"""

from __future__ import annotations

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
    """What attention over the whole cache of a trace says; computed once for all runs on it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [position + 1] and output [DIM] of the query of a generated token."""
        if position not in self._known:
            trace, seen = self.trace, slice(0, position + 1)
            weights = (trace.keys[seen] @ trace.queries[position - trace.prompt]).softmax(0)
            self._known[position] = weights, weights @ trace.values[seen]
        return self._known[position]


class TraceRun:
    """One policy on one trace.

    Parameters
    ----------
    full : FullAttention
        Its trace's premises are looked at by `outcome` alone.
    config : KVPolicyConfig
        The budget counts all tokens.
    stride : int
        Queries from one whose output is looked at to the next.
    """

    def __init__(self, full: FullAttention, config: KVPolicyConfig, stride: int = 16) -> None:
        self.trace = trace = full.trace
        self.full = full
        self.stride = stride
        self.policy = policies.create(config)
        self.state = RequestState(config, self.policy, page_size=1)
        self.memory = self.state.memory
        # Keys and queries of a trace carry no rotation.
        still = torch.cat((torch.ones(len(trace.keys), 1), torch.zeros(len(trace.keys), 1)), dim=1)
        self.rope = RopeTable(still, neox=True)
        self.keys, self.values = trace.keys[:, None], trace.values[:, None]
        # By layer and head, as signals want them.
        self._value_norms = trace.values.norm(dim=-1)[:, None, None]
        self._row = torch.arange(len(trace.keys))
        self._count = trace.prompt
        self.seen: list[tuple[float, float, float, float]] = []
        self.recalled: list[float] = []

    @property
    def held(self) -> torch.Tensor:
        """Logical positions of what is held [N] int64; the row, as the server would say."""
        return self._row[: self._count]

    @torch.no_grad()
    def outcome(self) -> Outcome:
        """Run it to the end."""
        trace = self.trace
        needed = dict(zip(trace.needed.tolist(), trace.premises, strict=True))
        self._begin()
        for position in range(trace.prompt, len(trace.keys)):
            if position in needed:
                self._ask(position, needed[position])
            self._step(position)
        mass, read, error, cosine = (fmean(column) for column in zip(*self.seen, strict=True))
        return Outcome(
            removed=1 - len(self.held) / len(trace.keys),
            mass=mass,
            recall=fmean(self.recalled),
            interactions=1 - read,
            error=error,
            cosine=cosine,
        )

    def _begin(self) -> None:
        state, prompt = self.state, self.trace.prompt
        if state.shape is not None:
            buffer = QueryBuffer(state.shape, 1, 1, DIM, torch.float32, "cpu")
            state.seed(buffer, None)
        if state.policy is not None:
            # Nobody sees the prompt's queries.
            state.after_prefill(0, 0, prompt)
        if self.memory is not None:
            self.memory.begin(1, 1, 1, "none", "cpu")
            self.memory.after_prefill(self._cache(), torch.empty(1, 0, 1, DIM), prompt, 1.0)

    def _cache(self) -> CachedKeys:
        return CachedKeys([self.keys], self.held, [self.values])

    def _step(self, position: int) -> None:
        query = self.trace.queries[position - self.trace.prompt]
        self._row[self._count] = position
        self._count += 1
        if (position - self.trace.prompt) % self.stride == 0:
            self._look(position, query)
        state, memory = self.state, self.memory
        if state.policy is None:
            return
        if state.buffer is not None:
            state.buffer.append(state.after_token(), query.view(1, 1, DIM))
        if memory is not None:
            memory.after_token(
                self._cache(),
                query.view(1, 1, DIM),
                _NO_DELIMITER,
                position,
                1.0,
                self._value_norms[position],
            )
        lengths = state.lengths(0, len(self.held))
        plan = state.plan(lengths, state.settle(lengths, share=0))
        if not plan.is_empty:
            carry_out(plan, state.buffer, self._choose)

    def _choose(self, plan: EvictionPlan, phase: ObservationPhase, probe: bool) -> None:
        assert self.policy is not None
        buffer, memory = self.state.buffer, self.memory
        keep = choose(
            self.policy, self._cache(), self.rope, 1.0, plan, phase, buffer, memory, probe
        )
        if keep is None:
            return
        self._count = keep.shape[2]
        self._row[: self._count] = self._row[keep[0, 0]]

    def _ask(self, position: int, premise: torch.Tensor) -> None:
        """Whether what a query wants of a premise is still there."""
        query = self.trace.queries[position - self.trace.prompt]
        weights = (self.keys[premise, 0] @ query).softmax(0)
        kept = weights[torch.isin(premise, self.held)]
        self.recalled.append(float(kept.sum() >= RECALLED))

    def _look(self, position: int, query: torch.Tensor) -> None:
        """Compare one output with that over the whole cache."""
        whole, expected = self.full.at(position)
        weights = whole[self.held]
        read = len(self.held)
        active = self.memory.active if self.memory is not None else None
        if active is None or self.memory is None:
            output = weights / weights.sum() @ self.values[self.held, 0]
        else:
            active.begin(position)
            output = self.memory.attend(0, query[None], self.keys, self.values, self.held, 1.0)[0]
            read = int(active.counts[0][0])
        if self.memory is not None:
            self.memory.norms[0] = output.norm()
        error = float((output - expected).norm() / expected.norm())
        cosine = float(torch.nn.functional.cosine_similarity(output, expected, dim=0))
        self.seen.append((float(weights.sum()), read / (position + 1), error, cosine))
