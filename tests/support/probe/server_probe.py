"""An SGLang plugin that writes down what the scheduler itself holds, one JSON line per forward.

It knows nothing of KV policies: lengths come from SGLang's own records, and the logical length is
counted anew from the last prefill and the decode steps since.
"""

import json
import os

import torch

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
step = {}
log = None
shadow = None


class Shadow:
    """A copy of all keys and values that the prefix tree owns, to see whether they change."""

    def __init__(self, scheduler):
        self.pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.layers = [
            buffer
            for index in range(scheduler.model_config.num_hidden_layers)
            for buffer in (self.pool.get_key_buffer(index), self.pool.get_value_buffer(index))
        ]
        self.copies = [torch.zeros_like(buffer) for buffer in self.layers]
        self.owned = torch.zeros(len(self.layers[0]), dtype=torch.bool)

    def changed(self, slots):
        """How many slots, in the tree now and a step ago, hold something else."""
        owned = torch.zeros_like(self.owned)
        owned[slots.long()] = True
        stayed, new = owned & self.owned, owned & ~self.owned
        differs = torch.zeros_like(owned)
        for buffer, copy in zip(self.layers, self.copies, strict=True):
            differs |= (buffer != copy).flatten(1).any(1) & stayed
            copy[new] = buffer[new]
        self.owned = owned
        return int(differs.sum())


def before_run_batch(scheduler, batch, *args, **kwargs):
    global step, shadow
    shadow = shadow or Shadow(scheduler)
    allocator = scheduler.token_to_kv_pool_allocator
    step = {
        "mode": batch.forward_mode.name,
        "waiting": len(scheduler.waiting_queue),
        "free": allocator.available_size(),
        "evictable": scheduler.tree_cache.evictable_size(),
        "tree_changed": shadow.changed(scheduler.tree_cache.all_values_flatten()),
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
    write({"mode": "RETRACT", "rid": req.rid, "said": len(req.output_ids)})


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
