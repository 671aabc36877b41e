"""Retraction forced every few steps, while requests are compressed and share prefixes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.server import Server, check_decode_steps
from transformers import AutoModelForCausalLM

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import VOCABULARY
from sglang_beacon.lab.simulator import Simulator

BUDGET = 64
# Steps between retractions: long enough that the victim has been compressed, and coprime with the
# eviction period, so that some fall on the step of an eviction.
INTERVAL = 81
GENERATED = 500


@pytest.fixture(scope="module")
def server(random_qwen3: Path, page_size: int):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "recas",
        "--kv-budget", str(BUDGET), "--page-size", str(page_size),
        "--max-total-tokens", "4096", model=random_qwen3, threads=1,
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(INTERVAL)},
    ) as server:  # fmt: skip
        yield server


def test_retracted_requests_follow_the_simulator(
    server: Server, random_qwen3: Path, page_size: int
) -> None:
    """Whoever is retracted is computed exactly, from its own beacons on, and compressed again."""
    draw = random.Random(0)
    shared = draw.choices(range(2, VOCABULARY), k=50)
    policies = ("beacon", "none", "recas", "streaming", "beacon+recas", "recas", "beacon", "beacon")
    jobs = [
        {
            "rid": str(n),
            "input_ids": shared[: 50 * (n % 2)] + draw.choices(range(2, VOCABULARY), k=30 + n),
            "max_new_tokens": GENERATED,
            "custom_params": {"kv_policy": policies[n]},
        }
        for n in range(8)
    ]
    replies = server.generate_all(jobs)
    assert all(len(reply["tokens"]) == GENERATED for reply in replies)
    steps = server.steps()
    retracted = [(step["rid"], step["said"]) for step in steps if step["mode"] == "RETRACT"]
    assert len(retracted) > 5
    compressed = {req["rid"] for req in check_decode_steps(steps) if req["held"] < req["logical"]}
    assert compressed & {rid for rid, _ in retracted}

    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    # Those whose prompt is their own; what the others answer for depends on each other.
    for n in range(0, 8, 2):
        expected = Simulator(model, KVPolicyConfig(policy=policies[n], budget=BUDGET), page_size)
        lost = [said for rid, said in retracted if rid == str(n)]
        tokens = expected.generate(jobs[n]["input_ids"], GENERATED, retract_after=lost).tokens
        assert replies[n]["tokens"] == tokens
    server.wait_idle()
    assert server.alive
