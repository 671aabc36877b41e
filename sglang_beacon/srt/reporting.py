"""What a running server says about its policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.scheduler import Scheduler


def add_to_init_info(info: dict[str, Any], scheduler: Scheduler) -> None:
    """After `Scheduler.get_init_info`: tell the launcher which policy this process runs."""
    info["kv_policy"] = scheduler.kv_policy.config.as_dict()


def add_to_controller_info(info: dict[str, Any], controller: DataParallelController) -> None:
    """After `DataParallelController.get_init_info`: what all its schedulers agree on."""
    policies = [scheduler.get("kv_policy") for scheduler in controller._scheduler_init_infos]
    if policies and all(policy == policies[0] for policy in policies):
        info["kv_policy"] = policies[0]


def add_to_internal_state(output: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: ``/server_info`` names it."""
    output.internal_state["kv_policy"] = controller.scheduler.kv_policy.config.as_dict()
