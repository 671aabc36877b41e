"""A long, mixed load on one server with all memory checks on.

    python -m benchmarks.soak --minutes 20

Lengths, policies, budgets and shared prefixes at random; streaming and not; aborts, disconnects,
retractions, flushes and bad requests. Every so often a known question is asked again, alone, and
must be answered as at the start. At the end nothing may be lost: no slot, and no resident memory
since the warm-up.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import requests

from benchmarks.conditions import store
from sglang_beacon.lab.random_model import random_prompt as prompt
from sglang_beacon.lab.random_model import save_random_qwen3
from sglang_beacon.lab.serving import STRICT, Server

SLOTS = 6000
POLICIES = ("beacon", "streaming", "random", "none")
BAD: tuple[dict[str, Any], ...] = (
    {"kv_budget": 0},
    {"kv_policy": "becon"},
    {"kv_budget": "many"},
)


class Load:
    """Random requests until told to stop; counts what happened."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.shared = [prompt(length, length) for length in (17, 64, 200, 700)]
        self.counts: Counter[str] = Counter()
        self.quiet = threading.Event()
        self.quiet.set()
        self.stop = threading.Event()

    def work(self, worker: int) -> None:
        draw = random.Random(1000 * self.seed + worker)
        while not self.stop.is_set():
            self.quiet.wait()
            kind = draw.choices(
                ("plain", "stream", "disconnect", "abort", "bad", "retract"), (50, 20, 8, 8, 10, 1)
            )[0]
            getattr(self, f"do_{kind}")(draw)
            self.counts[kind] += 1

    def body(self, draw: random.Random) -> dict[str, Any]:
        head = draw.choice([[], *self.shared])
        choice: dict[str, Any] = {"kv_policy": draw.choice(POLICIES)}
        if draw.random() < 0.5:
            choice["kv_budget"] = draw.choice([64, 128, 512])
        return {
            "rid": f"soak-{draw.getrandbits(60)}",
            "input_ids": head + prompt(draw.randint(1, 200), draw.getrandbits(30)),
            "sampling_params": {
                "temperature": draw.choice([0, 0.8]),
                "max_new_tokens": draw.randint(1, 500),
                "ignore_eos": True,
                "custom_params": choice,
            },
        }

    def do_plain(self, draw: random.Random) -> None:
        body = self.body(draw)
        response = self.server.post("/generate", body)
        response.raise_for_status()
        said = response.json()["meta_info"]["completion_tokens"]
        assert said == body["sampling_params"]["max_new_tokens"], response.text

    def do_stream(self, draw: random.Random) -> None:
        body = {**self.body(draw), "stream": True}
        with self.server.open_post("/generate", body) as response:
            lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
        assert lines

    def do_disconnect(self, draw: random.Random) -> None:
        body = {**self.body(draw), "stream": True}
        with self.server.open_post("/generate", body) as response:
            for count, _ in enumerate(response.iter_lines()):
                if count == draw.randint(1, 60):
                    break

    def do_abort(self, draw: random.Random) -> None:
        body = self.body(draw)
        thread = threading.Thread(target=self.server.post, args=("/generate", body))
        thread.start()
        time.sleep(draw.random())
        while thread.is_alive():
            self.server.post("/abort_request", {"rid": body["rid"]})
            thread.join(0.2)

    def do_bad(self, draw: random.Random) -> None:
        body = self.body(draw)
        body["sampling_params"]["custom_params"] = draw.choice(BAD)
        assert self.server.post("/generate", body).status_code == 400

    def do_retract(self, draw: random.Random) -> None:
        self.server.retract_all()


class Examiner:
    """Asks the same questions again and again, alone, of an empty tree."""

    def __init__(self, server: Server, load: Load) -> None:
        self.server, self.load = server, load
        self.expected = self.ask()

    def ask(self) -> list[list[int]]:
        answers = []
        for policy in ("none", "beacon", "streaming"):
            for length in (30, 300):
                self.server.flush()
                reply = self.server.generate(
                    prompt(length, length), 250, custom_params={"kv_policy": policy}
                )
                answers.append(reply["tokens"])
        return answers

    def check(self) -> None:
        """Raise unless the answers are those of the start and all slots are free."""
        self.load.quiet.clear()
        try:
            while (load := self.server.loads()[0])["num_running_reqs"]:
                time.sleep(0.3)
            assert not load["num_used_tokens"], load
            assert self.ask() == self.expected, "a wrong answer"
        finally:
            self.load.quiet.set()


def resident_mb(server: Server) -> float:
    """Resident memory of the server's processes."""
    group = server.process.pid
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[21]) * 4096
    return total / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    model = save_random_qwen3(Path(mkdtemp()) / "random")
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", "128", "--page-size", str(args.page_size), "--max-total-tokens", str(SLOTS),
        "--chunked-prefill-size", "256", "--sleep-on-idle", model=model, threads=1, env=STRICT,
    ) as server:  # fmt: skip
        load = Load(server, args.seed)
        examiner = Examiner(server, load)
        workers = [threading.Thread(target=guard, args=(load, n)) for n in range(args.workers)]
        for worker in workers:
            worker.start()
        begin = time.monotonic()
        memory = []
        while time.monotonic() - begin < 60 * args.minutes and not load.stop.is_set():
            time.sleep(60)
            examiner.check()
            memory.append(resident_mb(server))
            print(f"{len(memory)} min: {memory[-1]:.0f} MB, {dict(load.counts)}", flush=True)
        failed = load.stop.is_set()
        load.stop.set()
        for worker in workers:
            worker.join()
        if failed:
            raise SystemExit("a worker failed")
        examiner.check()
        counters = server.info()["internal_states"][0]["kv_policy"]["counters"]
    warm = memory[len(memory) // 4 :]
    growth = warm[-1] - warm[0]
    store(
        "soak",
        {
            "minutes": args.minutes,
            "seed": args.seed,
            "page_size": args.page_size,
            "requests": dict(load.counts),
            "counters": counters,
            "resident_mb": memory,
            "growth_after_warmup_mb": growth,
        },
    )
    if growth > 0.02 * warm[0]:
        raise SystemExit(f"resident memory grew by {growth:.0f} MB after the warm-up")


def guard(load: Load, worker: int) -> None:
    """Run one worker; a failure stops all of them."""
    try:
        load.work(worker)
    except (AssertionError, requests.RequestException) as error:
        print(f"worker {worker}: {error!r}", flush=True)
        load.stop.set()


if __name__ == "__main__":
    main()
