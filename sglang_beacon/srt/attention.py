"""Query capture and active sets inside SGLang's attention backends.

The backend is the one place that sees every layer's rotated queries in all paths, fused and
captured ones included. Its class is extended rather than replaced: much in SGLang depends on the
backend's name and on attributes that a wrapper would have to mirror.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_beacon.srt.refusals import ATTENTION_BACKENDS


def wrap_backends() -> None:
    """Make the factories of the supported backends build observing ones."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as REGISTRY

    for name in ATTENTION_BACKENDS:
        REGISTRY[name] = _observing_factory(REGISTRY[name])


def _observing_factory(factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(factory)
    def build(runner: Any) -> Any:
        backend = factory(runner)
        backend.__class__ = _observing_class(type(backend))
        backend.kv_policy = runner.kv_policy
        return backend

    return build


@functools.cache
def _observing_class(cls: type) -> type:
    """A backend's class, handing each layer's queries and outputs to the policy worker.

    A subclass of that one class alone, since an instance can only change to a class of the same
    object layout.
    """

    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    class Observing(cls):
        def init_forward_metadata(self, forward_batch):
            super().init_forward_metadata(self.kv_policy.memory.shortened(forward_batch))

        def init_forward_metadata_out_graph(self, forward_batch, *args, **kwargs):
            batch = self.kv_policy.memory.shortened(forward_batch)
            super().init_forward_metadata_out_graph(batch, *args, **kwargs)

        def forward_decode(self, q, k, v, layer, forward_batch, *args, **kwargs):
            memory = self.kv_policy.memory
            self.kv_policy.observe_decode(layer.layer_id, q)
            batch = memory.shortened(forward_batch)
            output = super().forward_decode(q, k, v, layer, batch, *args, **kwargs)
            memory.attend(layer.layer_id, q, output, get_is_capture_mode())
            memory.note_step(layer.layer_id, v, output)
            return output

        def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
            self.kv_policy.observe_extend(layer.layer_id, q, forward_batch.positions)
            return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    Observing.__name__ = Observing.__qualname__ = f"Observing{cls.__name__}"
    return Observing
