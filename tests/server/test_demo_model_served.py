"""A real model, served under a budget, says what the simulator says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.simulator import Simulator

GENERATED = 150
slow = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=slow), 16],
    ids=["page1", "page16"],
)
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def server(demo_model: Path, page_size: int):
    with Server(
        "--dtype", "float32", "--kv-policy", "beacon", "--kv-budget", "96",
        "--page-size", str(page_size), "--max-total-tokens", "4096", model=demo_model, threads=1,
    ) as server:  # fmt: skip
        yield server


@pytest.mark.parametrize(
    "policy",
    ["beacon", pytest.param("streaming", marks=slow), pytest.param("random", marks=slow)],
)
def test_tokens(server: Server, demo_model: Path, page_size: int, policy: str) -> None:
    """Real text under a budget of 96."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell a long story about a lighthouse keeper."}],
        add_generation_prompt=True,
    )["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    server.flush()
    reply = server.generate(prompt, GENERATED, custom_params={"kv_policy": policy})
    config = KVPolicyConfig(policy=policy, budget=96)
    expected = Simulator(model, config, page_size).generate(prompt, GENERATED)
    assert len(expected.kept) >= 5
    assert reply["tokens"] == expected.tokens
