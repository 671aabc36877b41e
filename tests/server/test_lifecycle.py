"""One server under everything that can happen to requests, watched from the scheduler's side."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import random_prompt as prompt

BUDGET = 64
PAGE = 16


@pytest.fixture(scope="module")
def server(random_qwen3: Path):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(BUDGET), "--page-size", str(PAGE), "--max-total-tokens", "4096",
        "--chunked-prefill-size", "64", model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server
        # Whatever the tests did: nothing is lost, and nothing was noticed by the strict checks.
        assert server.alive
        server.wait_idle()
        server.flush()
        assert free_slots(server) == 4096


def free_slots(server: Server) -> int:
    """Free plus evictable slots, as the scheduler sees them before its next forward."""
    server.generate(prompt(3, 0), 1)
    first = server.steps()[-1]
    # One page is taken by the request that is about to run.
    return first["free"] + first["evictable"] + PAGE


def test_lengths_at_every_step(server: Server) -> None:
    """Prompts around the page size, in one batch, some in several chunks."""
    since = len(server.steps())
    lengths = (5, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 200)
    server.generate_all([{"input_ids": prompt(n, n), "max_new_tokens": 150 + n} for n in lengths])
    decoded = check_decode_steps(server.steps(since))
    assert len(decoded) > 1000
    assert max(req["logical"] - req["held"] for req in decoded) > 100
    for req in decoded:
        # The tree takes the prompt when the prefill's result is processed, one step later.
        if req["decoded"] > 1:
            assert req["held"] - req["tree"] <= BUDGET + PAGE


def test_same_output_at_any_concurrency(server: Server) -> None:
    jobs = [{"input_ids": prompt(20 + n, 100 + n), "max_new_tokens": 150} for n in range(8)]
    server.flush()
    alone = [server.generate(**job)["tokens"] for job in jobs]
    server.flush()
    together = [reply["tokens"] for reply in server.generate_all(jobs)]
    assert together == alone


def test_policies_and_budgets_of_their_own(server: Server) -> None:
    """Requests choose policy and budget; each is served as if it were alone."""
    choices = [
        {"kv_policy": "none"},
        {"kv_policy": "streaming", "kv_budget": 96},
        {"kv_policy": "random"},
        {"kv_budget": 128},
        {},
    ]
    jobs = [
        {"input_ids": prompt(30, 7 + n), "max_new_tokens": 200, "custom_params": choice}
        for n, choice in enumerate(choices)
    ]
    server.flush()
    together = [reply["tokens"] for reply in server.generate_all(jobs)]
    alone = []
    for job in jobs:
        server.flush()
        alone.append(server.generate(**job)["tokens"])
    assert together == alone


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kv_policy": "becon"}, "did you mean 'beacon'"),
        ({"kv_policy": 7}, "must be a policy's name"),
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_budget": 20}, "too small"),
        ({"kv_budget": "many"}, "kv_budget"),
        ({"kv_budget": True}, "kv_budget"),
        ({"kv_policy_config": {"aggregation": "sum"}}, "aggregation"),
        ({"kv_policy_config": 3}, "kv_policy_config"),
        ({"kv_trace": True}, "trace_directory in --kv-policy-config"),
        ({"kv_trace": "yes"}, "kv_trace must be true or false"),
        ({"kv_policy": "recas"}, "needs a server that was started"),
    ],
)
def test_bad_request_gets_400(server: Server, params: dict, message: str) -> None:
    body = {
        "input_ids": prompt(8, 1),
        "sampling_params": {"max_new_tokens": 4, "custom_params": params},
    }
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert message in response.text
    assert server.generate(prompt(8, 1), 4)["tokens"]


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 1.0])
def test_abort(server: Server, after_s: float) -> None:
    """Aborted while queued, prefilling, decoding before and after evictions."""
    rids = [f"abort-{after_s}-{n}" for n in range(6)]
    replies = []

    def run(rid: str, seed: int) -> None:
        replies.append(server.generate(prompt(100, seed), 3000, rid=rid))

    threads = [threading.Thread(target=run, args=(rid, n)) for n, rid in enumerate(rids)]
    for thread in threads:
        thread.start()
    time.sleep(after_s)
    for rid in rids:
        server.post("/abort_request", {"rid": rid})
    # One that was not known yet when it was aborted runs on: abort it again.
    while any(thread.is_alive() for thread in threads):
        server.post("/abort_request", {"abort_all": True})
        time.sleep(0.2)
    assert all(len(reply["tokens"]) < 3000 for reply in replies)


def test_disconnect_while_streaming(server: Server) -> None:
    body = {
        "input_ids": prompt(40, 3),
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
        "stream": True,
    }
    with server.open_post("/generate", body, timeout_s=60) as response:
        for count, _ in enumerate(response.iter_lines()):
            if count == 200:
                break
    server.wait_idle()


def test_two_hundred_mixed_requests(server: Server) -> None:
    """Lengths, policies and shared prefixes at random, with more requests than slots."""
    draw = random.Random(5)
    shared = [prompt(length, length) for length in (40, 70, 130)]
    jobs = []
    for n in range(200):
        head = draw.choice([[], *shared])
        jobs.append(
            {
                "input_ids": head + prompt(draw.randint(1, 60), 1000 + n),
                "max_new_tokens": draw.randint(1, 120),
                "custom_params": {
                    "kv_policy": draw.choice(["beacon", "streaming", "random", "none"])
                },
            }
        )
    since = len(server.steps())
    for begin in range(0, len(jobs), 40):
        server.generate_all(jobs[begin : begin + 40])
    check_decode_steps(server.steps(since))
    server.flush()
    assert free_slots(server) == 4096
