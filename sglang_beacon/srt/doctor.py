"""The ``doctor`` command: would a server with a policy start here, and if not, why."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata

from sglang_beacon.srt import compat

PACKAGES = ("sglang-beacon", "sglang", "torch", "triton", "flashinfer-python", "transformers")
PLUGIN = "beacon"


def main(hooks: Mapping[str, Sequence[compat.Hook]]) -> int:
    """Print the report on hooks, by group; 0 if a server would start, 1 if it would refuse."""
    for name, version in versions():
        print(f"{name:<20}{version}")
    print(f"{'device':<20}{device()}\n")
    broken = [problem for problem in installation() if problem]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken += report(hooks)
    print()
    for problem in broken:
        print(f"problem: {problem}")
    print("a server with --kv-policy would " + ("refuse to start" if broken else "start"))
    return 1 if broken else 0


def versions() -> list[tuple[str, str]]:
    """Name and version of everything that matters."""

    def version_of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    return [("python", platform.python_version()), *((p, version_of(p)) for p in PACKAGES)]


def device() -> str:
    """The accelerator, or the CPU platform."""
    from sglang.srt.platforms import current_platform

    return f"{current_platform.get_device_name()} ({type(current_platform).__name__})"


def installation() -> list[str | None]:
    """What keeps SGLang from finding the plugin."""
    found = metadata.entry_points(group="sglang.srt.plugins", name=PLUGIN)
    allowed = os.environ.get("SGLANG_PLUGINS")
    listed = allowed is None or PLUGIN in (name.strip() for name in allowed.split(","))
    return [
        None if found else "the plugin's entry point is not installed: run pip install again.",
        None if listed else f"SGLANG_PLUGINS={allowed!r} leaves the plugin out: add {PLUGIN!r}.",
    ]


def report(hooks: Mapping[str, Sequence[compat.Hook]]) -> list[str]:
    """Print each hook and whether its target matches; the problems, if any."""
    for title, group in hooks.items():
        print(f"hooks ({title})")
        for hook in group:
            mark = "ok" if compat.problem_of(hook.target, hook.parameters) is None else "MISSING"
            print(f"  {mark:<8}{hook.kind:<7} {hook.target.removeprefix('sglang.srt.')}")
            print(f"{'':<18}{hook.why}")
    return compat.problems([hook for group in hooks.values() for hook in group])
