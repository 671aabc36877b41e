"""SGLang on plain PyTorch: serves on any machine without an accelerator, for development and CI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU platform that needs no compiled kernels: torch attention, torch sampling."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"


# What SGLang's own defaults would be without this platform: an attention backend of another CPU
# build, and a KV pool of most of the host's memory.
DEFAULTS = {
    "handle_missing_default_values": {"device": "cpu"},
    "handle_cpu_backends": {"attention_backend": "torch_native"},
    "handle_gpu_memory_settings": {"mem_fraction_static": 0.3},
}


def register_defaults() -> None:
    """Fill in what the user left open, before SGLang's own steps do, where this platform serves."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.platforms import current_platform

    if isinstance(current_platform, TorchCpuPlatform):
        for step, values in DEFAULTS.items():
            register_resolution_hook(step)(_defaulting(values))


def _defaulting(values: dict[str, Any]) -> Callable[[Any, Callable[[Any], None]], None]:
    def step(server_args: Any, previous: Callable[[Any], None]) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

        resolved = resolving_view(server_args)
        unset = {name: value for name, value in values.items() if getattr(resolved, name) is None}
        if unset:
            declare_resolution(server_args, "sglang_beacon.cpu_platform", **unset)
        previous(server_args)

    return step
