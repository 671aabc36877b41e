"""Every policy through everything that can happen to a request, all of them in each batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.server import Server, check_decode_steps
from transformers import AutoModelForCausalLM

from sglang_beacon.lab.random_model import random_prompt as prompt
from sglang_beacon.policies import POLICIES, POLICY_NAMES
from sglang_beacon.srt.teacher_forcing import forced_logprobs, forced_request

BUDGET, PAGE, SLOTS = 80, 16, 12_288
Reply = dict[str, Any]


@pytest.fixture(scope="module")
def server(random_qwen3: Path):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "recas",
        "--kv-budget", str(BUDGET), "--page-size", str(PAGE), "--max-total-tokens", str(SLOTS),
        "--chunked-prefill-size", "64", "--enable-custom-logit-processor",
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


def job(policy: str, asked: int, said: int, seed: int) -> dict[str, Any]:
    params: dict[str, Any] = {"kv_policy": policy}
    if "recas" in policy:
        params["kv_policy_config"] = {"max_budget": BUDGET}
    return {"input_ids": prompt(asked, seed), "max_new_tokens": said, "custom_params": params}


def jobs(asked: int, said: int, same_prompt: bool = False) -> list[dict[str, Any]]:
    seeds = [1 if same_prompt else 100 + index for index in range(len(POLICY_NAMES))]
    return [job(name, asked, said, seed) for name, seed in zip(POLICY_NAMES, seeds, strict=True)]


def begun(server: Server, some: list[dict[str, Any]]) -> tuple[threading.Thread, list[Reply]]:
    """A thread that asks them all, and the list that has the replies once it has ended."""
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.extend(server.generate_all(some)))
    thread.start()
    return thread, replies


def short(server: Server) -> list[Reply]:
    """Nothing is evicted, so all answer the same."""
    replies = server.generate_all(jobs(20, 30, same_prompt=True))
    assert {tuple(reply["tokens"]) for reply in replies} == {tuple(replies[0]["tokens"])}
    return replies


def long(server: Server) -> list[Reply]:
    replies = server.generate_all(jobs(20, 200))
    bounded(replies)
    return replies


def prefix_hit(server: Server) -> list[Reply]:
    """A prompt that the tree has is not computed again, and not harmed."""
    server.generate(prompt(70, 1), 1)
    replies = server.generate_all(jobs(70, 120, same_prompt=True))
    assert all(reply["meta_info"]["cached_tokens"] >= 64 for reply in replies)
    bounded(replies)
    return replies


def chunked(server: Server) -> list[Reply]:
    replies = server.generate_all(jobs(200, 120))
    bounded(replies)
    return replies


def retracted(server: Server) -> list[Reply]:
    """Memory is taken away twice; all is said, and whoever is bounded holds no more than before."""
    since = len(server.steps())
    thread, replies = begun(server, jobs(40, 150))
    for happened in (all_decode, all_retracted) * 2:
        if happened is all_retracted:
            server.retract_all()
        while not happened(steps := server.steps(since)):
            assert thread.is_alive()
            time.sleep(0.1)
        since += len(steps)
    thread.join(300)
    bounded(replies)
    return replies


def aborted(server: Server) -> list[Reply]:
    thread, replies = begun(server, jobs(40, 550))
    time.sleep(3)
    while thread.is_alive():
        server.post("/abort_request", {"abort_all": True})
        thread.join(0.2)
    assert all(len(reply["tokens"]) < 550 for reply in replies)
    return []


def all_decode(steps: list[dict[str, Any]]) -> bool:
    """Whether some step decoded a token of every policy's request."""
    return any(
        step["mode"] == "DECODE" and len(step["reqs"]) == len(POLICY_NAMES) for step in steps
    )


def all_retracted(steps: list[dict[str, Any]]) -> bool:
    """Whether every policy's request lost its memory; the server says so after it has replied."""
    return sum(step["mode"] == "RETRACT" for step in steps) == len(POLICY_NAMES)


def bounded(replies: list[Reply]) -> None:
    for name, reply in zip(POLICY_NAMES, replies, strict=True):
        did = reply["meta_info"]["kv_policy"]
        if name != "none" and POLICIES[name].evicts:
            assert did["evictions"] > 0, name
            assert did["held_tokens"] - did["shared_tokens"] <= BUDGET + PAGE, name
        else:
            assert did["evictions"] == 0, name
            assert did["held_tokens"] == did["logical_tokens"], name


SCENARIOS = (short, long, prefix_hit, chunked, retracted, aborted)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_lifecycle(server: Server, scenario: Callable[[Server], list[Reply]]) -> None:
    server.flush()
    since = len(server.steps())
    for name, reply in zip(POLICY_NAMES, scenario(server), strict=False):
        assert reply["meta_info"]["kv_policy"]["policy"] == name
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert check_decode_steps(server.steps(since))
    server.wait_idle()
    server.flush()
    assert server.loads()[0]["num_used_tokens"] == 0
    assert server.alive


def test_a_given_text_under_every_policy(server: Server, random_qwen3: Path) -> None:
    """It is said token by token; likelihoods are the model's own until something is evicted."""
    server.flush()
    asked, text, free = prompt(10, 7), prompt(150, 8), 5

    def ask(policy: str) -> dict[str, Any]:
        params = job(policy, 1, 1, 0)["custom_params"]
        body = forced_request(asked, text, free, params)
        return server.post("/generate", body).json()

    replies = dict(zip(POLICY_NAMES, server.at_once(ask, POLICY_NAMES), strict=True))
    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*asked, *text]])).logits[0]
    expected = logits.log_softmax(-1)[len(asked) - 1 : -1].gather(1, torch.tensor(text)[:, None])
    for name, reply in replies.items():
        assert reply["output_ids"][: len(text)] == text, name
        given = forced_logprobs(reply["meta_info"], len(text))
        assert given[:60] == pytest.approx(expected[:60, 0].tolist(), abs=1e-3), name
        if name != "none":
            assert given[-20:] != pytest.approx(expected[-20:, 0].tolist(), abs=1e-2), name
    whole = replies["none"]
    assert forced_logprobs(whole["meta_info"], len(text)) == pytest.approx(
        expected[:, 0].tolist(), abs=1e-3
    )
    alone = server.generate([*asked, *text], free, custom_params={"kv_policy": "none"})
    assert whole["output_ids"][len(text) :] == alone["tokens"]
    with pytest.raises(ValueError, match="two top logprobs"):
        forced_logprobs(alone["meta_info"], 3)
