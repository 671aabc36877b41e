"""More than the pool can hold: requests that outgrow it, and loads that overfill it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import random_prompt as prompt

SLOTS, BUDGET = 700, 64


@pytest.fixture(scope="module")
def server(random_qwen3: Path):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(BUDGET), "--max-total-tokens", str(SLOTS), "--enable-metrics",
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


def test_a_request_longer_than_the_pool(server: Server) -> None:
    """It says three times what the pool holds, beside others, and is never retracted."""
    jobs = [{"input_ids": prompt(20, n), "max_new_tokens": (2100, 300)[n > 0]} for n in range(9)]
    since = len(server.steps())
    replies = server.generate_all(jobs)
    assert [len(reply["tokens"]) for reply in replies] == [2100, *[300] * 8]
    assert max(req["logical"] for req in check_decode_steps(server.steps(since))) > 3 * SLOTS


def test_a_longer_one_that_is_retracted_ends_with_a_reason(server: Server) -> None:
    """Only an operator takes its memory away; it cannot be computed again, and says so."""
    errors = []

    def run() -> None:
        body = {
            "input_ids": prompt(20, 3),
            "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True},
        }
        errors.append(server.post("/generate", body))

    since = len(server.steps())
    thread = threading.Thread(target=run)
    thread.start()
    while not any(
        req["logical"] > SLOTS for step in server.steps(since) for req in step.get("reqs", ())
    ):
        time.sleep(0.2)
    server.retract_all()
    thread.join(60)
    assert errors[0].status_code == 500
    assert "--max-total-tokens" in errors[0].text
    assert len(server.generate(prompt(20, 1), 30)["tokens"]) == 30


def test_a_prompt_that_leaves_no_room_is_cut_as_ever(server: Server) -> None:
    """SGLang's own bound holds where even the budget does not fit beside the prompt."""
    reply = server.generate(prompt(660, 4), 300)
    assert 0 < len(reply["tokens"]) < 60


def test_room_that_copies_leave_is_given_out_at_once(server: Server) -> None:
    """Prompts fill the pool, and only once they are copied is there room for more requests."""
    jobs = [{"input_ids": prompt(300, 70 + n), "max_new_tokens": 200} for n in range(6)]
    since = len(server.steps())
    server.generate_all(jobs)
    steps = server.steps(since)
    check_decode_steps(steps)
    assert max(len(step["reqs"]) for step in steps if step["mode"] == "DECODE") >= 5


def test_no_livelock(server: Server) -> None:
    """Ten times more than fits, retracted again and again: all finish, in bounded work."""
    jobs = [{"input_ids": prompt(60, 20 + n), "max_new_tokens": 250} for n in range(40)]
    since = len(server.steps())
    thread = threading.Thread(target=server.generate_all, args=(jobs,))
    thread.start()
    for _ in range(5):
        time.sleep(1)
        server.retract_all()
    thread.join()
    steps = server.steps(since)
    check_decode_steps(steps)
    retractions = sum(step["mode"] == "RETRACT" for step in steps)
    # By the operator alone; the scheduler, left to itself, admits what it can keep.
    assert 0 < retractions <= 5 * 12
    decoded = sum(len(step["reqs"]) for step in steps if step["mode"] == "DECODE")
    assert decoded < 1.2 * 40 * 250


def test_metrics(server: Server) -> None:
    """Counters of the policy stand beside SGLang's own."""
    server.generate(prompt(20, 8), 100)
    counters = server.info()["internal_states"][0]["kv_policy"]["counters"]
    assert counters["evictions"] > 0
    lines = server.get("/metrics").text.splitlines()
    values = {
        line.split("{")[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("sglang:kv_policy_")
    }
    assert values["sglang:kv_policy_evicted_tokens_total"] == counters["evicted_tokens"]
    assert values["sglang:kv_policy_requests_copied_total"] == counters["requests_copied"]
    assert "sglang:kv_policy_held_tokens" in values
    assert any('kv_policy="beacon"' in line for line in lines)
    assert "evicts for the first time" in server.output()
