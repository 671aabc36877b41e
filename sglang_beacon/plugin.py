"""Everything this project attaches to SGLang, in one table.

``register`` runs in every SGLang process and installs `ENTRY_HOOKS` alone: the flags, and the
door behind which the rest waits (a data-parallel controller also gets its one). `LAUNCHER_HOOKS`
and `POLICY_HOOKS` are installed when a server is started with a policy; without one, nothing else
is touched.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from sglang_beacon.srt import (
    admission,
    memory_worker,
    reporting,
    scheduler,
    server_args,
    tree_eviction,
    worker,
)
from sglang_beacon.srt.compat import Hook

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_CONTROLLER = f"{_SRT}.managers.data_parallel_controller"
_ADDER = f"{_SRT}.managers.schedule_policy.PrefillAdder"

LAUNCHER_HOOKS = (
    Hook(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._accumulate_request_meta_info",
        "around",
        reporting.unwrap_reply,
        ("meta_info", "state", "key", "values"),
        "a reply names the state of its request once",
    ),
    Hook(
        f"{_SRT}.entrypoints.engine._wait_for_scheduler_ready",
        "after",
        server_args.check_schedulers,
        ("scheduler_pipe_readers",),
        "refuse a scheduler that does not run the policy",
    ),
)

CONTROLLER_HOOKS = (
    Hook(
        f"{_CONTROLLER}.DataParallelController.get_init_info",
        "after",
        reporting.add_to_controller_info,
        ("self",),
        "pass on what the schedulers of a data-parallel server said",
    ),
)

POLICY_HOOKS = (
    Hook(
        f"{_SCHEDULER}.get_init_info",
        "after",
        reporting.add_to_init_info,
        ("self",),
        "tell the launcher which policy this process runs",
    ),
    Hook(
        f"{_SCHEDULER}._add_request_to_queue",
        "around",
        scheduler.admit,
        ("req",),
        "give a request its policy, or answer 400",
    ),
    Hook(
        f"{_SCHEDULER}.init_req_max_new_tokens",
        "around",
        admission.note_asked,
        ("req",),
        "remember how much a request asked for, which may be more than the pool has slots",
    ),
    Hook(
        f"{_SCHEDULER}.get_output_streamer_class",
        "after",
        reporting.add_to_replies,
        ("self",),
        "report lengths and evictions in each reply",
    ),
    Hook(
        f"{_SCHEDULER}.update_running_batch",
        "before",
        scheduler.evict,
        ("batch",),
        "decide evictions and give slots back, before the next token is allocated",
    ),
    Hook(
        f"{_SRT}.mem_cache.common.release_kv_cache",
        "around",
        scheduler.forget,
        ("req", "tree_cache", "checkpoint"),
        "drop what was planned for a request that was finished, aborted or retracted",
    ),
    Hook(
        f"{_ADDER}._get_running_request_total_token_offset",
        "after",
        admission.cap_running,
        ("req",),
        "a running request reserves up to its budget only",
    ),
    Hook(
        f"{_ADDER}.add_one_req",
        "around",
        admission.add_with_room_for_queries,
        ("req",),
        "a new request reserves up to its budget only, and needs room for its queries",
    ),
    Hook(
        f"{_ADDER}.add_chunked_req",
        "around",
        admission.add_capped,
        ("req",),
        "so does one whose prompt arrives in chunks",
    ),
    Hook(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        "after",
        admission.keep_order,
        ("reqs",),
        "retract whoever gives back most, and nobody who could not be computed again",
    ),
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner._init_post_memory_pool_components",
        "after",
        worker.build,
        ("self",),
        "find the layers, test de-rotation, before attention backends are built",
    ),
    Hook(
        f"{_SRT}.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "around",
        worker.run_forward,
        ("batch",),
        "move tokens before a forward, take its queries after it",
    ),
    Hook(
        f"{_SRT}.model_executor.runner.decode_cuda_graph_runner"
        ".DecodeCudaGraphRunner.can_run_graph",
        "after",
        memory_worker.keep_eager,
        ("self", "forward_batch"),
        "steps that read active sets run eagerly",
    ),
    Hook(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        worker.set_positions,
        ("batch", "model_runner"),
        "decode at logical positions",
    ),
    Hook(
        f"{_SRT}.managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController.get_internal_state",
        "after",
        reporting.add_to_internal_state,
        ("recv_req",),
        "name the policy in /server_info",
    ),
)


ENTRY_HOOKS = (
    Hook(
        f"{_SRT}.server_args.ServerArgs.add_cli_args",
        "after",
        server_args.add_flags,
        ("parser",),
        "declare --kv-policy, --kv-budget and --kv-policy-config",
    ),
    Hook(
        f"{_SRT}.server_args.ServerArgs.from_cli_args",
        "after",
        server_args.attach_flags,
        ("args",),
        "validate them, and carry them to every process",
    ),
    Hook(
        f"{_SCHEDULER}.__init__",
        "around",
        partial(scheduler.start, POLICY_HOOKS),
        ("server_args", "port_args"),
        "check SGLang and install the policy hooks, or do not start",
    ),
)

ALL_HOOKS = {
    "always": ENTRY_HOOKS,
    "data-parallel controller": CONTROLLER_HOOKS,
    "launcher, with a policy": LAUNCHER_HOOKS,
    "scheduler, with a policy": POLICY_HOOKS,
}


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``: install the flags and the door."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Importing the engine or the controller takes seconds; whoever needs the hook has done it.
    hooks = ENTRY_HOOKS + (CONTROLLER_HOOKS if _CONTROLLER in sys.modules else ())
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    register_resolution_hook("handle_other_validations")(
        partial(server_args.resolve, LAUNCHER_HOOKS, POLICY_HOOKS)
    )
    tree_eviction.register()
    if platform():
        from sglang_beacon.srt.cpu_platform import register_defaults

        register_defaults()
    if engine := sys.modules.get(f"{_SRT}.entrypoints.engine"):
        engine.Engine.server_args_class = staticmethod(server_args.make_engine_args)


def platform() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``: ours, where there is no accelerator."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    return "sglang_beacon.srt.cpu_platform.TorchCpuPlatform"
