"""Traces say where every kept token came from, and stay small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import random_prompt
from sglang_beacon.lab.simulated_run import Run
from sglang_beacon.lab.simulator import Simulator
from sglang_beacon.runtime import tracer as tracers
from sglang_beacon.runtime.tracer import Tracer

BUDGET = 48


class TracedSimulator(Simulator):
    """Traces its runs to a file."""

    directory: Path

    class run_class(Run):  # noqa: N801
        def __init__(self, simulator: TracedSimulator, *args: object) -> None:
            super().__init__(simulator, *args)
            self.state.tracer = simulator.tracer = Tracer(simulator.directory, "one/../request 1")


@pytest.fixture(scope="module")
def model(random_qwen3: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()


@pytest.mark.parametrize("policy", ["beacon", "streaming"])
def test_kept_tokens_are_the_simulators(
    model: AutoModelForCausalLM, policy: str, tmp_path: Path
) -> None:
    simulator = TracedSimulator(model, KVPolicyConfig(policy=policy, budget=BUDGET))
    simulator.directory = tmp_path / "traces"
    result = simulator.generate(random_prompt(12, 1), 150)
    path = simulator.tracer.write([1, 2], 1, ["a", "b"], {"policy": policy})
    assert path == tmp_path / "traces" / "one____request_1.json"
    trace = json.loads(path.read_text())
    assert trace["evictions_in_all"] == len(trace["evictions"]) == len(result.kept) > 5
    for noted, kept in zip(trace["evictions"], result.kept, strict=True):
        assert list(noted["kept"]) == ["0", "1", "2", "3"]
        for layer, heads in noted["kept"].items():
            assert heads == kept[int(layer)].tolist()
            for score, head in zip(noted["score"][layer], heads, strict=True):
                assert len(score) == len(head) < noted["held"]
                assert 0 <= min(score) <= max(score) <= 1
                # What stays is, sinks and newest aside, the better part.
                assert sum(score) / len(score) > 0.5
        if policy == "beacon":
            rows = torch.tensor(noted["distance"])
            assert rows.shape == (4, 4)
            assert (rows >= 0).all()
            assert (rows < noted["seen"]).all()
        else:
            assert noted["distance"] is None
    assert (trace["tokens"], trace["words"], trace["prompt"]) == ([1, 2], ["a", "b"], 1)


def test_many_evictions_are_thinned(
    model: AutoModelForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracers, "MOST_EVICTIONS", 4)
    simulator = TracedSimulator(model, KVPolicyConfig(policy="streaming", budget=BUDGET))
    simulator.directory = tmp_path
    result = simulator.generate(random_prompt(12, 1), 150)
    trace = json.loads(simulator.tracer.write([], 0, None, {}).read_text())
    assert len(trace["evictions"]) <= 5
    assert trace["evictions_in_all"] == len(result.kept)
    gaps = {
        b["seen"] - a["seen"]
        for a, b in zip(trace["evictions"], trace["evictions"][1:], strict=False)
    }
    assert len(gaps) == 1
