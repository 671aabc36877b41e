"""Serving with and without a policy, side by side in one run.

    python -m benchmarks.serve overhead   # a policy that never has to evict, per decode step
    python -m benchmarks.serve pool       # a pool too small for what the requests will say
    python -m benchmarks.serve length     # step time against how much a request has seen
    python -m benchmarks.serve methods    # step time of one request, by method, at one budget
    python -m benchmarks.serve load       # SGLang's load generator on each method's own server

What limits a decode step is reading: the weights once, and each request's held tokens. A policy
adds one vector copy per layer and request, FPS every 16 tokens and a scoring every eighth of a
budget; it removes everything past the budget. So `overhead` should be near 1, `pool` grows with
how many more requests fit, and `length` is flat where no policy grows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, Watch, compare, parse, throughput
from sglang_beacon.lab.random_model import random_prompt as prompt
from sglang_beacon.lab.serving import Server


def overhead(args: argparse.Namespace) -> None:
    """Step time at batch 8 and equal held length; the budget is never reached."""
    batch, tokens = 8, 72

    def measure(server: Server, seed: int) -> Row:
        jobs = [{"input_ids": prompt(32, seed + n), "max_new_tokens": tokens} for n in range(batch)]
        return {"step_ms": step_ms(server, jobs)}

    setup = {"batch": batch, "budget": 2048}
    compare(args, "serve", "overhead", setup, none_and_beacon(16_384, 2048), measure)


def pool(args: argparse.Namespace) -> None:
    """Eight requests of 1,400 tokens each in 3,000 slots, budget 256."""
    requests, tokens, budget, slots = 8, 1400, 256, 3000

    def measure(server: Server, seed: int) -> Row:
        jobs = [
            {"input_ids": prompt(20, seed + n), "max_new_tokens": tokens} for n in range(requests)
        ]
        return throughput(server, jobs)

    setup = {"requests": requests, "generated": tokens, "slots": slots, "budget": budget}
    compare(args, "serve", "pool", setup, none_and_beacon(slots, budget), measure)


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
    servers = none_and_beacon(9000, budget, "--disable-radix-cache")
    compare(args, "serve", "length", setup, servers, measure)


def methods(args: argparse.Namespace) -> None:
    """Step time of one request that has seen 2,000 tokens, by method, on one server."""
    budget, seen, steps = 512, 2000, 120
    fixed = {"max_budget": budget, "epsilon": 0.1}
    variants: dict[str, dict[str, Any]] = {
        "none": {"kv_policy": "none"},
        **{name: {"kv_policy": name} for name in ("streaming", "beacon", "h2o")},
        **{
            f"recas_{selector}": {"kv_policy_config": {**fixed, "selector": selector}}
            for selector in ("none", "exact", "pages", "sketch")
        },
        "beacon+recas": {"kv_policy": "beacon+recas", "kv_policy_config": fixed},
    }

    def measure(server: Server, seed: int) -> Row:
        row = {}
        for name, params in variants.items():
            job = {"input_ids": prompt(seen, seed), "max_new_tokens": steps + 9}
            gaps = token_gaps_ms(server, {**job, "custom_params": params})[8:]
            row[f"step_ms_{name}"] = statistics.median(gaps)
        return row

    servers = {
        "recas": [
            "--max-total-tokens", "6000", "--kv-budget", str(budget), "--disable-radix-cache",
            "--kv-policy", "recas",
        ]
    }  # fmt: skip
    setup = {"budget": budget, "seen": seen, "steps": steps}
    compare(args, "serve", "methods", setup, servers, measure)


def load(args: argparse.Namespace) -> None:
    """`sglang.bench_serving` against FullKV with everything on and with much off, and policies.

    All requests come at once, as many tokens in total as three small pools hold. Two servers have
    room for all of them: one as in production, one without radix cache and overlap scheduling, as
    others need it to evict.
    """
    requests, asked, said, slots, budget = 16, 64, 500, 3000, 256
    small = ["--max-total-tokens", str(slots)]
    large = ["--max-total-tokens", str(requests * (asked + said) + 1000)]
    servers = {
        "none, room for all": large,
        "none, room for all, radix cache and overlap off": [
            *large, "--disable-radix-cache", "--disable-overlap-schedule",
        ],
        "none": small,
        **{
            policy: [*small, "--kv-policy", policy, "--kv-budget", str(budget), *flags]
            for policy, flags in (
                ("beacon", []),
                ("recas", ["--kv-policy-config", FIXED]),
                ("beacon+recas", ["--kv-policy-config", FIXED]),
                ("streaming", []),
                ("h2o", []),
            )
        },
    }  # fmt: skip

    def measure(server: Server, seed: int) -> Row:
        with tempfile.TemporaryDirectory() as directory, Watch(server) as watch:
            out = Path(directory) / "out.jsonl"
            command = [
                sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang",
                "--base-url", server.url, "--dataset-name", "random-ids", "--disable-tqdm",
                "--num-prompts", str(requests), "--random-input-len", str(asked),
                "--random-output-len", str(said), "--random-range-ratio", "1", "--seed", str(seed),
                "--output-file", str(out), "--warmup-requests", "0",
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True)
            result = json.loads(out.read_text().splitlines()[-1])
        # The load generator takes an answer of no tokens for a completed request.
        if not result["median_ttft_ms"]:
            raise RuntimeError("The requests were not answered; --model random has no tokenizer.")
        return {name: result[name] for name in LOAD_FIGURES} | watch.row

    setup = {"requests": requests, "asked": asked, "said": said, "slots": slots, "budget": budget}
    compare(args, "serve", "load", setup, servers, measure, apart=True)


# Of what the load generator reports.
LOAD_FIGURES = (
    "output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_e2e_latency_ms",
)  # fmt: skip
# A budget that does not grow, and steps that read all of it.
FIXED = json.dumps({"max_budget": 256, "epsilon": 1e6, "selector": "none"})

STUDIES: dict[str, Callable[[argparse.Namespace], None]] = {
    "overhead": overhead,
    "pool": pool,
    "length": length,
    "methods": methods,
    "load": load,
}


def none_and_beacon(slots: int, budget: int, *flags: str) -> dict[str, list[str]]:
    """Two servers that differ in nothing but the policy."""
    common = ["--max-total-tokens", str(slots), "--kv-budget", str(budget), *flags]
    return {policy: [*common, "--kv-policy", policy] for policy in ("none", "beacon")}


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
    stamps = [time.perf_counter() for _ in server.stream(**job)]
    return [1e3 * (after - before) for before, after in pairwise(stamps)]


def main() -> None:
    """Run one study."""
    args = parse(__doc__, tuple(STUDIES), rounds=5)
    STUDIES[args.study](args)


if __name__ == "__main__":
    main()
