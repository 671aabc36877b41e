"""One simulated request: the whole cache, what of it is visible, and the request's state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from sglang_beacon.core import CachedKeys, EvictionPlan, ObservationPhase
from sglang_beacon.lab.interception import intercepted
from sglang_beacon.ops.rope import rotate
from sglang_beacon.runtime.beacon_store import Beacons
from sglang_beacon.runtime.compactor import carry_out, choose
from sglang_beacon.runtime.memory import Memory
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.request import RequestState

if TYPE_CHECKING:
    from sglang_beacon.lab.simulator import Simulator


@dataclass
class Simulation:
    """One simulated generation.

    Attributes
    ----------
    tokens : list[int]
        Generated tokens.
    held : list[int]
        Tokens held per layer and head when each of them was computed.
    kept : list[Tensor [num_layers, H_kv, held_after] int64]
        Logical positions that survived each eviction.
    logprobs : list[float]
        Of the generated tokens.
    beacons : Beacons or None
        Of the whole prompt, if the policy observes.
    memory : Memory or None
        What RECAS knew in the end.
    """

    tokens: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    beacons: Beacons | None = None
    memory: Memory | None = None


class Run:
    """Computes one request step by step; see `Simulator.generate`."""

    def __init__(self, simulator: Simulator, prompt_tokens: int, prompt_in_tree: bool) -> None:
        self.sim = simulator
        self.state = RequestState(simulator.config, simulator.policy, simulator.page_size)
        self.prompt_tokens = prompt_tokens
        self.in_tree = prompt_tokens // simulator.page_size * simulator.page_size
        if not prompt_in_tree:
            self.in_tree = 0
        self.tree_holds = self.in_tree
        self.result = Simulation()
        self.lose_cache()
        self.queries: list[torch.Tensor] = [torch.empty(0)] * len(simulator.layers)
        config = simulator.model.config
        self.num_kv_heads = config.num_key_value_heads
        self.num_heads = config.num_attention_heads
        self.scale = simulator.layers[0].self_attn.scaling
        self.result.memory = self.state.memory

    def attending(self) -> AbstractContextManager[None]:
        """Route the model's attention through `_attend`, and its queries to us."""
        return intercepted(self.sim.model, self._attend, self._take_queries)

    def lose_cache(self) -> None:
        """Forget all that was computed."""
        self.state.reset()
        self.cache = DynamicCache()
        self.length = 0
        self.decoding = False
        self.pinned = 0
        # Per layer [H_kv, held] int64: logical positions still visible, ascending.
        self.visible: list[torch.Tensor] = []

    def compute(
        self, tokens: Sequence[int], cached: int, seed: Beacons | None, chunk_size: int | None
    ) -> torch.Tensor:
        """Prefill ``tokens``, all but the cached ones in chunks; returns the last one's logits."""
        cached = min(cached, len(tokens) - 1) // self.sim.page_size * self.sim.page_size
        if cached:
            self._forward(tokens[:cached])
        self.pinned = cached
        if self.state.memory is not None:
            layers = len(self.sim.layers)
            self.state.memory.begin(layers, self.num_heads, self.num_kv_heads, "exact", "cpu")
        if self.state.shape is not None:
            usable = seed is not None and cached > 0 and self.state.shape.farthest
            self.state.seed(self._new_buffer(), seed.within(cached) if usable else None)
        bounds = [*range(cached, len(tokens), chunk_size or len(tokens)), len(tokens)]
        for begin, end in pairwise(bounds):
            logits = self._forward(tokens[begin:end])
            self._observe_prompt(begin, end)
        return logits

    def _observe_prompt(self, begin: int, end: int) -> None:
        page = self.sim.page_size
        self.pinned = max(self.pinned, min(self.in_tree, end // page * page))
        state = self.state
        if state.policy is None:
            return
        observed = state.observed_prompt
        recent = state.after_prefill(end - begin, self.pinned, end)
        if state.memory is not None:
            newest = torch.stack(self.queries)[:, begin - end :][:, -state.memory.prompt_queries :]
            positions = torch.arange(end - newest.shape[1], end)[:, None]
            rotated = rotate(newest, positions, self.sim.table)
            state.memory.after_prefill(self._cached_keys(), rotated, self.prompt_tokens, self.scale)
        if state.buffer is None:
            return
        for index, queries in enumerate(self.queries):
            state.buffer.fold_prompt(index, queries, begin, observed, recent)
        if end == self.prompt_tokens:
            self.result.beacons = state.prompt_beacons()

    def decode(self) -> torch.Tensor:
        memory = self.state.memory
        if memory is not None and memory.active is not None:
            memory.active.begin(self.length)
        self.decoding = True
        logits = self._forward(self.result.tokens[-1:])
        self.decoding = False
        self.result.held.append(self.visible[0].shape[1])
        queries = torch.stack([each[0] for each in self.queries])
        if memory is not None:
            position = self.length - 1
            memory.after_token(
                self._cached_keys(),
                rotate(queries, torch.tensor([position]), self.sim.table),
                torch.tensor(self.result.tokens[-1]),
                position,
                self.scale,
            )
        if self.state.buffer is not None:
            self.state.buffer.append(self.state.after_token(), queries)
        if self.state.policy is not None:
            self._follow_plan()
        return logits

    def take(self, logits: torch.Tensor) -> None:
        token = int(logits.argmax())
        self.result.tokens.append(token)
        self.result.logprobs.append(float(logits.log_softmax(-1)[token]))

    def _follow_plan(self) -> None:
        lengths = self.state.lengths(self.pinned, self.visible[0].shape[1])
        # Alone, a request answers for all that it holds of the tree.
        plan = self.state.plan(lengths, self.state.settle(lengths, share=self.pinned))
        carry_out(plan, self.state.buffer, self._choose)

    def _choose(self, eviction: EvictionPlan, phase: ObservationPhase, probe: bool) -> None:
        state = self.state
        assert state.policy is not None
        keep = choose(
            state.policy,
            self._cached_keys(),
            self.sim.table,
            self.scale,
            eviction,
            phase,
            state.buffer,
            state.memory,
            probe,
            state.tracer,
        )
        if keep is None:
            return
        pinned = torch.arange(eviction.pinned).expand(*keep.shape[:2], -1)
        kept = torch.stack(self.visible).gather(2, torch.cat((pinned, keep), dim=2))
        self.visible = list(kept)
        self.result.kept.append(kept)
        self.pinned = eviction.pinned
        if eviction.detach and eviction.lengths.logical == eviction.lengths.held:
            self.tree_holds = self.length // self.sim.page_size * self.sim.page_size

    def _cached_keys(self) -> CachedKeys:
        pools = self._pools("keys")
        return CachedKeys(pools, torch.arange(len(pools[0])), self._pools("values"))

    def _pools(self, kind: str) -> list[torch.Tensor]:
        """Each layer's visible keys or values [held, H_kv, D]."""
        return [
            _visible(getattr(layer, kind), visible).transpose(0, 1)
            for layer, visible in zip(self.cache.layers, self.visible, strict=True)
        ]

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        new = torch.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        added = new.expand(self.num_kv_heads, -1)
        if not self.visible:
            self.visible = [added] * len(self.sim.layers)
        else:
            self.visible = [torch.cat((v, added), dim=1) for v in self.visible]
        output = self.sim.model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=new[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[0, -1].float()

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of [1, H, n, D] queries over the visible part of a [1, H_kv, N, D] cache."""
        num_new, num_cached = query.shape[2], key.shape[2]
        memory = self.state.memory
        if self.decoding and memory is not None and memory.active is not None:
            visible = self.visible[module.layer_idx]
            keys, values = (_visible(each, visible).transpose(0, 1) for each in (key, value))
            output = self._attend_sparsely(memory, module.layer_idx, query[0, :, 0], keys, values)
            output = output[None, :, None]
            self._note_output(module.layer_idx, output)
            return output.transpose(1, 2), None
        position = torch.arange(num_cached)
        mask = torch.zeros(self.num_kv_heads, num_cached, dtype=torch.bool)
        mask.scatter_(1, self.visible[module.layer_idx], True)
        causal = position[None] <= position[num_cached - num_new :, None]
        group = self.num_heads // self.num_kv_heads
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            attn_mask=(mask[:, None] & causal).repeat_interleave(group, 0),
            scale=scaling,
        )
        self._note_output(module.layer_idx, output)
        return output.transpose(1, 2), None

    def _attend_sparsely(
        self,
        memory: Memory,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of queries [H, D] over an active set of keys and values [held, H_kv, D]."""
        slots = torch.arange(len(keys))
        return memory.attend(layer, queries, keys, values, slots, self.scale)

    def _note_output(self, layer: int, output: torch.Tensor) -> None:
        memory = self.state.memory
        if self.decoding and memory is not None:
            memory.norms[layer] = output[0, :, -1].float().norm(dim=-1)

    def _take_queries(self, layer: int, queries: torch.Tensor) -> None:
        self.queries[layer] = queries

    def _new_buffer(self) -> QueryBuffer:
        attention, heads = self.sim.layers[0].self_attn, self.num_heads
        assert self.state.shape is not None
        return QueryBuffer(
            self.state.shape,
            len(self.sim.layers),
            heads,
            attention.head_dim,
            self.sim.model.dtype,
            "cpu",
        )


def _visible(cached: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The visible part [H_kv, held, D] of what one layer cached [1, H_kv, N, D]."""
    return cached[0].gather(1, visible[..., None].expand(-1, -1, cached.shape[-1]))
