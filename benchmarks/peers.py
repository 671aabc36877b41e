"""Against kvpress, which compresses while decoding in Hugging Face `generate`.

    python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install kvpress psutil
    python -m benchmarks.peers --kvpress-python ENVIRONMENT/bin/python

The same model, prompts, number of threads and budget; SnapKV on both sides, and BeaconKV on ours.
kvpress runs all requests in step and batches only equal prompts, so that is what is asked here.
Memory is resident: what loading the model took, and the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.conditions import store
from benchmarks.harness import Polling, summarize
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.random_model import random_prompt
from sglang_beacon.lab.serving import Server

# kvpress compresses once more queries than its window have come since.
KEEP_RATIO, WINDOW = 7 / 8, 16
OPTIONS = {"snapkv": {"window": WINDOW}}


def kvpress(python: str, job: dict[str, Any]) -> dict[str, float]:
    """One run of `benchmarks/kvpress_peer.py`."""
    script = Path(__file__).with_name("kvpress_peer.py")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
        done = subprocess.run(
            [python, str(script), file.name], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kvpress failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


class Memory(Polling):
    """Peak resident memory of the process that computes, in MB."""

    def __init__(self, server: Server) -> None:
        super().__init__(interval_s=0.1)
        children = psutil.Process(server.process.pid).children(recursive=True)
        self._process = max(children, key=lambda child: child.memory_info().rss)
        self.loaded = self.peak = self._now()

    def look(self) -> None:
        self.peak = max(self.peak, self._now())

    def _now(self) -> float:
        return float(self._process.memory_info().rss) / 1e6


def ours(policy: str, job: dict[str, Any]) -> dict[str, float]:
    """A server of our own, asked the same at once."""
    prompts: Sequence[list[int]] = job["prompts"]
    slots = len(prompts) * (len(prompts[0]) + job["new_tokens"]) + 1000
    if policy != "none":
        slots = len(prompts) * 2 * job["budget"] + 1000
    flags = (
        "--dtype", "float32", "--max-total-tokens", str(slots), "--kv-policy", policy,
        "--kv-budget", str(job["budget"]),
        "--kv-policy-config", json.dumps({"keep_ratio": KEEP_RATIO, **OPTIONS.get(policy, {})}),
    )  # fmt: skip
    with Server(*flags, model=Path(job["model"]), threads=job["threads"]) as server:
        server.generate(prompts[0], 4)
        with Memory(server) as memory:
            begin = time.perf_counter()
            server.generate_all(
                [{"input_ids": p, "max_new_tokens": job["new_tokens"]} for p in prompts]
            )
            seconds = time.perf_counter() - begin
    rate = len(prompts) * job["new_tokens"] / seconds
    return {"tokens_per_s": rate, "loaded_mb": memory.loaded, "peak_mb": memory.peak}


def main() -> None:
    """Run both sides in turns; prints medians and stores every round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kvpress-python", required=True, help="of an environment with kvpress")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=600)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model = ensure()
    rounds = []
    for number in range(args.rounds):
        job = {
            "model": str(model),
            "prompts": [random_prompt(64, 100 * number + n) for n in range(args.requests)],
            "new_tokens": args.new_tokens,
            "keep_ratio": KEEP_RATIO,
            "window": WINDOW,
            "threads": args.threads,
            "budget": args.budget,
        }
        row = {
            "generate": kvpress(args.kvpress_python, {**job, "budget": 0}),
            "generate, kvpress SnapKV": kvpress(args.kvpress_python, job),
            **{f"server, {policy}": ours(policy, job) for policy in ("none", "snapkv", "beacon")},
        }
        rounds.append(row)
        print(row, flush=True)
    setup = {key: value for key, value in vars(args).items() if key != "kvpress_python"}
    setup |= {"model": model.name, "rounds": rounds, "median": summarize(rounds)}
    store("peers", {"study": "kvpress", **setup})


if __name__ == "__main__":
    main()
