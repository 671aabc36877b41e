"""RECAS against others on synthetic traces of long reasoning: memory, recall, error, latency.

A thousand traces of 4K to 32K tokens (`sglang_beacon.lab.reasoning_trace`), one layer and head
each, run by the server's own planner, policies and memory; eight at a time have one length, so that
they can be run as the layers of one request. No method sees which tokens are the premises, and
only ``clairvoyant`` the queries to come. What each keeps is the same share of a trace. Outcomes go
into a file that is kept with the results, so a run that was ended goes on where it stopped::

    python -m benchmarks.recas_mechanism                    # 1,000 traces, hours
    python -m benchmarks.recas_mechanism --quick            # 32 short ones, a minute
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import RESULTS, conditions
from sglang_beacon import ops
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.reasoning_trace import DIM, TraceConfig, reasoning_trace
from sglang_beacon.lab.trace_run import ClairvoyantRun, FullAttention, Outcome, TraceRun

# Traces of one length.
GROUP = 8
# A line for each trace, its figures in the order of `Outcome`.
TRACES = RESULTS / "recas_mechanism_traces.jsonl"
# Of a trace's tokens; between two evictions, the published share stays in the middle.
SHARE = 0.35
KEEP_RATIO = 31 / 32
QUICK = TraceConfig(shortest=2048, longest=2560)
LADDER = [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
# Attention of every fourth query is noted, and every 64th output is looked at.
SIGNALS: dict[str, Any] = {"note_every": 4}
STRIDE = 64
UNBOUNDED: dict[str, Any] = {**SIGNALS, "epsilon": 1e6, "selector": "none"}
BOUNDED: dict[str, Any] = {**SIGNALS, "epsilon": 0.02, "selector": "exact", "ladder": LADDER}
CLAIRVOYANT = "clairvoyant"
# Policy, options, and sinks that are never evicted.
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "full": ("none", {}, 4),
    "sliding window": ("streaming", {}, 0),
    "StreamingLLM": ("streaming", {}, 4),
    "H2O": ("h2o", {"note_every": 4}, 4),
    "TopScore": ("recas", {**UNBOUNDED, "evidence_weight": 0.0}, 4),
    "SnapKV": ("snapkv", {}, 4),
    "BeaconKV": ("beacon", {}, 4),
    "RECAS": ("recas", BOUNDED, 4),
    "RECAS without evidence": ("recas", {**BOUNDED, "evidence_weight": 0.0}, 4),
    "BeaconKV + RECAS": ("beacon+recas", BOUNDED, 4),
    # Evicts when the policy does, but by what will be looked at: what memory of this size can do.
    CLAIRVOYANT: ("streaming", {}, 4),
}


def config_of(method: str, length: int) -> KVPolicyConfig:
    """A method's configuration for a trace of so many tokens."""
    policy, options, n_prefix = METHODS[method]
    budget = int(SHARE * length)
    if "recas" in policy:
        options = {**options, "max_budget": budget}
    return KVPolicyConfig(
        policy=policy, budget=budget, keep_ratio=KEEP_RATIO, n_prefix=n_prefix, options=options
    )


def run_group(config: TraceConfig, task: tuple[list[int], list[str]]) -> list[dict[str, Any]]:
    """What some methods make of the traces of some seeds, which all have the first one's length."""
    torch.set_num_threads(1)
    seeds, methods = task
    first = reasoning_trace(config, seeds[0])
    length = len(first.keys)
    full = FullAttention([first, *(reasoning_trace(config, seed, length) for seed in seeds[1:])])
    records: list[dict[str, Any]] = [
        {"seed": seed, "tokens": length, "outcomes": {}} for seed in seeds
    ]
    for method in methods:
        run = ClairvoyantRun if method == CLAIRVOYANT else TraceRun
        outcomes = run(full, config_of(method, length), STRIDE).outcomes()
        for record, outcome in zip(records, outcomes, strict=True):
            record["outcomes"][method] = [float(f"{figure:.7g}") for figure in outcome]
    return records


def run_all(config: TraceConfig, traces: int, jobs: int, kept: Path) -> list[dict[str, Any]]:
    """Run the traces and methods that ``kept`` has not yet, and add them to it."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    records: dict[int, dict[str, Any]] = {}

    def take(record: dict[str, Any]) -> None:
        records.setdefault(record["seed"], record)["outcomes"].update(record["outcomes"])

    for line in kept.read_text().splitlines() if kept.exists() else ():
        take(json.loads(line))
    tasks = []
    for begin in range(0, traces, GROUP):
        seeds = list(range(begin, min(begin + GROUP, traces)))
        known = [records.get(seed, {"outcomes": {}})["outcomes"] for seed in seeds]
        if missing := [method for method in METHODS if any(method not in each for each in known)]:
            tasks.append((seeds, missing))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, kept.open("a") as file:
        for group in pool.imap_unordered(partial(run_group, config), tasks):
            file.writelines(json.dumps(record) + "\n" for record in group)
            file.flush()
            for record in group:
                take(record)
    return [records[seed] for seed in range(traces)]


def latency(config: TraceConfig, seeds: int, heads: int = 8, queries: int = 24) -> dict[str, Any]:
    """Milliseconds of a layer's decode attention, one thread: everything read, and RECAS.

    Both by the reference kernel over lists of slots. RECAS's include ranking, and the signals of
    the queries that are noted. Heads have copies of one trace's keys.
    """
    torch.set_num_threads(1)
    rows = []
    for seed in range(seeds):
        trace = reasoning_trace(config, seed)
        run = TraceRun(FullAttention([trace]), config_of("RECAS", len(trace.keys)), STRIDE)
        run.outcomes()
        held = run.positions[0, : run.held]
        memory = run.memory
        assert memory is not None
        assert memory.active is not None
        assert memory.signals is not None
        keys, values = (each[:, None].expand(-1, heads, -1).contiguous() for each in trace[:2])
        everything = torch.arange(len(keys)).expand(1, heads, -1)
        counts = torch.full((1, heads), len(keys))
        value_norm = memory.signals.value_norm[0].expand(heads)
        norms = memory.norms[0].expand(heads)
        full, sparse, noted = [], [], []
        for query in trace.queries[-queries:]:
            per_head = query.expand(heads, -1).contiguous()
            begin = time.perf_counter()
            ops.sparse_decode(per_head[None], keys, values, everything, counts, 1.0)
            full.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            memory.active.attend(0, per_head, keys, values, held, 1.0, value_norm, norms)
            sparse.append(time.perf_counter() - begin)
            weights = memory.active.take_weights()
            assert weights is not None
            begin = time.perf_counter()
            memory.signals.note(
                weights[:, :1], len(keys), 1.0, memory.revisits, memory.settings.significance
            )
            # One head's; the others' cost the same.
            noted.append((time.perf_counter() - begin) * heads / memory.settings.note_every)
        times = [statistics.median(each) * 1e3 for each in (full, sparse, noted)]
        rows.append({"tokens": len(keys), "full": times[0], "recas": times[1] + times[2]})
    ratio = statistics.median(row["recas"] / row["full"] for row in rows)
    return {"rows": rows, "saved": 1 - ratio}


def summary(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and median of each figure, by method."""
    table = {}
    for method in METHODS:
        row = {}
        for place, name in enumerate(Outcome._fields):
            values = [record["outcomes"][method][place] for record in records]
            row[name] = statistics.median(values)
            row[f"{name}_mean"] = statistics.fmean(values)
        table[method] = row
    return table


def print_table(table: dict[str, dict[str, float]], seconds: dict[str, Any]) -> None:
    """Print medians of all figures, and mean recall."""
    print(f"{'':24s}{'removed':>9s}{'mass':>8s}{'recall':>8s}{'skipped':>9s}{'error':>8s}  cosine")
    for method, row in table.items():
        print(
            f"{method:24s}{row['removed']:9.1%}{row['mass']:8.1%}{row['recall_mean']:8.1%}"
            f"{row['interactions']:9.1%}{row['error']:8.2%}  {row['cosine']:.6f}"
        )
    print(f"decode attention of a layer, RECAS: {-seconds['saved']:.1%}")


def draw(table: dict[str, dict[str, float]], path: Path) -> None:
    """Recall against output error, all methods at the same memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    markers = "osD^vP*Xh<>"
    for marker, (method, row) in zip(markers, table.items(), strict=True):
        if method == "full":
            continue
        axes.scatter(
            100 * row["error"], 100 * row["recall_mean"], marker=marker, s=70, label=method,
            edgecolors="black", linewidths=0.6,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_xlabel("relative error of the attention output, median of traces (%)")
    axes.set_ylabel("premises still there when needed (%)")
    axes.set_ylim(-4, 104)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the study, print its table, and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="32 short traces; nothing is stored")
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    config, traces = (QUICK, min(args.traces, 32)) if args.quick else (TraceConfig(), args.traces)
    print(f"traces {config}, seeds 0 to {traces - 1}")
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / TRACES.name if args.quick else TRACES
        records = run_all(config, traces, args.jobs, kept)
    seconds = latency(config, seeds=2 if args.quick else 9)
    table = summary(records)
    print_table(table, seconds)
    if args.quick:
        return
    record = {
        "study": "recas_mechanism",
        "traces": len(records),
        "trace": asdict(config),
        "methods": METHODS,
        "share": SHARE,
        "keep_ratio": KEEP_RATIO,
        "stride": STRIDE,
        "head_dim": DIM,
        "median_tokens": statistics.median(record["tokens"] for record in records),
        "geometric_mean_tokens": math.exp(
            statistics.fmean(math.log(record["tokens"]) for record in records)
        ),
        "table": table,
        "latency": seconds,
        "conditions": conditions(),
    }
    (RESULTS / "recas_mechanism.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(table, RESULTS / "recas_mechanism.png")


if __name__ == "__main__":
    main()
