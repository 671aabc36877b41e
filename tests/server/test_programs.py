"""SGLang's own programs and tests, on a real model, with the policy on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import sglang as sgl
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from support.server import Server

from sglang_beacon.lab import report
from sglang_beacon.lab.serving import free_port
from sglang_beacon.lab.watch import snapshot
from sglang_beacon.srt.frontend import PolicyEndpoint

BUDGET = 128
PREAMBLE = (
    "You are the keeper of a lighthouse on a rocky coast. Ships pass at night, and storms come "
    "without a warning. You keep a diary of the weather, of the ships, and of the birds. "
) * 4


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(demo_model: Path, traces: Path):
    with Server(
        "--dtype", "float32", "--kv-policy", "beacon", "--kv-budget", str(BUDGET),
        "--kv-policy-config", json.dumps({"trace_directory": str(traces)}),
        "--max-total-tokens", "12000", "--enable-cache-report", model=demo_model,
        threads=1,
    ) as server:  # fmt: skip
        yield server


@sgl.function
def diary(s, days: list[str]):
    """One preamble, one branch a day."""
    s += PREAMBLE
    # Fork puts into the tree what has arrived by then; text is appended by another thread.
    s.sync()
    branches = s.fork(len(days))
    for branch, day in zip(branches, days, strict=True):
        branch += f"{day}: "
        branch += sgl.gen("entry", max_tokens=80, ignore_eos=True)
    replies = [branch.get_meta_info("entry") for branch in branches]
    s.cached = [reply["cached_tokens"] for reply in replies]
    s.policies = [reply["kv_policy"] for reply in replies]
    s += "All entries: " + " ".join(branch["entry"] for branch in branches)


def test_a_forked_program_shares_its_preamble(server: Server) -> None:
    server.flush()
    state = diary.run(days=["Monday", "Tuesday", "Friday"], backend=PolicyEndpoint(server.url))
    preamble = server.post("/tokenize", {"prompt": PREAMBLE}).json()["count"]
    # The preamble's last space belongs to the next word.
    assert state.cached == [preamble - 1] * 3
    for policy in state.policies:
        assert policy["policy"] == "beacon"
        assert policy["evictions"] > 0
        assert policy["held_tokens"] < policy["logical_tokens"]


def test_a_program_chooses_its_budget(server: Server) -> None:
    state = diary.run(
        days=["Sunday"], backend=PolicyEndpoint(server.url, kv_policy="streaming", kv_budget=200)
    )
    (policy,) = state.policies
    assert (policy["policy"], policy["budget"]) == ("streaming", 200)


TUTORIALS = Path(__file__).parents[2] / "tutorials" / "frontend"


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("self_consistency", ["--tokens", "60", "--budget", "96"], r"held by each thought: \[\d+"),
        ("thought_then_json", ["--tokens", "90", "--budget", "96"], r"\{'animal': '[a-z]+'"),
        ("agent_loop", ["--days", "2", "--tokens", "20"], r"'tool': '\w+', 'prompt': \d+"),
    ],
)
def test_example_programs(server: Server, program: str, arguments: list[str], says: str) -> None:
    """As a user runs them, in a process of their own."""
    done = subprocess.run(
        [sys.executable, str(TUTORIALS / f"{program}.py"), server.url, *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(says, done.stdout), done.stdout


def test_a_traced_request_becomes_a_page(server: Server, traces: Path) -> None:
    """And while it runs, it can be watched."""
    asked = {"kv_trace": True, "kv_budget": 96}
    body = {
        "text": PREAMBLE,
        "rid": "story",
        "sampling_params": {
            "temperature": 0, "max_new_tokens": 120, "ignore_eos": True, "custom_params": asked,
        },
        "stream": True,
    }  # fmt: skip
    with server.open_post("/generate", body) as response:
        lines = response.iter_lines()
        for _ in range(60):
            next(lines)
        state = snapshot(server.url)
        list(lines)
    (request,) = state["requests"]
    assert (request["rid"], request["policy"]) == ("story", "beacon")
    assert 0 < request["held_tokens"] <= 96 + 1
    # Written when the request is released, right after its last token was sent.
    server.wait_idle()
    trace = report.read(traces / "story.json")
    count = trace["policy"]["logical_tokens"]
    # The last token is never computed.
    assert len(trace["tokens"]) == len(trace["words"]) == count + 1
    assert "".join(trace["words"]).startswith("You are the keeper of a lighthouse")
    assert len(trace["evictions"]) == trace["policy"]["evictions"] > 3
    for eviction in trace["evictions"]:
        for layer in eviction["kept"].values():
            for head in layer:
                assert head == sorted(set(head))
                assert head[-1] == eviction["seen"] - 1
    assert "lighthouse" in report.page(trace)


def test_chat_completions_choose_their_budget(server: Server) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": 20,
        "custom_params": {"kv_policy": "random", "kv_budget": 90},
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.ok
    assert reply.json()["choices"][0]["message"]["content"]
    body["custom_params"]["kv_policy"] = "becon"
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "did you mean 'beacon'" in refused.text


def test_streams_report_as_they_go(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": PREAMBLE}).json()["tokens"]
    summaries = [part["meta_info"]["kv_policy"] for part in server.stream(ids, 60)]
    seen = [summary["logical_tokens"] for summary in summaries]
    assert seen == sorted(seen)
    assert len(set(seen)) > 30
    assert summaries[-1]["evictions"] > 0


@pytest.fixture(scope="module")
def router(server: Server) -> Iterator[str]:
    """URL of a `sglang-router` before the server."""
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", server.url,
            "--port", str(port), "--prometheus-port", str(free_port()),
        ]
    )  # fmt: skip
    try:
        wait_for_workers(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_for_workers(url: str, timeout_s: float = 120) -> None:
    """Until the router has somebody to send requests to."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if requests.get(f"{url}/health_generate", timeout=10).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise TimeoutError("the router found no worker")


def test_behind_the_router_the_servers_policy_holds(server: Server, router: str) -> None:
    body = {
        "text": PREAMBLE,
        "sampling_params": {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0},
    }
    behind = requests.post(f"{router}/generate", json=body, timeout=300).json()
    policy = behind["meta_info"]["kv_policy"]
    assert (policy["policy"], policy["budget"]) == ("beacon", BUDGET)
    assert policy["evictions"] > 0
    assert len(behind["output_ids"]) == 30


def test_behind_the_router_completions_choose_their_budget(server: Server, router: str) -> None:
    """Of the endpoints, the router hands on what it does not know for this one only."""
    evictions = evicted(server)
    body = {"model": "default", "prompt": PREAMBLE, "max_tokens": 30, "ignore_eos": True}
    chosen = {**body, "custom_params": {"kv_policy": "none"}}
    assert requests.post(f"{router}/v1/completions", json=chosen, timeout=300).ok
    assert evicted(server) == evictions
    assert requests.post(f"{router}/v1/completions", json=body, timeout=300).ok
    assert evicted(server) > evictions
    refused = requests.post(
        f"{router}/v1/completions", json={**body, "custom_params": {"kv_budget": 0}}, timeout=300
    )
    assert refused.status_code == 400
    assert "kv_budget" in refused.text


def evicted(server: Server) -> int:
    """Evictions that the server has counted."""
    return server.info()["internal_states"][0]["kv_policy"]["counters"]["evictions"]


class Kits(AbortAllMixin, BasicSchedulerStressMixin, unittest.TestCase):
    """SGLang's own checks; `base_url` and `process` are what they need."""

    abort_all_num_requests = 8
    abort_all_max_new_tokens = 6000
    # Wants capitals that this model does not know, with or without a policy.
    test_concurrent_requests = None
    # Minutes of prefill on a CPU.
    test_long_prompt = None

    @pytest.fixture(autouse=True)
    def on(self, server: Server) -> None:
        self.base_url, self.process = server.url, server.process
