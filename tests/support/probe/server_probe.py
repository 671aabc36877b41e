"""An SGLang plugin that writes down what the scheduler itself holds, one JSON line per forward.

It knows nothing of KV policies: lengths come from SGLang's own records, and the logical length is
counted anew from the last prefill and the decode steps since.
"""

import json
import os

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
step = {}
log = None


def before_run_batch(scheduler, batch, *args, **kwargs):
    global step
    allocator = scheduler.token_to_kv_pool_allocator
    step = {
        "mode": batch.forward_mode.name,
        "waiting": len(scheduler.waiting_queue),
        "free": allocator.available_size(),
        "evictable": scheduler.tree_cache.evictable_size(),
        "reqs": [
            {
                "rid": req.rid,
                "held": req.kv.kv_allocated_len,
                "committed": req.kv.kv_committed_len,
                "tree": req.kv.cache_protected_len,
                "decoded": req.decode_batch_idx,
                "logical": req.extend_end + req.decode_batch_idx,
            }
            for req in batch.reqs
        ],
    }


def before_forward(runner, forward_batch, *args, **kwargs):
    step["seq_lens"] = forward_batch.seq_lens.tolist()
    if forward_batch.forward_mode.is_decode():
        step["positions"] = forward_batch.positions.tolist()
    write(step)


def after_retract(result, req, *args, **kwargs):
    write({"mode": "RETRACT", "rid": req.rid})


def after_update(result, *args, **kwargs):
    """Nothing: it makes this target one that another plugin has patched before."""


def write(record):
    global log
    if log is None:
        log = open(os.environ["SERVER_PROBE_LOG"], "a", buffering=1)  # noqa: SIM115
    log.write(json.dumps(record) + "\n")


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "SERVER_PROBE_LOG" not in os.environ:
        return
    HookRegistry.register(f"{SCHEDULER}.run_batch", before_run_batch, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.update_running_batch", after_update, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        before_forward,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract", after_retract, HookType.AFTER
    )
