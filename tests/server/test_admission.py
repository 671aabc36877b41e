"""A pool of 3,000 slots runs eight requests of 1,400 tokens at once under a budget of 256.

Without a policy the same load cannot: the two servers differ in nothing else. Where no budget is
ever reached, they answer alike.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import VOCABULARY

SLOTS, BUDGET, REQUESTS, GENERATED = 3000, 256, 8, 1400
JOBS = [
    {
        "input_ids": random.Random(n).choices(range(2, VOCABULARY), k=20),
        "max_new_tokens": GENERATED,
    }
    for n in range(REQUESTS)
]
SHORT = [{**job, "max_new_tokens": 200, "logprobs": True} for job in JOBS]


def start(model: Path, policy: str) -> Server:
    return Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", str(SLOTS),
        "--kv-policy", policy, "--kv-budget", str(BUDGET), model=model, threads=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def beacon(random_qwen3: Path):
    """Records of the constrained load, and the replies to requests within the budget."""
    with start(random_qwen3, "beacon") as server:
        replies = server.generate_all(SHORT)
        since = len(server.steps())
        assert all(len(r["tokens"]) == GENERATED for r in server.generate_all(JOBS))
        steps = server.steps(since)
        check_decode_steps(steps)
        return steps, replies


@pytest.fixture(scope="module")
def none(random_qwen3: Path):
    """The same of the load's first steps, as many as a request would need if it were alone."""
    with start(random_qwen3, "none") as server, ThreadPoolExecutor(REQUESTS) as pool:
        replies = server.generate_all(SHORT)
        since = len(server.steps())
        for job in JOBS:
            pool.submit(server.generate, **job)
        while len(steps := server.steps(since)) < GENERATED:
            time.sleep(0.5)
        server.post("/abort_request", {"abort_all": True})
        return steps, replies


def running(step: dict) -> int:
    return len(step.get("reqs", ())) if step["mode"] == "DECODE" else 0


def test_beacon_runs_all_at_once(beacon) -> None:
    steps, _ = beacon
    assert not [step for step in steps if step["mode"] == "RETRACT"]
    assert max(map(running, steps)) == REQUESTS
    # All the way to the end, not only while the requests were short.
    full = [step for step in steps if running(step) == REQUESTS]
    assert len(full) >= GENERATED - 50
    prompts = REQUESTS * len(JOBS[0]["input_ids"])
    for step in full:
        assert sum(req["held"] for req in step["reqs"]) <= REQUESTS * (BUDGET + 1) + prompts
        for req in step["reqs"]:
            if req["decoded"] > 1:
                assert req["held"] - req["tree"] <= BUDGET + 1


def test_none_cannot(none) -> None:
    """The load waits: two such requests nearly fill the pool."""
    steps, _ = none
    assert max(map(running, steps)) < REQUESTS or any(s["mode"] == "RETRACT" for s in steps)
    assert max(step["waiting"] for step in steps if "waiting" in step) > 0


def test_within_budget_nothing_changes(beacon, none) -> None:
    for ours, theirs in zip(beacon[1], none[1], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
