"""The reference: policies on a plain Hugging Face model, by masks over a cache that keeps it all.

Nothing is moved or freed here. Per layer and KV head a list of positions says which tokens are
still visible, and attention is computed over those; queries are taken before RoPE from the model
itself. When and how much is evicted follows the same planner as in the server, and what stays is
chosen by the same policy objects, so a server whose slots, lengths, rotations and captures are
right produces the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from sglang_beacon import policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import CachedKeys, EvictionPlan, ObservationPhase
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.runtime.beacon_store import Beacons
from sglang_beacon.runtime.compactor import carry_out, observe
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.request import RequestState


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
    """

    tokens: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    beacons: Beacons | None = None


class Simulator:
    """Runs a policy on a Hugging Face decoder of the Llama or Qwen kind.

    Parameters
    ----------
    model : PreTrainedModel
        In eval mode; float32 where the result is compared with a server.
    config : KVPolicyConfig
    page_size : int
        Of the server to agree with.
    """

    def __init__(self, model: PreTrainedModel, config: KVPolicyConfig, page_size: int = 1) -> None:
        self.model = model
        self.config = config
        self.page_size = page_size
        self.policy = policies.create(config, page_size)
        self.layers = list(model.get_decoder().layers)
        self.table = _rope_table(model)

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        chunk_size: int | None = None,
        cached: int = 0,
        seed: Beacons | None = None,
        prompt_in_tree: bool = True,
        retract_after: Sequence[int] = (),
    ) -> Simulation:
        """Generate greedily.

        Parameters
        ----------
        prompt : sequence of int
        max_new_tokens : int
        chunk_size : int or None
            Prompt tokens per prefill chunk; None: all at once.
        cached : int
            Leading prompt tokens that a server would find in its prefix tree: their queries are
            not seen.
        seed : Beacons or None
            What is remembered of those.
        prompt_in_tree : bool
            Whether the tree takes the prompt, so that its whole pages are pinned.
        retract_after : sequence of int
            Numbers of generated tokens after which the cache is lost and computed again, all but
            what the tree still has: the prompt and, once the request has left the tree, what it
            had said before.
        """
        run = _Run(self, len(prompt), prompt_in_tree)
        with run.attending():
            logits = run.compute(prompt, cached, seed, chunk_size)
            while True:
                run.take(logits)
                count = len(run.result.tokens)
                if count == max_new_tokens:
                    return run.result
                if count in retract_after:
                    run.lose_cache()
                    seen = [*prompt, *run.result.tokens]
                    beacons = run.result.beacons
                    if beacons is not None:
                        # Stored with the prompt's whole pages.
                        beacons = beacons.within(run.in_tree)
                    logits = run.compute(seen, run.tree_holds, beacons, chunk_size)
                else:
                    logits = run.decode()


class _Run:
    """One request: the full cache, what of it is visible, and the request's state."""

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

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Route the model's attention through `_attend`, and its queries to us."""
        model = self.sim.model
        before = model.config._attn_implementation
        AttentionInterface.register("beacon_simulator", self._attend)
        hooks = [
            _query_module(layer).register_forward_hook(self._take_queries(index))
            for index, layer in enumerate(self.sim.layers)
        ]
        model.config._attn_implementation = "beacon_simulator"
        try:
            yield
        finally:
            model.config._attn_implementation = before
            for hook in hooks:
                hook.remove()

    def lose_cache(self) -> None:
        """Forget all that was computed."""
        self.state.reset()
        self.cache = DynamicCache()
        self.length = 0
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
        if self.state.shape is not None:
            usable = seed is not None and cached > 0
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
        if state.buffer is None:
            return
        for index, queries in enumerate(self.queries):
            state.buffer.fold_prompt(index, queries, begin, observed, recent)
        if end == self.prompt_tokens:
            self.result.beacons = state.prompt_beacons()

    def decode(self) -> torch.Tensor:
        logits = self._forward(self.result.tokens[-1:])
        self.result.held.append(self.visible[0].shape[1])
        if self.state.buffer is not None:
            self.state.buffer.append(
                self.state.after_token(), torch.stack([q[0] for q in self.queries])
            )
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
        plan = self.state.plan(lengths, self.state.allowance(lengths, share=self.pinned))
        carry_out(plan, self.state.buffer, self._evict)

    def _evict(self, eviction: EvictionPlan, phase: ObservationPhase) -> None:
        cached = [
            layer.keys[0].gather(1, visible[..., None].expand(-1, -1, layer.keys.shape[-1]))
            for layer, visible in zip(self.cache.layers, self.visible, strict=True)
        ]
        keys = CachedKeys([k.transpose(0, 1) for k in cached], torch.arange(cached[0].shape[1]))
        scale = self.sim.layers[0].self_attn.scaling
        seen = observe(self.sim.table, scale, eviction, phase, self.state.buffer)
        assert self.sim.policy is not None
        keep = self.sim.policy.keep(keys, seen, eviction)
        pinned = torch.arange(eviction.pinned).expand(*keep.shape[:2], -1)
        kept = torch.stack(self.visible).gather(2, torch.cat((pinned, keep), dim=2))
        self.visible = list(kept)
        self.result.kept.append(kept)
        self.pinned = eviction.pinned
        if eviction.detach and eviction.lengths.logical == eviction.lengths.held:
            self.tree_holds = self.length // self.sim.page_size * self.sim.page_size

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
        return output.transpose(1, 2), None

    def _take_queries(self, index: int) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            head_dim = output.numel() // output.shape[1] // self.num_heads
            self.queries[index] = output.detach().view(-1, self.num_heads, head_dim)

        return hook

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


def _query_module(layer: torch.nn.Module) -> torch.nn.Module:
    """The module whose output is a layer's queries right before RoPE."""
    attention = layer.self_attn
    return attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj


def _rope_table(model: PreTrainedModel) -> RopeTable:
    """The model's rotary table, as SGLang lays it out: cosines, then sines."""
    rotary = model.get_decoder().rotary_emb
    positions = torch.arange(model.config.max_position_embeddings)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return RopeTable(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), neox=True)
