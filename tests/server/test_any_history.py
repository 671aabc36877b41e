"""Any history: requests come, are aborted, retracted and flushed at random; all invariants hold.

At every step of the scheduler, by SGLang's strict checks and by a probe that knows nothing of
policies: positions and lengths, bounds by each request's own budget, and a tree that never changes.

``python -m benchmarks.history`` runs longer ones.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import random_prompt as prompt

PAGE = int(os.environ.get("HISTORY_PAGE", "16"))
STEPS = int(os.environ.get("HISTORY_STEPS", "1000"))
SLOTS, BUDGET = 1536, 96


@pytest.fixture(scope="module")
def server(random_qwen3: Path):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(BUDGET), "--page-size", str(PAGE), "--max-total-tokens", str(SLOTS),
        "--chunked-prefill-size", "128", model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server


@dataclass
class History:
    """A driver that does one thing after the other, and what it knows of the requests."""

    server: Server
    draw: random.Random
    budgets: dict[str, int | None] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    running: dict[str, threading.Thread] = field(default_factory=dict)
    replies: dict[str, dict] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    read: int = 0
    steps: int = 0

    def add(self) -> None:
        # Of one length: aborting a request also aborts those whose names begin with its name.
        rid = f"r{len(self.expected):04}"
        head = prompt(self.draw.choice([0, PAGE - 1, PAGE, PAGE + 1, 40, 200, 330]), 5)
        policy = self.draw.choice(["beacon", "beacon", "streaming", "random", "none"])
        budget = self.draw.choice([BUDGET, 160, 320])
        self.budgets[rid] = budget if policy != "none" else None
        self.expected[rid] = self.draw.choice([1, 20, 150, 400])
        job = {
            "rid": rid,
            "input_ids": head + prompt(self.draw.randint(1, 60), len(self.expected)),
            "max_new_tokens": self.expected[rid],
            "custom_params": {"kv_policy": policy, "kv_budget": budget},
        }

        def run() -> None:
            self.replies[rid] = self.server.generate(**job)

        self.running[rid] = threading.Thread(target=run)
        self.running[rid].start()

    def abort(self) -> None:
        alive = [rid for rid, thread in self.running.items() if thread.is_alive()]
        if alive:
            rid = self.draw.choice(alive)
            self.aborted.add(rid)
            self.server.post("/abort_request", {"rid": rid})

    def retract(self) -> None:
        self.server.retract_all()

    def flush(self) -> None:
        """Refused while anything runs, done otherwise; both are fine."""
        self.server.post("/flush_cache", {})

    def wait(self) -> None:
        time.sleep(self.draw.random() / 2)

    def check(self) -> None:
        """Check the steps since the last time."""
        new = self.server.steps(self.read)
        self.read += len(new)
        self.steps += sum("seq_lens" in step for step in new)
        for req in check_decode_steps(new):
            budget = self.budgets[req["rid"]]
            if budget is not None and req["decoded"] > 1:
                assert req["held"] - req["tree"] <= budget + PAGE

    def finish(self) -> None:
        for thread in self.running.values():
            thread.join(300)
            assert not thread.is_alive()
        self.check()
        for rid, reply in self.replies.items():
            said = len(reply["tokens"])
            assert said == self.expected[rid] or (rid in self.aborted and said < self.expected[rid])


def test_any_history(server: Server) -> None:
    seed = int(os.environ.get("HISTORY_SEED", "0")) or random.randrange(1, 2**31)
    print(f"HISTORY_SEED={seed}")
    history = History(server, random.Random(seed), read=len(server.steps()))
    rules = (History.add, History.abort, History.retract, History.flush, History.wait)
    while history.steps < STEPS:
        # No more at once than the machine can follow.
        alive = sum(thread.is_alive() for thread in history.running.values())
        weights = (10 if alive < 10 else 0, 1, 1, 2, 6)
        history.draw.choices(rules, weights)[0](history)
        history.check()
    history.finish()
    server.wait_idle()
    server.flush()
    load = server.loads()[0]
    assert load["num_used_tokens"] == 0
    assert server.alive
