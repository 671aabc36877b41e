"""What the serving benchmarks share: servers side by side, loads, and a watch on what they hold.

All servers of a study are up at once, sleeping when idle, and take turns; every round measures each
of them, and what counts is the median of the rounds' ratios to the first. Absolute numbers follow
the machine's mood. Memory checks and probes are off.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

from benchmarks.conditions import store
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.random_model import save_random_qwen3
from sglang_beacon.lab.serving import Server

Row = dict[str, float]


def parse(doc: str | None, studies: Sequence[str], rounds: int) -> argparse.Namespace:
    """Read the command line of a module with several studies."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("study", choices=studies)
    parser.add_argument(
        "--model", default="demo", help="demo, random (tiny, no tokenizer) or a directory"
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted, first")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def compare(
    args: argparse.Namespace,
    module: str,
    study: str,
    setup: Mapping[str, Any],
    servers: Mapping[str, Sequence[str]],
    measure: Callable[[Server, int], Row],
    apart: bool = False,
) -> None:
    """Measure servers, given by their flags, in turns; print a table and store one JSON line.

    Parameters
    ----------
    args : Namespace
        From `parse`.
    module, study : str
        Where the result is kept, and under which name.
    setup : mapping
        What the load is, for the record.
    servers : mapping
        Flags by name; ratios are to the first.
    measure : callable
        One round on one server, from a seed.
    apart : bool
        Start each server for its turn only, where memory does not hold all of them.
    """
    model, model_flags = _model(args.model)
    common = ("--dtype", args.dtype, "--sleep-on-idle", *model_flags)

    def start(name: str) -> Server:
        return Server(*common, *servers[name], model=model, threads=args.threads)

    rounds: list[dict[str, Row]] = []
    with ExitStack() as stack:
        running = {} if apart else {name: stack.enter_context(start(name)) for name in servers}
        for number in range(1 if apart else 1 - args.warmup, args.rounds + 1):
            row = {}
            for name in servers:
                with start(name) if apart else nullcontext(running[name]) as server:
                    row[name] = measure(server, 1000 * number + 5000)
                    server.flush()
            if number > 0:
                rounds.append(row)
                print(f"round {number}: {row}", flush=True)
    median = summarize(rounds)
    store(
        module,
        {
            "study": study,
            **setup,
            "servers": {name: list(flags) for name, flags in servers.items()},
            "model": model.name,
            "dtype": args.dtype,
            "threads": args.threads,
            "rounds": rounds,
            "median": median,
        },
    )


def summarize(rounds: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    """Medians by what was measured and by server, and of the ratios to the first server."""
    first, *others = rounds[0]
    summary = {}
    for quantity in rounds[0][first]:
        line = {
            name: statistics.median(row[name][quantity] for row in rounds) for name in rounds[0]
        }
        for name in others:
            ratios = [
                row[name][quantity] / row[first][quantity] for row in rounds if row[first][quantity]
            ]
            if ratios:
                line[f"{name}/{first}"] = statistics.median(ratios)
        summary[quantity] = line
        print(f"{quantity:<20} " + "  ".join(f"{key} {value:.4g}" for key, value in line.items()))
    return summary


class Polling(ABC):
    """Looks at something again and again, from a thread of its own, while a block runs."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._done.wait(self.interval_s):
            self.look()

    @abstractmethod
    def look(self) -> None:
        """Look once."""


class Watch(Polling):
    """A server while it works: peak slots in use, most requests at once, retractions."""

    def __init__(self, server: Server, interval_s: float = 0.2) -> None:
        super().__init__(interval_s)
        self.server = server
        self.row: Row = {"peak_slots": 0, "peak_running": 0, "retractions": 0}

    def __enter__(self) -> Self:
        self._retracted = self._retractions()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.row["retractions"] = self._retractions() - self._retracted

    def look(self) -> None:
        load = self.server.loads()[0]
        self.row["peak_slots"] = max(self.row["peak_slots"], load["num_used_tokens"])
        self.row["peak_running"] = max(self.row["peak_running"], load["num_running_reqs"])

    def _retractions(self) -> int:
        return self.server.output().count("Retract requests")


def throughput(server: Server, jobs: Sequence[Mapping[str, Any]]) -> Row:
    """Tokens per second of jobs sent at once, and what `Watch` saw meanwhile."""
    with Watch(server) as watch:
        begin = time.perf_counter()
        server.generate_all(jobs)
        seconds = time.perf_counter() - begin
    return {"tokens_per_s": sum(job["max_new_tokens"] for job in jobs) / seconds, **watch.row}


def _model(name: str) -> tuple[Path, tuple[str, ...]]:
    """Directory of a model, and the flags it needs."""
    if name == "demo":
        return ensure(), ()
    if name == "random":
        return save_random_qwen3(Path(tempfile.mkdtemp()) / "random"), ("--skip-tokenizer-init",)
    return Path(name), ()
