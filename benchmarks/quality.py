"""What a bounded cache costs in answers: methods x budgets x tasks, on a real server.

    python -m benchmarks.quality --suite revisit                  # RevisitChain, variable tracking
    python -m benchmarks.quality --suite perplexity               # SmolLM2 on essays
    python -m benchmarks.quality --suite needle
    python -m benchmarks.quality --suite reasoning --model Qwen/Qwen3-4B    # needs a GPU

One server answers for all methods; a request names its own. Each method at each budget of each task
is one line of ``benchmarks/results/quality.jsonl``, with its contract (`benchmarks.contract`) and
one score per item, so a run can be stopped and goes on where it was, and tables are made by
`benchmarks.compare`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.conditions import RESULTS
from benchmarks.contract import Contract, checkpoint_hash, machine
from benchmarks.suites import needle, perplexity, revisit
from benchmarks.suites.base import Outcome, Suite, Task
from sglang_beacon.lab.serving import Server


@dataclass(frozen=True)
class Method:
    """A policy with its options, under the name that tables show."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)


# Fixed budgets: growth and active sets would compare different amounts of memory.
_FIXED = {"epsilon": 1e6, "selector": "none"}
METHODS: dict[str, Method] = {
    "none": Method("none"),
    "beacon": Method("beacon"),
    "beacon (mean)": Method("beacon", {"aggregation": "mean"}),
    "recas": Method("recas", _FIXED),
    "beacon+recas": Method("beacon+recas", _FIXED),
    **{
        name: Method(name)
        for name in (
            "h2o", "rpc", "rkv", "snapkv", "scissorhands", "tova", "keydiff", "lazy_eviction",
            "expected_attention", "initial_recent", "streaming", "random",
        )
    },
}  # fmt: skip
SHARED_PREFIX = "copy"


def ask(server: Server, task: Task, method: Method, budget: int | None) -> Outcome:
    """Run one method on one task, from an empty prefix tree."""
    server.wait_idle(timeout_s=60)
    server.flush()
    params: dict[str, Any] = {"kv_policy": method.policy}
    if budget is not None:
        params["kv_budget"] = budget
        options = dict(method.options)
        if "recas" in method.policy:
            options["max_budget"] = budget
        params["kv_policy_config"] = options
    return task.run(server, params)


def run(suite: Suite, methods: Sequence[str], budgets: Sequence[int], out: Path) -> None:
    """Run what `out` does not have yet, and print a line for each cell."""
    done = (
        {_key(json.loads(line)) for line in out.read_text().splitlines()} if out.exists() else set()
    )
    same = {"checkpoint": checkpoint_hash(suite.model), "dtype": "float32", **machine()}
    config = json.dumps({"shared_prefix": SHARED_PREFIX})
    flags = (
        "--kv-policy", "beacon+recas", "--kv-policy-config", config, "--dtype", "float32",
        "--max-total-tokens", "60000", "--sleep-on-idle", "--random-seed", "0", *suite.flags,
    )  # fmt: skip
    with Server(*flags, model=suite.model, threads=2) as server, out.open("a") as file:
        for task in suite.tasks:
            cells = [
                (name, budget)
                for budget in budgets
                for name in methods
                if METHODS[name].policy != "none"
            ]
            if "none" in methods:
                cells.insert(0, ("none", None))
            for name, budget in cells:
                contract = Contract(
                    suite=suite.name,
                    task=task.parameters,
                    items=task.items,
                    context=task.context,
                    memory_budget=budget,
                    budget_counts=SHARED_PREFIX,
                    decoding=task.decoding,
                    **same,
                )
                method = METHODS[name]
                record = {
                    "contract": contract.as_dict(),
                    "method": {"name": name, "policy": method.policy, "options": method.options},
                }
                if _key(record) in done:
                    continue
                outcome = ask(server, task, method, budget)
                record |= {
                    "scores": outcome.scores,
                    "truncated": outcome.truncated,
                    "behaviour": outcome.behaviour(),
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(describe(record), flush=True)


def describe(record: Mapping[str, Any]) -> str:
    """One run in one line: scores, the budget and what it is of, evictions, truncation."""
    contract, did = record["contract"], record["behaviour"]
    scores = "  ".join(f"{name} {fmean(values):.4g}" for name, values in record["scores"].items())
    budget = contract["memory_budget"] or "all"
    return (
        f"{contract['task']['name']:24s} {record['method']['name']:16s} "
        f"{budget!s:>5s} of {contract['context']}  {scores}  "
        f"evictions {did.get('evictions', 0):.1f}, evicted {did.get('evicted_tokens', 0):.0f}; "
        f"truncated {record['truncated']:.0%}"
    )


def _key(record: Mapping[str, Any]) -> str:
    """What a cell is known by: everything but the commit, which does not undo what was measured."""
    contract = {key: value for key, value in record["contract"].items() if key != "commit"}
    return json.dumps([contract, record["method"]], sort_keys=True)


def main() -> None:
    """Read the command line and run a suite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", choices=("revisit", "perplexity", "needle"), required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budgets", nargs="+", type=int)
    parser.add_argument("--tasks", nargs="+", help="names of tasks; all of the suite's")
    parser.add_argument("--items", type=int, help="chains, essays, or needles per depth")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.6, top-p 0.95")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.jsonl")
    options = parser.parse_args()
    if options.suite == "revisit":
        suite = revisit.suite(options.items or 48, options.seed, options.sampled)
    elif options.suite == "perplexity":
        suite = perplexity.suite(options.items or 24)
    else:
        suite = needle.suite(options.items or 4)
    if options.tasks:
        tasks = [task for task in suite.tasks if task.name in options.tasks]
        suite = Suite(suite.name, suite.model, tasks, suite.budgets, suite.flags)
    run(suite, options.methods, options.budgets or suite.budgets, options.out)


if __name__ == "__main__":
    main()
