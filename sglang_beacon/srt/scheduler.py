"""The scheduler's side: who is compressed, when, and which slots go back to the pool.

A request's state hangs on the request itself (``req.kv_policy``), so that whatever SGLang does
with the request takes it along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_beacon import policies
from sglang_beacon.config import REQUEST_KEYS, ConfigError, KVPolicyConfig
from sglang_beacon.runtime.compactor import Work
from sglang_beacon.runtime.request import RequestState
from sglang_beacon.srt import attention, compat
from sglang_beacon.srt.server_args import config_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class PolicyFactory:
    """Builds request states; equal configurations share one policy object."""

    def __init__(self, config: KVPolicyConfig, page_size: int) -> None:
        self.config = config
        self.page_size = page_size
        self._default = policies.create(config, page_size)

    def state_for(self, custom_params: Any) -> RequestState:
        """State of a new request; `ConfigError` if its ``custom_params`` ask for nonsense."""
        asked = isinstance(custom_params, Mapping) and any(k in custom_params for k in REQUEST_KEYS)
        if not asked:
            return RequestState(self.config, self._default, self.page_size)
        config = self.config.with_request(custom_params)
        return RequestState(config, policies.create(config, self.page_size), self.page_size)


def start(
    hooks: Sequence[compat.Hook],
    original: Callable[..., None],
    scheduler: Scheduler,
    server_args: Any,
    *args: Any,
) -> None:
    """Around `Scheduler.__init__`: check SGLang and install the hooks, or do not start at all."""
    config = config_of(server_args)
    if config.enabled:
        compat.check(hooks)
        compat.install(hooks)
        attention.wrap_backends()
    original(scheduler, server_args, *args)
    if config.enabled:
        scheduler.kv_policy = PolicyFactory(config, scheduler.page_size)
        logger.info("KV policy %s; %s", config.as_dict(), _worker(scheduler).describe(config))


def admit(scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any) -> None:
    """Before a request is queued: give it its state, or mark it for a 400."""
    if getattr(req, "kv_policy", None) is not None:
        return  # Retracted, and queued again.
    params = req.sampling_params
    try:
        req.kv_policy = scheduler.kv_policy.state_for(params.custom_params)
        if req.kv_policy.policy is not None and (params.beam_width or 1) > 1:
            raise ConfigError("beam search does not work with kv_policy: ask for kv_policy 'none'.")
    except ConfigError as error:
        req.kv_policy = RequestState(KVPolicyConfig(), None, scheduler.page_size)
        req.set_finish_with_abort(str(error))


def evict(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Before the running batch is prepared for its next token: plan, and give slots back.

    Only counts are decided here. The tokens themselves move when the worker next runs a forward,
    which is before anything can be written to a slot that is given back now: both happen on the
    forward stream, in this order.
    """
    shrunk = [0] * len(batch.reqs)
    for index, req in enumerate(batch.reqs):
        if not _is_due(req):
            continue
        state, kv = req.kv_policy, req.kv
        plan = state.plan(kv.cache_protected_len, kv.kv_allocated_len)
        if plan.is_empty:
            continue
        slots = None
        if plan.eviction is not None:
            row = scheduler.req_to_token_pool.req_to_token[kv.req_pool_idx]
            # Taken before anything is freed; a later decode may reuse the row's tail.
            slots = row[: plan.eviction.lengths.held].long().clone()
            _give_back(scheduler, req, plan.eviction.held_after)
            shrunk[index] = plan.eviction.freed
        _worker(scheduler).enqueue(state, Work(plan, state.policy, state.buffer, slots))
    if any(shrunk):
        _shrink(batch, shrunk)


def forget(result: None, req: Req, *args: Any, **kwargs: Any) -> None:
    """After a request's slots were released (finished, aborted or retracted).

    Whatever was planned for it must not run: its slots may belong to somebody else by then. A
    retracted request is computed again from its tokens, exactly, so it may be cached again too.
    """
    state = getattr(req, "kv_policy", None)
    if state is None:
        return
    if state.freed:
        req.skip_radix_cache_insert = False
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


def _give_back(scheduler: Scheduler, req: Req, held: int) -> None:
    """Shorten a request's row to ``held`` positions; from now on it holds no exact copy."""
    kv = req.kv
    scheduler.tree_cache.free_kv_row(kv, [(held, kv.kv_allocated_len)])
    kv.kv_allocated_len = kv.kv_committed_len = held
    req.skip_radix_cache_insert = True


def _shrink(batch: ScheduleBatch, by: list[int]) -> None:
    """Lower the batch's held lengths, in new tensors: the forward in flight reads the old ones."""
    cpu = batch.seq_lens_cpu.new_tensor(by)
    batch.seq_lens_cpu = batch.seq_lens_cpu - cpu
    batch.seq_lens = batch.seq_lens - cpu.to(batch.seq_lens.device, non_blocking=True)
    batch.seq_lens_sum = None


def _worker(scheduler: Scheduler) -> Any:
    return scheduler.tp_worker.model_runner.kv_policy
