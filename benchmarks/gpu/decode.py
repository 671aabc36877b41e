"""A decode loop at the shapes of a Qwen3-4B: everything kept, against BeaconKV.

    python -m benchmarks.gpu.decode            # on a GPU
    python -m benchmarks.gpu.decode --dry-run  # small, on the CPU; no numbers

Weights, prompts and caches are random: what is measured is time and memory, not text. One step is
one CUDA graph, as in SGLang; what BeaconKV adds runs between the replays, driven by the planner and
the compactor of the server. Full attention uses the faster of torch's and ours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks.conditions import store
from sglang_beacon import ops, policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import RequestLengths
from sglang_beacon.ops import RopeTable
from sglang_beacon.runtime import compactor
from sglang_beacon.runtime.compactor import KVView, Work
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.request import RequestState


class Model(NamedTuple):
    """Sizes of a dense decoder."""

    layers: int = 36
    hidden: int = 2560
    inner: int = 9728
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 151_936
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


SMALL = Model(2, 32, 64, 4, 2, 16, 100, torch.float32, "cpu")
POSITIONS = 65_536


class Decoder:
    """Random weights, a cache of ``batch`` rows of ``width`` slots, and one decode step.

    Attributes
    ----------
    counts : Tensor [batch] int64
        Tokens held, the new one included; changed between steps.
    positions : Tensor [batch] int64
        Of the new tokens.
    staged : Tensor [layers, batch, H_q, D]
        The queries of the last step.
    """

    def __init__(self, model: Model, batch: int, width: int, attend: str) -> None:
        self.model, self.batch, self.width = model, batch, width
        self.attend = attend
        device = {"dtype": model.dtype, "device": model.device}

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, **device) * shape[-1] ** -0.5

        qkv = (model.heads + 2 * model.kv_heads) * model.dim
        self.weights = [
            (
                weight(qkv, model.hidden),
                weight(model.hidden, model.heads * model.dim),
                weight(2 * model.inner, model.hidden),
                weight(model.hidden, model.inner),
            )
            for _ in range(model.layers)
        ]
        self.embedding = weight(model.vocabulary, model.hidden)
        pools = torch.randn(2, model.layers, batch * width, model.kv_heads, model.dim, **device)
        self.keys, self.values = list(pools[0]), list(pools[1])
        angles = torch.arange(POSITIONS)[:, None] * 1e6 ** -(
            torch.arange(0, model.dim, 2) / model.dim
        )
        self.rope = RopeTable(torch.cat((angles.cos(), angles.sin()), -1).to(model.device), True)
        self.slots = torch.arange(batch * width, device=model.device).view(batch, width)
        self.counts = torch.full((batch,), width, device=model.device)
        self.positions = torch.full((batch,), width, device=model.device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self.staged = torch.empty(model.layers, batch, model.heads, model.dim, **device)

    def step(self) -> None:
        """Compute the next token of every request."""
        model = self.model
        new = self.slots.gather(1, self.counts[:, None] - 1)[:, 0]
        x = self.embedding[self.tokens]
        for layer, (qkv, out, up, down) in enumerate(self.weights):
            sizes = [model.heads, model.kv_heads, model.kv_heads]
            heads = F.linear(F.rms_norm(x, x.shape[-1:]), qkv).view(self.batch, -1, model.dim)
            q, k, v = heads.split(sizes, dim=1)
            q = ops.rotate(F.rms_norm(q, q.shape[-1:]), self.positions[:, None], self.rope)
            k = ops.rotate(F.rms_norm(k, k.shape[-1:]), self.positions[:, None], self.rope)
            q = q.to(model.dtype)
            self.keys[layer][new] = k.to(model.dtype)
            self.values[layer][new] = v
            self.staged[layer].copy_(q)
            x = x + F.linear(self._attention(layer, q).flatten(1), out)
            gate, value = F.linear(F.rms_norm(x, x.shape[-1:]), up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        logits = F.linear(F.rms_norm(x, x.shape[-1:]), self.embedding)
        self.tokens.copy_(logits.argmax(-1))

    def _attention(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        model, scale = self.model, self.model.dim**-0.5
        if self.attend == "torch":
            shape = (self.batch, self.width, model.kv_heads, model.dim)
            k, v = (pool[layer].view(shape).transpose(1, 2) for pool in (self.keys, self.values))
            return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)
        lists = self.slots[:, None].expand(-1, model.kv_heads, -1)
        counts = self.counts[:, None].expand(-1, model.kv_heads)
        return ops.sparse_decode(
            q, self.keys[layer], self.values[layer], lists, counts, scale
        ).output

    def captured(self) -> Callable[[], None]:
        """The step as a graph, where there is a GPU."""
        if self.model.device == "cpu":
            return self.step
        self.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


class Compressed:
    """Requests under BeaconKV, their phases spread evenly, over the cache of a decoder."""

    def __init__(self, decoder: Decoder, budget: int) -> None:
        model = decoder.model
        self.decoder = decoder
        config = KVPolicyConfig(policy="beacon", budget=budget)
        self.policy = policies.create(config)
        assert self.policy is not None
        self.view = KVView(decoder.keys, decoder.values, model.dim**-0.5, decoder.rope)
        self.states, self.held = [], []
        for index in range(decoder.batch):
            state = RequestState(config, self.policy, 1)
            assert state.shape is not None
            state.buffer = QueryBuffer(
                state.shape, model.layers, model.heads, model.dim, model.dtype, model.device
            )
            state.buffer.rows.normal_()
            held = budget - 1 - (budget // 8) * index // decoder.batch
            state.after_prefill(held, 0, held)
            self.states.append(state)
            self.held.append(held)
        self._publish()

    def after_step(self) -> None:
        """What the server does between two steps."""
        decoder = self.decoder
        rows = [state.after_token() for state in self.states]
        buffers = [state.buffer.rows for state in self.states if state.buffer is not None]
        ops.query_append(decoder.staged, decoder.positions, decoder.rope, buffers, rows)
        work = []
        for index, state in enumerate(self.states):
            lengths: RequestLengths = state.lengths(0, self.held[index])
            plan = state.plan(lengths, state.allowance(lengths, 0))
            if plan.is_empty:
                continue
            move: tuple[Any, ...] = ()
            if plan.eviction is not None:
                row = decoder.slots[index]
                move = row[: self.held[index]], row[: plan.eviction.kept]
                self.held[index] = plan.eviction.kept
            work.append(Work(plan, self.policy, state.buffer, *move))
        compactor.run(work, self.view)
        self.held = [held + 1 for held in self.held]
        self._publish()

    def _publish(self) -> None:
        decoder = self.decoder
        seen = [held + state.freed for held, state in zip(self.held, self.states, strict=True)]
        host = torch.tensor([self.held, seen], pin_memory=decoder.model.device == "cuda")
        device = host.to(decoder.model.device, non_blocking=True)
        decoder.counts.copy_(device[0])
        decoder.positions.copy_(device[1] - 1)


class Measured(NamedTuple):
    """Seconds of a step, and bytes at the peak."""

    step_s: float
    peak_bytes: int


def measure(step: Callable[[], None], steps: int, device: str) -> Measured:
    """Mean time of a step once all have been launched and run."""
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    return Measured(seconds, torch.cuda.max_memory_allocated() if device == "cuda" else 0)


def full(model: Model, batch: int, length: int, steps: int) -> Measured:
    """Everything kept, by the faster attention."""
    return min(
        measure(Decoder(model, batch, length, attend).captured(), steps, model.device)
        for attend in ("torch", "ours")
    )


def beacon(model: Model, batch: int, budget: int, steps: int) -> tuple[Measured, float]:
    """Under a budget; and which part of a step's time the policy takes."""
    decoder = Decoder(model, batch, budget + 16, "ours")
    requests, step = Compressed(decoder, budget), decoder.captured()

    def both() -> None:
        step()
        requests.after_step()

    compressed = measure(both, steps, model.device)
    alone = measure(step, steps, model.device)
    return compressed, 1 - alone.step_s / compressed.step_s


def compare(model: Model, batches: list[int], lengths: list[int], budget: int, steps: int) -> None:
    """Print a table and, on a GPU, store it."""
    rows = []
    for batch in batches:
        start_memory(model)
        ours, share = beacon(model, batch, budget, steps)
        for length in lengths:
            start_memory(model)
            try:
                theirs = full(model, batch, length, min(steps, 32))
            except torch.cuda.OutOfMemoryError:
                print(f"batch {batch}: {length} tokens do not fit")
                continue
            rows.append(
                {
                    "batch": batch,
                    "length": length,
                    "budget": budget,
                    "full_ms": theirs.step_s * 1e3,
                    "beacon_ms": ours.step_s * 1e3,
                    "full_gb": theirs.peak_bytes / 1e9,
                    "beacon_gb": ours.peak_bytes / 1e9,
                    "policy_share_of_step": share,
                }
            )
            print(" ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if model.device == "cuda":
        store("gpu_decode", {"rows": rows})


def start_memory(model: Model) -> None:
    """Forget earlier peaks."""
    if model.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, no numbers")
    args = parser.parse_args()
    if args.dry_run:
        compare(SMALL, [3], [96], 64, 20)
        print("dry run: these are no measurements")
    else:
        compare(Model(), [14, 64], [32_768, 16_384, 8_192], 2048, 256)


if __name__ == "__main__":
    main()
