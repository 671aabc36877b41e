"""Served requests generate what the simulator does, which moves and frees nothing.

On a tiny random model, whose every token depends on what its cache holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_beacon import policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import VOCABULARY
from sglang_beacon.lab.simulated_run import Simulation
from sglang_beacon.lab.simulator import Simulator

# The place of a policy is the seed of its prompts. In none of them two tokens are equally likely to
# within rounding, as 232 and 492 are after 49 tokens of streaming from seed 4.
POLICIES = ("beacon", "streaming", "random", "h2o")
# RECAS as it comes, and with each way to choose what a step reads; targets that are met now and
# then, so that the budget grows in between.
RECAS = [
    ("recas", {}),
    ("recas", {"selector": "none", "epsilon": 20, "delimiters": [5, 6, 7, 8], "note_every": 2}),
    ("recas", {"epsilon": 0.5, "ladder": [24, 32, 48], "probe_interval": 8}),
    ("recas", {"selector": "pages", "epsilon": 4, "ladder": [32, 48], "probe_interval": 8}),
    ("recas", {"selector": "sketch", "epsilon": 2, "ladder": [24, 32], "probe_interval": 8}),
    ("beacon+recas", {"epsilon": 3, "probe_interval": 8, "max_budget": 100}),
]
BUDGET = 64


@dataclass(frozen=True)
class Request:
    """A prompt, and how its cache is bounded."""

    policy: str
    ids: list[int]
    options: dict[str, Any] = field(default_factory=dict)

    def simulate(self, model: PreTrainedModel, page_size: int, tokens: int) -> Simulation:
        config = KVPolicyConfig(policy=self.policy, budget=BUDGET, options=self.options)
        return Simulator(model, config, page_size).generate(self.ids, tokens)


@pytest.fixture(scope="module")
def model(random_qwen3: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(random_qwen3: Path, page_size: int):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "recas", "--enable-metrics",
        "--kv-budget", str(BUDGET), "--page-size", str(page_size), "--max-total-tokens", "4096",
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


def served(server: Server, requests: list[Request], tokens: int) -> list[dict[str, Any]]:
    """Replies to all requests at once."""
    server.flush()
    return server.generate_all(
        [
            {
                "input_ids": request.ids,
                "max_new_tokens": tokens,
                "logprobs": True,
                "custom_params": {
                    "kv_policy": request.policy,
                    "kv_policy_config": request.options,
                },
            }
            for request in requests
        ]
    )


def check(reply: dict[str, Any], expected: Simulation, name: str) -> None:
    assert len(set(expected.tokens)) > len(expected.tokens) / 3
    assert expected.kept
    assert reply["tokens"] == expected.tokens, name
    assert reply["logprobs"] == pytest.approx(expected.logprobs, abs=1e-3)
    assert reply["meta_info"]["kv_policy"]["evictions"] == len(expected.kept)


def test_tokens_and_logprobs(server: Server, model: PreTrainedModel, page_size: int) -> None:
    """300 tokens under a budget of 64, with a prompt that stays in the tree or is copied."""
    cases = [(policy, length) for policy in POLICIES for length in (20, 70)]
    requests = [
        Request(policy, prompt(length, seed)) for seed, (policy, length) in enumerate(cases)
    ]
    for request, reply in zip(requests, served(server, requests, 300), strict=True):
        check(reply, request.simulate(model, page_size, 300), request.policy)
        summary = reply["meta_info"]["kv_policy"]
        prefix = "copy" if len(request.ids) == 70 else "pin"
        shown = (summary["policy"], summary["budget"], summary["prefix"])
        assert shown == (request.policy, BUDGET, prefix)
        # The last token is never computed.
        assert summary["logical_tokens"] == len(request.ids) + 299
        assert summary["held_tokens"] + summary["evicted_tokens"] == summary["logical_tokens"]


def test_rivals(server: Server, model: PreTrainedModel, page_size: int) -> None:
    names = sorted(set(policies.POLICIES) - {*POLICIES, "recas", "beacon+recas", "quest"})
    requests = [Request(name, prompt(30, 50 + index)) for index, name in enumerate(names)]
    for request, reply in zip(requests, served(server, requests, 120), strict=True):
        check(reply, request.simulate(model, page_size, 120), request.policy)


def test_reading_less_of_all(server: Server, model: PreTrainedModel, page_size: int) -> None:
    """Quest holds everything, and reads a budget of it."""
    request = Request("quest", prompt(30, 61))
    (reply,) = served(server, [request], 200)
    expected = request.simulate(model, page_size, 200)
    assert reply["tokens"] == expected.tokens
    summary = reply["meta_info"]["kv_policy"]
    assert (summary["evictions"], summary["held_tokens"]) == (0, 229)
    assert summary["recas"]["active"]["ratio"] < 0.7


def test_bounds_and_budgets(server: Server, model: PreTrainedModel, page_size: int) -> None:
    """Signals, bounds, what they make of the budget, and what steps read: all the simulator's."""
    requests = [
        Request(policy, prompt(40, 70 + index), options)
        for index, (policy, options) in enumerate(RECAS)
    ]
    for request, reply in zip(requests, served(server, requests, 200), strict=True):
        expected = request.simulate(model, page_size, 200)
        check(reply, expected, str(request.options))
        assert expected.memory is not None
        assert close(reply["meta_info"]["kv_policy"]["recas"], expected.memory.report())


def test_where_nothing_may_be_dropped_nothing_is(server: Server) -> None:
    """A target that nothing meets, and room to grow: every token of an uncompressed request."""
    options = {"epsilon": 1e-9, "max_budget": 1000, "ladder": [24, 48]}
    whole = server.generate(prompt(40, 4), 200, custom_params={"kv_policy": "none"})
    params = {"kv_policy_config": options}
    reply = server.generate(prompt(40, 4), 200, custom_params=params)
    assert reply["tokens"] == whole["tokens"]
    summary = reply["meta_info"]["kv_policy"]
    assert (summary["evictions"], summary["held_tokens"]) == (0, 239)
    assert summary["recas"]["active"]["ratio"] == 1.0


def test_a_target_out_of_reach_is_reported(server: Server) -> None:
    reply = server.generate(prompt(40, 5), 150, custom_params={"kv_policy": "recas"})
    summary = reply["meta_info"]["kv_policy"]
    assert summary["budget"] == 2 * BUDGET
    assert summary["recas"]["retention"]["evictions_above_target"] == summary["evictions"] > 0
    counters = server.info()["internal_states"][0]["kv_policy"]["counters"]
    assert counters["evictions_above_target"] > 0
    assert counters["budget_expansions"] > 0
    metrics = server.get("/metrics").text
    (count,) = re.findall(r"^sglang:kv_policy_error_bound_count\{.*\} ([\d.]+)$", metrics, re.M)
    assert 0 < float(count) <= counters["evictions"]


def close(one: Any, other: Any) -> bool:
    """Whether two reports agree."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(other, float):
        return bool(one == pytest.approx(other, rel=1e-3, abs=1e-6))
    return bool(one == other)


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
    server.generate(first, 1, custom_params={"kv_policy": "beacon"})
    reply = server.generate(second, 200, custom_params={"kv_policy": "beacon"})
    assert reply["meta_info"]["cached_tokens"] == cached
    assert reply["meta_info"]["kv_policy"]["beacons_reused"] == 16
    assert reply["tokens"] == expected.tokens
    assert expected.tokens != simulator.generate(second, 200, cached=cached).tokens
