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
BUDGET = 64


@pytest.fixture(scope="module")
def model(random_qwen3: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(random_qwen3: Path, page_size: int):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(BUDGET), "--page-size", str(page_size), "--max-total-tokens", "4096",
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("length", "prefix"), [(20, "pin"), (70, "copy")])
def test_tokens_and_logprobs(
    server: Server, model: PreTrainedModel, page_size: int, policy: str, length: int, prefix: str
) -> None:
    """300 tokens under a budget of 64, with a prompt that stays in the tree or is copied."""
    config = KVPolicyConfig(policy=policy, budget=BUDGET)
    expected = Simulator(model, config, page_size).generate(prompt(length, 1), 300)
    server.flush()
    reply = server.generate(
        prompt(length, 1), 300, logprobs=True, custom_params={"kv_policy": policy}
    )
    assert len(expected.kept) >= 5
    assert len(set(expected.tokens)) >= 100
    assert reply["tokens"] == expected.tokens
    assert reply["logprobs"] == pytest.approx(expected.logprobs, abs=1e-3)
    summary = reply["meta_info"]["kv_policy"]
    assert (summary["policy"], summary["budget"], summary["prefix"]) == (policy, BUDGET, prefix)
    assert summary["evictions"] == len(expected.kept)
    # The last token is never computed.
    assert summary["logical_tokens"] == length + 299
    assert summary["held_tokens"] + summary["evicted_tokens"] == summary["logical_tokens"]


@pytest.mark.parametrize("common", [30, 48, 69])
def test_beacons_travel_with_the_prefix(
    server: Server, model: PreTrainedModel, page_size: int, common: int
) -> None:
    """A prompt found in the tree, in part or all but its end, is observed all the same."""
    simulator = Simulator(model, KVPolicyConfig(policy="beacon", budget=BUDGET), page_size)
    first = prompt(70, 2)
    second = first[:common] + prompt(25, 3)
    beacons = simulator.generate(first, 1).beacons
    cached = common // page_size * page_size
    expected = simulator.generate(second, 200, cached=cached, seed=beacons)
    server.flush()
    server.generate(first, 1)
    reply = server.generate(second, 200)
    assert reply["meta_info"]["cached_tokens"] == cached
    assert reply["meta_info"]["kv_policy"]["beacons_reused"] == 16
    assert reply["tokens"] == expected.tokens
    assert expected.tokens != simulator.generate(second, 200, cached=cached).tokens
