"""A served request generates what the simulator does, which moves and frees nothing.

On a tiny random model, whose every token depends on what its cache holds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM, PreTrainedModel

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
def test_tokens_and_logprobs(
    random_server: Server, random_qwen3: Path, page_size: int, policy: str
) -> None:
    """300 tokens under a budget of 64."""
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
