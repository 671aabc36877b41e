"""The worker's side of RECAS: signals after each step, active sets inside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_beacon.core import CachedKeys
from sglang_beacon.runtime.active_batch import ActiveBatch, Entry
from sglang_beacon.runtime.compactor import KVView
from sglang_beacon.runtime.memory import Memory
from sglang_beacon.runtime.step_stage import StepStage
from sglang_beacon.srt.rotary import RotaryAttention

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Row(NamedTuple):
    """A request of the batch in flight: its row, its newest token's position, all its slots."""

    index: int
    memory: Memory
    position: int
    slots: torch.Tensor


class MemoryWorker:
    """Computes signals for requests that need them, and lets their steps read active sets.

    Signals are computed after a step, for all layers at once, so that steps may run as CUDA
    graphs. So may steps whose active sets an `ActiveBatch` reads; selectors other than ``exact``
    keep state of their own for each request, and their steps run eagerly.

    Parameters
    ----------
    model : RotaryAttention
    req_to_token : Tensor [requests, tokens]
    cache : KVView
    captured_rows : int
        Most rows of a step that runs as a CUDA graph; 0 if none does.
    captured_tokens : int
        Most tokens of a request in such a step, if it is to read active sets; else 0.
    device
    is_used : bool
        Whether requests of this server may need any of it.
    """

    def __init__(
        self,
        model: RotaryAttention,
        req_to_token: torch.Tensor,
        cache: KVView,
        captured_rows: int,
        captured_tokens: int,
        device: torch.device | str,
        is_used: bool,
    ) -> None:
        self.is_used = is_used
        self._model = model
        self._req_to_token = req_to_token
        self._cache = cache
        self._selector = "none" if captured_rows else "exact"
        self._device = device
        rows = captured_rows if is_used else 0
        # Norms of the outputs of all query heads, then of the new values of all KV heads.
        heads = model.query_heads + model.kv_heads
        self._norms = StepStage(model.num_layers, (heads,), rows, torch.float32, device)
        self._active = ActiveBatch(
            model.num_layers,
            model.query_heads,
            model.kv_heads,
            captured_rows if captured_tokens else 0,
            captured_tokens,
            device,
        )
        self._rows: list[Row] = []
        # Those of them whose active sets are read one by one, and all together.
        self._single: list[Row] = []
        self._entries: list[Entry] = []
        # Newest rotated queries [n, H_q, D] of each layer, by request.
        self._prompts: dict[int, list[torch.Tensor]] = {}
        self._short: ForwardBatch | None = None

    @property
    def may_be_captured(self) -> bool:
        """Whether the batch in flight may run as a CUDA graph."""
        return not self._single and self._active.is_captured

    def begin(self, memory: Memory) -> None:
        """Allocate for a request that is computed for the first time in this life."""
        model = self._model
        memory.begin(
            model.num_layers, model.query_heads, model.kv_heads, self._selector, self._device
        )

    def before_forward(self, batch: ScheduleBatch) -> None:
        """Note the slots of a batch as long as the scheduler does not touch them."""
        decoding = batch.forward_mode.is_decode()
        self._short = None
        self._prompts = {}
        held = _held(batch)
        remembering = [
            index
            for index, req in enumerate(batch.reqs)
            if req.kv_policy.memory is not None and req.kv_policy.memory.signals is not None
        ]
        self._rows, slots = [], None
        if remembering:
            # A copy: the scheduler rewrites rows while this step is still running.
            longest = max(held[index] for index in remembering)
            slots = self._req_to_token[batch.req_pool_indices, :longest].to(torch.int64)
            for index in remembering:
                state, count = batch.reqs[index].kv_policy, held[index]
                position = count + state.freed - 1
                self._rows.append(Row(index, state.memory, position, slots[index, :count]))
        self._norms.begin(len(batch.reqs), decoding and bool(self._rows))
        self._single, self._entries = [], []
        for row in self._rows:
            if not decoding or row.memory.active is None:
                continue
            row.memory.active.begin(row.position)
            if row.memory.active.selector.name == "exact":
                self._entries.append(_entry(row))
            else:
                self._single.append(row)
        self._active.begin(self._entries, slots)

    def after_decode(self, batch: ScheduleBatch, queries: torch.Tensor) -> None:
        """Take in a decode step; ``queries`` [layers, rows, H_q, D] are all of it, rotated."""
        norms = self._norms.take()
        if norms is None:
            return
        self._active.end()
        of_outputs, of_values = norms.split((self._model.query_heads, self._model.kv_heads), dim=2)
        for row in self._rows:
            row.memory.norms.copy_(of_outputs[:, row.index])
            row.memory.after_token(
                CachedKeys(self._cache.keys, row.slots, self._cache.values),
                queries[:, row.index],
                batch.input_ids[row.index],
                row.position,
                self._cache.scale,
                of_values[:, row.index],
            )

    def after_prefill(self, batch: ScheduleBatch) -> None:
        """Take in a stretch of every prompt."""
        for row in self._rows:
            row.memory.after_prefill(
                CachedKeys(self._cache.keys, row.slots, self._cache.values),
                torch.stack(self._prompts[row.index]),
                len(batch.reqs[row.index].origin_input_ids),
                self._cache.scale,
            )

    # Attention backend, per layer.

    def note_prompt(self, index: int, queries: torch.Tensor) -> None:
        """Keep one layer's rotated queries [n, H_q, D] of a prompt's newest tokens."""
        self._prompts.setdefault(index, []).append(queries.clone())

    def note_step(self, layer: int, value: torch.Tensor, output: torch.Tensor) -> None:
        """Take the norms of one layer's new values [rows, H_kv * D] and outputs [rows, H_q * D]."""
        if self.is_used:
            outputs = output.view(len(output), self._model.query_heads, -1)
            values = value.view(len(value), self._model.kv_heads, -1)
            norms = [each.float().norm(dim=-1) for each in (outputs, values)]
            self._norms.write(layer, torch.cat(norms, dim=1))

    def shortened(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as the backend's own attention is to see it.

        Rows that read an active set are one token long there, since what it would say of them is
        not used.
        """
        if not batch.forward_mode.is_decode() or not (self._single or self._entries):
            return batch
        if self._short is None:
            active = [row.index for row in self._single] + [entry.row for entry in self._entries]
            short = copy.copy(batch)
            short.seq_lens = batch.seq_lens.clone()
            short.seq_lens[active] = 1
            if batch.seq_lens_cpu is not None:
                short.seq_lens_cpu = batch.seq_lens_cpu.clone()
                short.seq_lens_cpu[active] = 1
                short.seq_lens_sum = int(short.seq_lens_cpu.sum())
            self._short = short
        return self._short

    def attend(
        self, layer: int, query: torch.Tensor, output: torch.Tensor, is_capture: bool
    ) -> None:
        """Write the outputs [rows, H_q * D] of requests with an active set."""
        keys, values, scale = self._cache.keys[layer], self._cache.values[layer], self._cache.scale
        if self._entries or is_capture:
            self._active.attend(layer, query, keys, values, scale, output)
        for row in self._single:
            queries = query[row.index].view(self._model.query_heads, -1)
            attended = row.memory.attend(layer, queries, keys, values, row.slots, scale)
            output[row.index] = attended.flatten()


def keep_eager(can_run: bool, runner: Any, *args: Any, **kwargs: Any) -> bool:
    """After `DecodeCudaGraphRunner.can_run_graph`: some steps with active sets are not captured."""
    return can_run and runner.model_runner.kv_policy.memory.may_be_captured


def _entry(row: Row) -> Entry:
    memory = row.memory
    assert memory.active is not None
    assert memory.signals is not None
    return Entry(row.index, memory.active, len(row.slots), memory.signals.value_norm, memory.norms)


def _held(batch: ScheduleBatch) -> Sequence[int]:
    if batch.forward_mode.is_decode():
        return batch.seq_lens_cpu.tolist()
    return [p + e for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
