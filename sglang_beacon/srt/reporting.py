"""What a running server says about its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

# Key of a reply's `meta_info`.
KEY = "kv_policy"
# Running requests that ``/server_info`` tells of.
MOST_SHOWN = 64


def add_to_init_info(info: dict[str, Any], scheduler: Scheduler) -> None:
    """After `Scheduler.get_init_info`: tell the launcher which policy this process runs."""
    info[KEY] = scheduler.kv_policy.config.as_dict()


def add_to_controller_info(info: dict[str, Any], controller: DataParallelController) -> None:
    """After `DataParallelController.get_init_info`: what all its schedulers agree on."""
    policies = [scheduler.get(KEY) for scheduler in controller._scheduler_init_infos]
    if policies and all(policy == policies[0] for policy in policies):
        info[KEY] = policies[0]


def add_to_internal_state(output: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: for ``/server_info``."""
    scheduler = controller.scheduler
    policy = scheduler.kv_policy
    running = scheduler.running_batch.reqs
    output.internal_state[KEY] = {
        **policy.config.as_dict(),
        "counters": asdict(policy.counters),
        "requests_in_all": len(running),
        "requests": [{"rid": req.rid, **summary(req)} for req in running[:MOST_SHOWN]],
    }


def add_to_replies(streamer: type[SchedulerOutputStreamer], scheduler: Scheduler) -> type:
    """After `Scheduler.get_output_streamer_class`: replies carry the state of their request."""

    class ReportingStreamer(streamer):  # type: ignore[misc, valid-type]
        """SGLang's output streamer, with `summary` in every reply."""

        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            info = super().build_additional_customized_info(reqs)
            return {**info, KEY: [[summary(req)] for req in reqs]}

    return ReportingStreamer


def summary(req: Req) -> dict[str, Any]:
    """What a request's reply says about its cache.

    Tokens are those of the newest step: ``logical_tokens`` were seen, ``held_tokens`` are held, of
    which the prefix tree owns ``shared_tokens``. ``prefix`` says how the prompt's part is kept:
    ``pin`` in the tree, ``copy`` as a private copy, ``none`` if the tree has none of it.
    """
    state, kv = req.kv_policy, req.kv
    if kv.holds_kv:
        state.note(kv.cache_protected_len, kv.kv_allocated_len)
    lengths = state.newest
    bounds = {} if state.recas is None else {"recas": state.memory.report()}
    return {
        "policy": state.config.policy,
        "budget": state.config.budget if state.is_bounded else None,
        "logical_tokens": lengths.logical,
        "held_tokens": lengths.held,
        "shared_tokens": lengths.pinned,
        "prefix": state.prefix,
        "evictions": state.evictions,
        "evicted_tokens": state.evicted_tokens,
        "beacons_reused": state.beacons_reused,
        **bounds,
    }


def unwrap_reply(
    original: Callable[..., None], meta_info: dict[str, Any], state: Any, key: str, values: Any
) -> None:
    """Around `TokenizerManager._accumulate_request_meta_info`: the newest summary, not a list."""
    if key == KEY:
        if values:
            meta_info[key] = values[-1]
    else:
        original(meta_info, state, key, values)
