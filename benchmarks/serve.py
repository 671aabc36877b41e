"""Serving with and without a policy, side by side in one run.

    python -m benchmarks.serve overhead   # a policy that never has to evict, per decode step
    python -m benchmarks.serve pool       # a pool too small for what the requests will say
    python -m benchmarks.serve length     # step time against how much a request has seen

What limits a decode step is reading: the weights once, and each request's held tokens. A policy
adds one vector copy per layer and request, FPS every 16 tokens and a scoring every eighth of a
budget; it removes everything past the budget. So `overhead` should be near 1, `pool` grows with
how many more requests fit, and `length` is flat where no policy grows.

Two servers are up at once, both sleeping when idle, and take turns; every round is one pair, and
what counts is the median of the pairs' ratios. Absolute numbers follow the machine's mood.
Memory checks and probes are off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.conditions import store
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.random_model import VOCABULARY, save_random_qwen3
from sglang_beacon.lab.serving import Server

Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument(
        "--model", default="demo", help="demo, random (tiny, no tokenizer) or a directory"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted, first")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    STUDIES[args.study](args)


def overhead(args: argparse.Namespace) -> None:
    """Step time at batch 8 and equal held length; the budget is never reached."""
    batch, tokens = 8, 72

    def measure(server: Server, seed: int) -> Row:
        jobs = [{"input_ids": prompt(32, seed + n), "max_new_tokens": tokens} for n in range(batch)]
        return {"step_ms": step_ms(server, jobs)}

    paired(args, "overhead", {"batch": batch, "budget": 2048}, 16_384, 2048, measure)


def pool(args: argparse.Namespace) -> None:
    """Eight requests of 1,400 tokens each in 3,000 slots, budget 256."""
    requests, tokens, budget, slots = 8, 1400, 256, 3000

    def measure(server: Server, seed: int) -> Row:
        jobs = [
            {"input_ids": prompt(20, seed + n), "max_new_tokens": tokens} for n in range(requests)
        ]
        with Watch(server) as watch:
            begin = time.perf_counter()
            server.generate_all(jobs)
            seconds = time.perf_counter() - begin
        return {"tokens_per_s": requests * tokens / seconds, **watch.row}

    setup = {"requests": requests, "generated": tokens, "slots": slots, "budget": budget}
    paired(args, "pool", setup, slots, budget, measure)


def length(args: argparse.Namespace) -> None:
    """Step time of one request, by how many tokens it has seen: median of five windows of steps.

    The tokens before the mark come as a prompt, which is quicker than saying them. Without a radix
    cache a prompt is the request's own, so it is evicted like what it says.
    """
    marks, windows, steps, budget = (512, 1024, 2048, 4096, 8000), 5, 24, 512

    def measure(server: Server, seed: int) -> Row:
        row = {}
        for mark in marks:
            job = {"input_ids": prompt(mark, seed + mark), "max_new_tokens": windows * steps + 9}
            gaps = token_gaps_ms(server, job)[8:]
            parts = [gaps[begin : begin + steps] for begin in range(0, windows * steps, steps)]
            row[f"step_ms_at_{mark}"] = statistics.median(map(statistics.median, parts))
        return row

    setup = {"budget": budget, "windows": windows, "steps_per_window": steps}
    paired(args, "length", setup, 9000, budget, measure, "--disable-radix-cache")


STUDIES: dict[str, Callable[[argparse.Namespace], None]] = {
    "overhead": overhead,
    "pool": pool,
    "length": length,
}


def paired(
    args: argparse.Namespace,
    study: str,
    setup: dict[str, Any],
    slots: int,
    budget: int,
    measure: Callable[[Server, int], Row],
    *flags: str,
) -> None:
    """Measure ``none`` and ``beacon`` in turns; print a table, then one JSON line."""
    model, model_flags = _model(args.model)
    common = (
        "--dtype", args.dtype, "--max-total-tokens", str(slots), "--kv-budget", str(budget),
        "--sleep-on-idle", *flags, *model_flags,
    )  # fmt: skip
    rounds: list[dict[str, Row]] = []
    with ExitStack() as stack:
        servers = {
            policy: stack.enter_context(
                Server(*common, "--kv-policy", policy, model=model, threads=args.threads)
            )
            for policy in ("none", "beacon")
        }
        for number in range(1 - args.warmup, args.rounds + 1):
            row = {
                policy: measure(server, 1000 * number + 5000) for policy, server in servers.items()
            }
            for server in servers.values():
                server.flush()
            if number > 0:
                rounds.append(row)
                print(f"round {number}: {row}", flush=True)

    summary = {}
    for name in rounds[0]["none"]:
        none, beacon = ([row[p][name] for row in rounds] for p in ("none", "beacon"))
        ratios = [b / n for b, n in zip(beacon, none, strict=True) if n]
        summary[name] = {
            "none": statistics.median(none),
            "beacon": statistics.median(beacon),
            "beacon_over_none": statistics.median(ratios) if ratios else None,
        }
        print(f"{name:<20} {summary[name]}")
    store(
        "serve",
        {
            "study": study,
            **setup,
            "model": model.name,
            "dtype": args.dtype,
            "threads": args.threads,
            "rounds": rounds,
            "median": summary,
        },
    )


def step_ms(server: Server, jobs: list[dict[str, Any]]) -> float:
    """Median time between tokens of the first job while the others run beside it."""
    others = threading.Thread(target=server.generate_all, args=(jobs[1:],))
    others.start()
    gaps = token_gaps_ms(server, jobs[0])
    others.join()
    # The first steps still wait for the others' prefills.
    return statistics.median(gaps[16:])


def token_gaps_ms(server: Server, job: dict[str, Any]) -> list[float]:
    """Milliseconds between the tokens of one streamed request."""
    stamps = [time.perf_counter() for _ in server.stream(job["input_ids"], job["max_new_tokens"])]
    return [1e3 * (after - before) for before, after in pairwise(stamps)]


def _model(name: str) -> tuple[Path, tuple[str, ...]]:
    """Directory of a model, and the flags it needs."""
    if name == "demo":
        return ensure(), ()
    if name == "random":
        return save_random_qwen3(Path(tempfile.mkdtemp()) / "random"), ("--skip-tokenizer-init",)
    return Path(name), ()


class Watch:
    """Polls a server while it works: peak slots in use, most requests at once, retractions."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.row: Row = {"peak_slots": 0, "peak_running": 0, "retractions": 0}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Watch:
        self._retracted = self._retractions()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self.row["retractions"] = self._retractions() - self._retracted

    def _poll(self) -> None:
        while not self._done.wait(0.5):
            load = self.server.get("/v1/loads").json()["loads"][0]
            self.row["peak_slots"] = max(self.row["peak_slots"], load["num_used_tokens"])
            self.row["peak_running"] = max(self.row["peak_running"], load["num_running_reqs"])

    def _retractions(self) -> int:
        return self.server.output().count("Retract requests")


def prompt(tokens: int, seed: int) -> list[int]:
    """Random tokens: equal work for both servers, and no prefix in common."""
    return random.Random(seed).choices(range(2, VOCABULARY), k=tokens)


if __name__ == "__main__":
    main()
