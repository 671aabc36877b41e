"""A served request generates what the simulator does, which moves and frees nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import VOCABULARY
from sglang_beacon.lab.simulator import Simulator

POLICIES = ("beacon", "streaming", "random")


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def random_server(random_qwen3: Path, page_size: int):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", "64", "--page-size", str(page_size), "--max-total-tokens", "4096",
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


@pytest.mark.parametrize("policy", POLICIES)
def test_random_model(
    random_server: Server, random_qwen3: Path, page_size: int, policy: str
) -> None:
    """300 tokens under a budget of 64, on a model whose every token depends on its cache."""
    prompt = torch.randint(2, VOCABULARY, (37,), generator=torch.Generator().manual_seed(1))
    config = KVPolicyConfig(policy=policy, budget=64)
    expected = Simulator(load(random_qwen3), config, page_size).generate(prompt.tolist(), 300)
    random_server.flush()
    reply = random_server.generate(
        prompt.tolist(), 300, logprobs=True, custom_params={"kv_policy": policy}
    )
    assert len(expected.kept) >= 5
    assert len(set(expected.tokens)) >= 100
    assert reply["tokens"] == expected.tokens
    assert reply["logprobs"] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def demo_server(demo_model: Path, page_size: int):
    with Server(
        "--dtype", "float32", "--kv-policy", "beacon", "--kv-budget", "96",
        "--page-size", str(page_size), "--max-total-tokens", "4096", model=demo_model,
    ) as server:  # fmt: skip
        yield server


def test_demo_model(demo_server: Server, demo_model: Path, page_size: int) -> None:
    """200 tokens of real text under a budget of 96, all policies in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell a long story about a lighthouse keeper."}],
        add_generation_prompt=True,
    )["input_ids"]
    replies = demo_server.generate_all(
        [
            {"input_ids": prompt, "max_new_tokens": 200, "custom_params": {"kv_policy": name}}
            for name in POLICIES
        ]
    )
    model = load(demo_model)
    for policy, reply in zip(POLICIES, replies, strict=True):
        config = KVPolicyConfig(policy=policy, budget=96)
        expected = Simulator(model, config, page_size).generate(prompt, 200)
        assert len(expected.kept) >= 5
        assert reply["tokens"] == expected.tokens, policy
