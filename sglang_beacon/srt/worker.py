"""The worker's side: runs planned work before a forward, and takes queries during and after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_beacon import ops, policies
from sglang_beacon.capacity import ModelShape
from sglang_beacon.core import BufferShape
from sglang_beacon.policies.base import Policy
from sglang_beacon.runtime import compactor
from sglang_beacon.runtime.compactor import KVView, Work
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.request import RequestState
from sglang_beacon.runtime.signals import BYTES_PER_TOKEN
from sglang_beacon.runtime.step_stage import StepStage
from sglang_beacon.srt import rotary
from sglang_beacon.srt.memory_worker import MemoryWorker
from sglang_beacon.srt.server_args import config_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Stretch(NamedTuple):
    """Prompt tokens of one request within an extend batch.

    ``index`` is the request's place in the batch, ``begin`` and ``end`` are rows of it, and the
    first of them is at ``position``;
    ``observed`` queries were folded before; the newest ``recent`` are kept besides. ``ends_prompt``
    says whether the prompt is complete with it.
    """

    state: RequestState
    index: int
    begin: int
    end: int
    position: int
    observed: int
    recent: int
    ends_prompt: bool


class PolicyWorker:
    """Query capture and compaction for one model runner, all on the forward stream."""

    def __init__(self, runner: ModelRunner) -> None:
        self.pool = runner.token_to_kv_pool
        self.device = runner.device
        self.dtype = runner.dtype
        self.model = rotary.find(runner.model)
        rotary.self_test(self.model, self.dtype, self.device)
        # Pinning a prompt that the tree does not take would never free anything of it.
        self.tree_takes_prompts = not runner.server_args.disable_radix_cache
        self.page_size = runner.page_size
        self.pending: list[tuple[RequestState, int, Work]] = []
        self.stretches: list[Stretch] = []
        captured = _captured_rows()
        self.stage = StepStage(
            self.model.num_layers,
            (self.model.query_heads, self.model.head_dim),
            captured,
            self.dtype,
            self.device,
        )
        self.config = config_of(runner.server_args)
        policy = policies.create(self.config, self.page_size)
        assert policy is not None
        self.policy: Policy = policy
        self.cache = self._view()
        self.memory = MemoryWorker(
            self.model,
            runner.req_to_token_pool.req_to_token,
            self.cache,
            captured,
            self._captured_tokens() if captured else 0,
            self.device,
            is_used=policy.signals is not None,
        )

    def most_observing(self) -> int:
        """Requests whose query buffers and signals fit beside the pool."""
        limit = self.config.query_memory_mb
        memory = None if limit is None else limit * 2**20
        if memory is None and torch.cuda.is_available():
            # The rest is for what scoring needs meanwhile.
            memory = int(torch.cuda.mem_get_info()[0] * 0.9)
        size = self._state_bytes()
        if memory is None or not size:
            return 2**30
        if memory < size:
            raise RuntimeError(
                f"the state of one request takes {size} bytes and there are {memory}: raise "
                "query_memory_mb in --kv-policy-config or lower --mem-fraction-static."
            )
        return memory // size

    def _captured_tokens(self) -> int:
        """Most tokens of a request in a step that reads active sets as part of a CUDA graph."""
        recas = self.policy.recas
        if recas is None or recas.selector != "exact":
            return 0
        return recas.limit(self.config.budget) + 2 * self.page_size

    def describe(self) -> str:
        """What the server's policy holds in memory besides the KV pool."""
        state = self._state_bytes()
        return (
            f"state of {state / 1e6:.2f} MB per running request, "
            f"the KV of {state / self._shape.kv_bytes_per_token:.0f} tokens"
        )

    def _state_bytes(self) -> int:
        """Bytes of one request's query buffer, and of its signals at twice the budget."""
        size, policy, budget = 0, self.policy, self.config.budget
        if policy.observes is not None:
            size += self._shape.query_state_bytes(policy.observes.rows)
        if policy.signals is not None:
            tokens = policy.recas.limit(budget) if policy.recas is not None else 2 * budget
            size += BYTES_PER_TOKEN * self.model.num_layers * self.model.kv_heads * tokens
        return size

    @property
    def _shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.model.num_layers,
            num_query_heads=self.model.query_heads,
            num_kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            num_parameters=1,
            dtype_bytes=self.dtype.itemsize,
        )

    # Scheduler thread, before the batch is prepared.

    def enqueue(self, state: RequestState, work: Work) -> None:
        """Plan work for the next forward, of whatever kind; dropped if the request is released."""
        self.pending.append((state, state.life, work))

    # Forward stream, around a forward.

    def before_forward(self, batch: ScheduleBatch) -> None:
        """Run planned work, then make room for the queries of this batch."""
        if self.pending:
            live = [work for state, life, work in self.pending if state.life == life]
            for work in live:
                _keep_for_this_stream(work.source, work.target)
            compactor.run(live, self.cache)
            self.pending.clear()
        self.stretches = []
        decoding = batch.forward_mode.is_decode()
        states = [req.kv_policy for req in batch.reqs]
        observed = any(state.buffer is not None or state.memory is not None for state in states)
        self.stage.begin(len(batch.reqs), decoding and observed)
        if not decoding:
            self._note_prompts(batch)
        self.memory.before_forward(batch)

    def after_forward(self, batch: ScheduleBatch) -> None:
        """Append the queries of a decode step to their requests' buffers, or keep a prompt's."""
        for stretch in self.stretches:
            # All layers have chosen theirs: they can go where the prefix tree keeps them.
            shape = stretch.state.shape
            travels = shape is not None and shape.farthest and self.tree_takes_prompts
            if travels and stretch.ends_prompt:
                stretch.state.beacons = stretch.state.prompt_beacons()
        if not batch.forward_mode.is_decode():
            self.memory.after_prefill(batch)
        staged = self.stage.take()
        if staged is None:
            return
        buffers, rows = [], []
        for req in batch.reqs:
            state: RequestState = req.kv_policy
            observed = state.buffer is not None
            buffers.append(state.buffer.rows if observed else None)
            rows.append(state.after_token() if observed else 0)
        if any(buffer is not None for buffer in buffers):
            ops.query_append(staged, batch.orig_seq_lens - 1, self.model.table, buffers, rows)
        self.memory.after_decode(batch, staged)

    # Attention backend, per layer.

    def observe_decode(self, layer_id: int, query: torch.Tensor) -> None:
        """Take one layer's rotated queries [rows, H_q * D] of a decode step."""
        self.stage.write(layer_id, query)

    def observe_extend(self, layer_id: int, query: torch.Tensor, positions: torch.Tensor) -> None:
        """Fold one layer's rotated queries [tokens, H_q * D] of a prefill."""
        if not self.stretches:
            return
        query = query.view(query.shape[0], self.model.query_heads, self.model.head_dim)
        for stretch in self.stretches:
            rows = slice(stretch.begin, stretch.end)
            if stretch.state.memory is not None:
                newest = query[rows][-stretch.state.memory.prompt_queries :]
                self.memory.note_prompt(stretch.index, newest)
            if stretch.state.buffer is None:
                continue
            pre = ops.derotate(query[rows], positions[rows, None], self.model.table)
            stretch.state.buffer.fold_prompt(
                layer_id, pre, stretch.position, stretch.observed, stretch.recent
            )

    def _note_prompts(self, batch: ScheduleBatch) -> None:
        end = 0
        lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        for index, (req, prefix, extend) in enumerate(lengths):
            begin, end = end, end + extend
            state: RequestState = req.kv_policy
            if state.policy is None:
                continue
            if state.shape is not None and state.buffer is None:
                cached = None
                if prefix and state.shape.farthest:
                    cached = batch.tree_cache.beacons_for(req, state.shape.n_beacon)
                state.seed(self._new_buffer(state.shape), cached and cached.to(self.device))
            if state.memory is not None and state.memory.signals is None:
                self.memory.begin(state.memory)
            held = prefix + extend
            observed = state.observed_prompt
            recent = state.after_prefill(extend, self._foreseen_pinned(req, held), held)
            if state.shape is not None or state.memory is not None:
                ends = state.life == 0 and held == len(req.origin_input_ids)
                self.stretches.append(
                    Stretch(state, index, begin, end, prefix, observed, recent, ends)
                )

    def _new_buffer(self, shape: BufferShape) -> QueryBuffer:
        return QueryBuffer(
            shape,
            self.model.num_layers,
            self.model.query_heads,
            self.model.head_dim,
            self.dtype,
            self.device,
        )

    def _foreseen_pinned(self, req: Req, held: int) -> int:
        """What the tree will own of a prompt once its prefill has been processed."""
        if not self.tree_takes_prompts or req.skip_radix_cache_insert:
            return req.kv.cache_protected_len
        prompt = min(held, len(req.origin_input_ids)) // self.page_size * self.page_size
        return max(prompt, req.kv.cache_protected_len)

    def _view(self) -> KVView:
        layers = range(self.model.num_layers)
        return KVView(
            [self.pool.get_key_buffer(layer) for layer in layers],
            [self.pool.get_value_buffer(layer) for layer in layers],
            self.model.attention.scaling,
            self.model.table,
        )


def _captured_rows() -> int:
    """Most rows of a decode step that runs as a CUDA graph; 0 if none does."""
    from sglang.srt.runtime_context import get_exec

    decode = get_exec().graph.cuda_graph_config.decode
    return 0 if decode.backend == "disabled" else max(decode.bs)


def _keep_for_this_stream(*tensors: torch.Tensor | None) -> None:
    """Keep memory that another stream allocated until what this one launches has read it."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def build(result: None, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
    """After a model runner has its KV pool, and before its attention backends are built."""
    runner.kv_policy = PolicyWorker(runner)


def run_forward(
    original: Callable[..., Any],
    worker: TpModelWorker,
    batch: ScheduleBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around `TpModelWorker.forward_batch_generation`, which runs on the forward stream."""
    policy: PolicyWorker = worker.model_runner.kv_policy
    policy.before_forward(batch)
    result = original(worker, batch, *args, **kwargs)
    policy.after_forward(batch)
    return result


def set_positions(
    forward_batch: ForwardBatch, cls: type, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> None:
    """After `ForwardBatch.init_new`: a decoded token sits at its logical position.

    SGLang derives it from the held length; the logical one is kept beside it, for long-context
    models, and is all that an eviction leaves alone.
    """
    if forward_batch.forward_mode.is_decode():
        logical = batch.orig_seq_lens.to(forward_batch.positions.dtype)
        forward_batch.positions = (logical - 1).clamp_min(0)
