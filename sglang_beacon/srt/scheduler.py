"""The scheduler's side: who is compressed, when, and which slots go back to the pool.

A request's state hangs on the request itself (``req.kv_policy``), so that whatever SGLang does
with the request takes it along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import EvictionPlan, RequestPlan
from sglang_beacon.runtime.allowance import pinned
from sglang_beacon.runtime.compactor import Work
from sglang_beacon.runtime.request import RequestState
from sglang_beacon.srt import admission, attention, compat
from sglang_beacon.srt.admission import Limits
from sglang_beacon.srt.factory import PolicyFactory, write_trace
from sglang_beacon.srt.metrics import Exporter
from sglang_beacon.srt.server_args import config_of, needs_prefix_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_beacon.srt.prefix import PrefixCache

logger = logging.getLogger(__name__)


def start(
    hooks: Sequence[compat.Hook],
    original: Callable[..., None],
    scheduler: Scheduler,
    server_args: Any,
    *args: Any,
) -> None:
    """Around `Scheduler.__init__`: check SGLang and install the hooks, or do not start at all."""
    from sglang.srt.runtime_context import get_memory

    config = config_of(server_args)
    if needs_prefix_cache(config, get_memory()):
        # Its base class is SGLang's, which only this process has to import.
        from sglang_beacon.srt import prefix

        prefix.use()
    if config.enabled:
        compat.check(hooks)
        compat.install(hooks)
        attention.wrap_backends()
    original(scheduler, server_args, *args)
    if config.enabled:
        _prepare(scheduler, config)


def _prepare(scheduler: Scheduler, config: KVPolicyConfig) -> None:
    worker = _worker(scheduler)
    capacity = scheduler.max_total_num_tokens
    if config.budget + 2 * scheduler.page_size >= capacity:
        raise RuntimeError(
            f"--kv-budget {config.budget} is no bound in a KV pool of {capacity} tokens: lower it "
            "or raise --max-total-tokens."
        )
    reporter = scheduler.metrics_reporter
    exporter = None
    if reporter.current_scheduler_metrics_enabled:
        exporter = Exporter(reporter.metrics_collector.labels, config.policy)
    limits = Limits(capacity, worker.most_observing())
    first = torch.distributed.get_rank(scheduler.attn_tp_cpu_group) == 0
    scheduler.kv_policy = PolicyFactory(
        config, worker.policy, scheduler.page_size, limits, exporter, first
    )
    logger.info("KV policy %s; %s", config.as_dict(), worker.describe())


def admit(
    original: Callable[..., None], scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any
) -> None:
    """Around `Scheduler._add_request_to_queue`: give a request its state, or refuse it."""
    factory: PolicyFactory = scheduler.kv_policy
    if getattr(req, "kv_policy", None) is not None:
        if not admission.can_come_back(req):
            _end_retracted(scheduler, req)
            return
    else:
        params = req.sampling_params
        req.kv_limits = factory.limits
        try:
            req.kv_policy = factory.state_for(params.custom_params, req.rid)
            if req.kv_policy.policy is not None and (params.beam_width or 1) > 1:
                raise ConfigError(
                    "beam search does not work with kv_policy: ask for kv_policy 'none'."
                )
            admission.restore_asked(scheduler, req)
        except ConfigError as error:
            req.kv_policy = RequestState(KVPolicyConfig(), None, scheduler.page_size)
            req.set_finish_with_abort(str(error))
    original(scheduler, req, *args, **kwargs)


def _end_retracted(scheduler: Scheduler, req: Req) -> None:
    """End a request that was retracted although it had outgrown the pool."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    reason = FINISH_ABORT(
        f"The request lost its memory and its {req.seqlen} tokens no longer fit the KV pool: raise "
        "--max-total-tokens or ask for less max_new_tokens.",
        status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    scheduler._release_aborted_request(req)
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason.to_json()), req)


def evict(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Before the running batch is prepared for its next token: plan, and give slots back.

    Only counts are decided here. The tokens themselves move when the worker next runs a forward,
    which is before anything can be written to a slot that is given back now: both happen on the
    forward stream, in this order.
    """
    shares = _shares(scheduler, batch)
    shrunk = [0] * len(batch.reqs)
    if any(req.decode_batch_idx == 1 for req in batch.reqs):
        _ask_in_again(batch)
    for index, req in enumerate(batch.reqs):
        if not _is_due(req):
            continue
        state = req.kv_policy
        plan = _plan(scheduler, batch, req, shares[index])
        if plan.is_empty:
            continue
        move: tuple[torch.Tensor, ...] = ()
        if plan.probe is not None:
            move = (scheduler.tree_cache.row(req),)
        if plan.eviction is not None:
            move = scheduler.tree_cache.evict_from(req, plan.eviction)
            shrunk[index] = plan.eviction.freed
            if plan.eviction.detach:
                _ask_in_again(batch)
            _count(scheduler.kv_policy, req, plan.eviction)
        work = Work(
            plan, state.policy, state.buffer, *move, memory=state.memory, tracer=state.tracer
        )
        _worker(scheduler).enqueue(state, work)
    if any(shrunk):
        _shrink(batch, shrunk)
    _publish(scheduler, batch)


def forget(original: Callable[..., None], req: Req, *args: Any, **kwargs: Any) -> None:
    """Around the release of a request's slots (finished, aborted or retracted).

    Whatever was planned for it must not run: its slots may belong to somebody else by then. A
    retracted request is computed again from its tokens, exactly, so it may be cached again too.
    """
    state = getattr(req, "kv_policy", None)
    if state is not None and req.kv.holds_kv:
        state.note(req.kv.cache_protected_len, req.kv.kv_allocated_len)
    original(req, *args, **kwargs)
    if state is None:
        return
    if state.freed:
        req.skip_radix_cache_insert = False
    if state.tracer is not None and req.finished():
        write_trace(req)
    state.reset()


def _is_due(req: Req) -> bool:
    """Whether a request can be compressed now.

    Under overlap the result of a prefill is processed one step later, and only then does the tree
    take the prompt; `decode_batch_idx` tells.
    """
    return (
        req.kv_policy.policy is not None
        and req.kv.holds_kv
        and not req.finished()
        and req.decode_batch_idx >= 1
    )


def _ask_in_again(batch: ScheduleBatch) -> None:
    """Let waiting requests be considered before somebody finishes.

    SGLang does not once it found no room. Here there may be: once it is known what a prompt left
    for the request to take, and once the tree may give a prompt up that was copied.
    """
    batch.batch_is_full = False


def _shares(scheduler: Scheduler, batch: ScheduleBatch) -> Sequence[int]:
    """How much of the tree each request of a batch answers for; one in prefill shares it too."""
    holders = [req for req in batch.reqs if req.kv.holds_kv]
    chunked = scheduler.chunked_req
    if chunked is not None and chunked.kv.holds_kv:
        holders.append(chunked)
    shares = dict(zip(map(id, holders), scheduler.tree_cache.shares(holders), strict=True))
    return [shares.get(id(req), 0) for req in batch.reqs]


def _plan(scheduler: Scheduler, batch: ScheduleBatch, req: Req, share: int) -> RequestPlan:
    """Plan for one request; one that cannot be copied yet is compressed where it is."""
    cache: PrefixCache = scheduler.tree_cache
    state, kv = req.kv_policy, req.kv
    lengths = state.lengths(kv.cache_protected_len, kv.kv_allocated_len)
    before = state.config.budget
    allowance = state.settle(
        lengths,
        share,
        has_room=lambda tokens: cache.room() - admission.reserved(batch.reqs) >= tokens,
        agreed=partial(_largest_of_ranks, scheduler),
    )
    scheduler.kv_policy.counters.budget_expansions += state.config.budget > before
    if allowance.detach and allowance.is_used_up:
        kept = allowance.kept(state.config.keep_ratio, state.page_size)
        if not cache.can_leave(req, kept):
            allowance = pinned(lengths, state.config)
    return state.plan(lengths, allowance)


def _largest_of_ranks(scheduler: Scheduler, error: float) -> float:
    """Every rank sees heads of its own, and all must decide alike."""
    group = scheduler.attn_tp_cpu_group
    if torch.distributed.get_world_size(group) == 1:
        return error
    largest = torch.tensor(error, dtype=torch.float64)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return float(largest)


def _count(factory: PolicyFactory, req: Req, eviction: EvictionPlan) -> None:
    state: RequestState = req.kv_policy
    counters = factory.counters
    if counters.evictions == 0:
        logger.info(
            "KV policy %s evicts for the first time: request %s has seen %d tokens, held %d and "
            "keeps %d.",
            state.config.policy,
            req.rid,
            eviction.lengths.logical,
            eviction.lengths.held,
            eviction.held_after,
        )
    counters.requests_compressed += state.evictions == 1
    counters.requests_copied += eviction.detach
    counters.evictions += 1
    counters.evicted_tokens += eviction.freed
    if state.recas is not None:
        counters.evictions_above_target += state.bound.error > state.recas.epsilon
        if factory.exporter is not None:
            factory.exporter.observe(state.bound)


def _publish(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    policy: PolicyFactory = scheduler.kv_policy
    policy.counters.requests_seeded = scheduler.tree_cache.beacons.hits
    if policy.exporter is not None:
        held = [(req.kv.kv_allocated_len, req.kv_policy.freed) for req in batch.reqs]
        total = sum(length for length, _ in held)
        policy.exporter.publish(policy.counters, total, total + sum(freed for _, freed in held))


def _shrink(batch: ScheduleBatch, by: list[int]) -> None:
    """Lower the batch's held lengths, in new tensors: the forward in flight reads the old ones."""
    cpu = batch.seq_lens_cpu.new_tensor(by)
    batch.seq_lens_cpu = batch.seq_lens_cpu - cpu
    batch.seq_lens = batch.seq_lens - cpu.to(batch.seq_lens.device, non_blocking=True)
    batch.seq_lens_sum = None


def _worker(scheduler: Scheduler) -> Any:
    return scheduler.tp_worker.model_runner.kv_policy
