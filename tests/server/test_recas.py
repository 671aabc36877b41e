"""RECAS on a live server: the simulator's tokens, and bounds that say what is true."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import random_prompt
from sglang_beacon.lab.simulator import Simulation, Simulator

BUDGET = 64
# Long enough that the budget grows in several steps, and evictions still follow.
GENERATED = 260


@pytest.fixture(scope="module")
def model(random_qwen3: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(random_qwen3: Path, page_size: int):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "recas", "--enable-metrics",
        "--kv-budget", str(BUDGET), "--page-size", str(page_size), "--max-total-tokens", "4096",
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


def simulate(
    model: PreTrainedModel, page_size: int, policy: str, options: Mapping[str, Any], **kwargs: Any
) -> Simulation:
    config = KVPolicyConfig(policy=policy, budget=BUDGET, options=options)
    return Simulator(model, config, page_size).generate(random_prompt(40, 1), GENERATED, **kwargs)


CASES = [
    ("recas", {}),
    ("recas", {"selector": "none", "epsilon": 20, "delimiters": [5, 6, 7, 8], "note_every": 2}),
    ("recas", {"epsilon": 0.5, "ladder": [24, 32, 48], "probe_interval": 8}),
    ("recas", {"selector": "pages", "epsilon": 4, "ladder": [32, 48], "probe_interval": 8}),
    ("recas", {"selector": "sketch", "epsilon": 2, "ladder": [24, 32], "probe_interval": 8}),
    ("beacon+recas", {"epsilon": 3, "probe_interval": 8, "max_budget": 100}),
]


@pytest.mark.parametrize(("policy", "options"), CASES, ids=lambda case: str(case)[:60])
def test_equals_the_simulator(
    server: Server, model: PreTrainedModel, page_size: int, policy: str, options: dict[str, Any]
) -> None:
    expected = simulate(model, page_size, policy, options)
    server.flush()
    reply = server.generate(
        random_prompt(40, 1),
        GENERATED,
        custom_params={"kv_policy": policy, "kv_policy_config": options},
    )
    assert len(expected.kept) >= 3
    assert reply["tokens"] == expected.tokens
    summary = reply["meta_info"]["kv_policy"]
    assert summary["evictions"] == len(expected.kept)
    assert expected.recas is not None
    assert close(summary["recas"], expected.recas.report())


def close(one: Any, other: Any) -> bool:
    """Whether two reports agree."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(other, float):
        return bool(one == pytest.approx(other, rel=1e-3, abs=1e-6))
    return bool(one == other)
