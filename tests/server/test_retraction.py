"""Retraction forced every few steps, while requests are compressed and share prefixes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import VOCABULARY

BUDGET = 64
# Steps between retractions: long enough that the victim has been compressed, and coprime with the
# eviction period, so that some fall on the step of an eviction.
INTERVAL = 81
GENERATED = 800


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def server(random_qwen3: Path, request: pytest.FixtureRequest):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(BUDGET), "--page-size", str(request.param),
        "--max-total-tokens", "4096", model=random_qwen3, threads=1,
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(INTERVAL)},
    ) as server:  # fmt: skip
        yield server


def test_retracted_requests_finish(server: Server) -> None:
    draw = random.Random(0)
    shared = draw.choices(range(2, VOCABULARY), k=50)
    # The longest prompt is retracted first: the last one.
    policies = ("none", "streaming", "beacon", "beacon")
    jobs = [
        {
            "input_ids": shared[: 50 * (n % 2)] + draw.choices(range(2, VOCABULARY), k=30 + n),
            "max_new_tokens": GENERATED,
            "custom_params": {"kv_policy": policies[n % 4]},
        }
        for n in range(8)
    ]
    assert all(len(reply["tokens"]) == GENERATED for reply in server.generate_all(jobs))
    steps = server.steps()
    retracted = [step["rid"] for step in steps if step["mode"] == "RETRACT"]
    assert len(retracted) > 8
    compressed = {req["rid"] for req in check_decode_steps(steps) if req["held"] < req["logical"]}
    assert compressed & set(retracted)
    server.wait_idle()
    assert server.alive
