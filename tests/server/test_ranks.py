"""Two tensor-parallel ranks, and two data-parallel ones, answer as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import random_prompt as prompt
from sglang_beacon.lab.simulator import Simulator

BUDGET = 64
RANKS = {
    # Heads are split: each rank chooses tokens for its own, and both free the same slots.
    "tp": ["--tp", "2"],
    "dp": ["--dp", "2"],
}

BEACON = {"custom_params": {"kv_policy": "beacon"}}


@pytest.fixture(scope="module", params=list(RANKS))
def server(random_qwen3: Path, request: pytest.FixtureRequest):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "recas",
        "--kv-budget", str(BUDGET), "--max-total-tokens", "2048",
        *RANKS[request.param], model=random_qwen3, threads=1,
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:  # fmt: skip
        yield server


def test_equals_simulator(server: Server, random_qwen3: Path) -> None:
    """Prompts that stay in the tree and prompts that leave it, several at once."""
    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    simulator = Simulator(model, KVPolicyConfig(policy="beacon", budget=BUDGET))
    prompts = [prompt(length, length) for length in (20, 45, 70, 25)]
    jobs = [{"input_ids": ids, "max_new_tokens": 150, **BEACON} for ids in prompts]
    replies = server.generate_all(jobs)
    modes = [reply["meta_info"]["kv_policy"]["prefix"] for reply in replies]
    assert modes == ["pin", "copy", "copy", "pin"]
    for ids, reply in zip(prompts, replies, strict=True):
        expected = simulator.generate(ids, 150)
        assert len(expected.kept) >= 5
        assert reply["tokens"] == expected.tokens


def test_shared_prefix(server: Server) -> None:
    """Shares follow from the tree, which is the same on every rank: all finish, all is free."""
    common = prompt(100, 1)
    jobs = [{"input_ids": common + prompt(4, n), "max_new_tokens": 120, **BEACON} for n in range(6)]
    replies = server.generate_all(jobs)
    assert all(reply["meta_info"]["kv_policy"]["evictions"] for reply in replies)
    server.wait_idle()
    assert all(not load["num_used_tokens"] for load in server.loads())


def test_budgets_grow_alike(server: Server, random_qwen3: Path) -> None:
    """Ranks see errors of their own heads only, and follow the largest."""
    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    ids = prompt(20, 5)
    expected = Simulator(model, KVPolicyConfig(policy="recas", budget=BUDGET)).generate(ids, 200)
    # The second one's target is met now and then.
    params = {"kv_policy_config": {"epsilon": 3, "probe_interval": 8}}
    jobs = [{"input_ids": ids, "max_new_tokens": 200}, {"input_ids": prompt(20, 6)}]
    jobs[1] |= {"max_new_tokens": 200, "custom_params": params}
    replies = server.generate_all(jobs)
    first, second = (reply["meta_info"]["kv_policy"] for reply in replies)
    assert replies[0]["tokens"] == expected.tokens
    assert first["budget"] == 2 * BUDGET
    assert second["evictions"]
    assert BUDGET <= second["budget"] <= 2 * BUDGET
    server.wait_idle()
    assert all(not load["num_used_tokens"] for load in server.loads())
