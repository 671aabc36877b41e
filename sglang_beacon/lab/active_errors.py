"""What active sets leave out: the true error of each step and layer beside its bound."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.simulated_run import Run
from sglang_beacon.lab.simulator import Simulator
from sglang_beacon.runtime.memory import Memory


class ErrorRun(Run):
    """A run that compares each step of its active set with everything retained."""

    sim: ErrorSimulator

    def _attend_sparsely(
        self,
        memory: Memory,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        output = super()._attend_sparsely(memory, layer, queries, keys, values)
        grouped = queries.view(self.num_kv_heads, -1, queries.shape[-1])
        weights = (grouped @ keys.permute(1, 2, 0) * self.scale).softmax(-1)
        full = (weights @ values.transpose(0, 1)).flatten(0, 1)
        assert memory.active is not None
        bound = memory.active.errors[layer]
        assert bound is not None
        true = float((output - full).norm() / output.norm())
        self.sim.errors.append((true, float(bound)))
        return output


class ErrorSimulator(Simulator):
    """A simulator of such runs.

    Attributes
    ----------
    errors : list of (float, float)
        Relative error of a layer's attention output and the bound on it, layer by layer of each
        step that has an active set.
    """

    run_class = ErrorRun

    def __init__(self, model: PreTrainedModel, config: KVPolicyConfig) -> None:
        super().__init__(model, config)
        self.errors: list[tuple[float, float]] = []
