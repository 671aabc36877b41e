"""Checks that SGLang is what the hooks were written for, installs them, and proves they took.

SGLang logs and swallows a plugin's errors, so a broken hook would mean a server that silently
keeps the whole cache. Hence three steps, each of which raises: `check` before, `install`, and
`verify` after, when every call must reach our function.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import starmap
from typing import Any, NamedTuple

SGLANG_VERSION = "0.5.23"
# Fields that the hooks read or write, by dataclass.
FIELDS = {
    "sglang.srt.managers.schedule_batch.ReqKvInfo": (
        "req_pool_idx",
        "cache_protected_len",
        "kv_committed_len",
        "kv_allocated_len",
    ),
    "sglang.srt.managers.schedule_batch.ScheduleBatch": (
        "reqs",
        "seq_lens",
        "seq_lens_cpu",
        "seq_lens_sum",
        "orig_seq_lens",
        "prefix_lens",
        "extend_lens",
        "forward_mode",
    ),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": ("positions", "forward_mode"),
}
# What is called or overridden without a hook, and the parameters relied on.
CALLS = {
    "sglang.srt.mem_cache.registry.register_radix_cache_backend": ("name", "factory"),
    "sglang.srt.mem_cache.registry.create_unified_radix_cache": ("ctx", "cache_class"),
    "sglang.srt.mem_cache.common.evict_from_tree_cache": ("tree_cache", "num_tokens"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint": ("req", "up_to"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.lock": ("node_id",),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.unlock": ("lock",),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.free_kv_row": ("kv", "ranges"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.full_evictable_size": (),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict": (),
    "sglang.srt.managers.schedule_batch.Req.refresh_fill_ids": (),
    "sglang.srt.managers.scheduler.Scheduler._release_aborted_request": ("req",),
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output": ("abort_req", "req"),
    "sglang.srt.managers.scheduler._make_abort_req": ("req", "finished_reason"),
}


class Hook(NamedTuple):
    """One seam: ``kind`` is before, after or around; ``parameters`` are those we rely on."""

    target: str
    kind: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    why: str


class IncompatibleError(RuntimeError):
    """SGLang cannot take the hooks; the message is one sentence."""


def problems(hooks: Sequence[Hook]) -> list[str]:
    """What stands in the way of installing the hooks, one sentence each; empty if nothing."""
    version = metadata.version("sglang")
    found = []
    if version != SGLANG_VERSION:
        found.append(
            f"sglang {version} is installed and this release works with {SGLANG_VERSION}: "
            f"install sglang=={SGLANG_VERSION}, or start without --kv-policy."
        )
    wanted = {hook.target: hook.parameters for hook in hooks}
    found += filter(None, starmap(problem_of, (wanted | CALLS).items()))
    found += filter(None, map(missing_fields, FIELDS))
    return found


def missing_fields(target: str) -> str | None:
    """Which of the `FIELDS` a dataclass lacks, as a sentence, or None."""
    try:
        fields = pkgutil.resolve_name(target).__dataclass_fields__
    except (ImportError, AttributeError) as error:
        return f"sglang has no {target} ({error}); start without --kv-policy."
    if missing := [name for name in FIELDS[target] if name not in fields]:
        return f"{target} has no field {', '.join(missing)}; start without --kv-policy."
    return None


def problem_of(target: str, parameters: Sequence[str]) -> str | None:
    """Why a function cannot be hooked or called as it is here, or None."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return f"sglang has no {target} ({error}); start without --kv-policy."
    missing = set(parameters) - set(inspect.signature(function).parameters)
    if missing:
        return f"{target} has no parameter {', '.join(sorted(missing))}; start without --kv-policy."
    return None


def check(hooks: Sequence[Hook]) -> None:
    """Raise `IncompatibleError` if any hook cannot be installed."""
    if found := problems(hooks):
        raise IncompatibleError(" ".join(found))


def install(hooks: Sequence[Hook]) -> None:
    """Install hooks through SGLang's registry, also on targets another plugin already patched."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    late = [hook for hook in hooks if hook.target in HookRegistry._patched]
    for hook in hooks:
        if hook not in late:
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    HookRegistry.apply_hooks()
    for hook in late:
        # The registry applies each target once; a second plugin has to wrap what is there.
        HookRegistry._apply_target(hook.target, [(HookType(hook.kind), hook.function, None)])
    verify(hooks)


def verify(hooks: Sequence[Hook]) -> None:
    """Raise unless a call of every target reaches our function."""
    for hook in hooks:
        installed = pkgutil.resolve_name(hook.target)
        if not any(function is hook.function for function in _reachable(installed)):
            raise IncompatibleError(
                f"the hook on {hook.target} was not installed; start without --kv-policy, or "
                "remove the other plugin that patches it."
            )


def _reachable(function: Any) -> Iterator[Any]:
    """A function and everything its wrappers hold on to, outermost first."""
    seen: set[int] = set()
    pending = [getattr(function, "__func__", function)]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        for cell in getattr(current, "__closure__", None) or ():
            if callable(cell.cell_contents):
                pending.append(cell.cell_contents)
