"""What a bounded cache costs in answers: methods x budgets x tasks, on a real server.

    python -m benchmarks.quality --suite revisit                  # RevisitChain
    python -m benchmarks.quality --suite tracking                 # variables, overwritten
    python -m benchmarks.quality --suite perplexity               # SmolLM2 on essays
    python -m benchmarks.quality --suite needle
    python -m benchmarks.quality --suite gsm8k                    # SmolLM2 in a chat
    python -m benchmarks.quality --suite reasoning --model Qwen/Qwen3-4B    # needs a GPU

One server answers for all methods; a request names its own. Each method at each budget of each task
is one line of ``benchmarks/results/quality.jsonl``, with its contract (`benchmarks.contract`) and
one score per item, so a run can be stopped and goes on where it was, and tables are made by
`benchmarks.compare`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.conditions import RESULTS
from benchmarks.contract import Contract, checkpoint_hash, machine
from benchmarks.suites import gsm8k, needle, perplexity, reasoning, revisit
from benchmarks.suites.base import Outcome, Suite, Task
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.revisit_chain import RevisitChain, RevisitTask, VariableTracking
from sglang_beacon.lab.serving import Server
from sglang_beacon.policies import POLICIES


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
            "expected_attention", "initial_recent", "streaming", "random", "quest",
        )
    },
}  # fmt: skip


def _chains(kind: type[RevisitTask], args: argparse.Namespace) -> Suite:
    return revisit.suite(args.suite, kind, args.items or 48, args.seed, args.sampled)


SUITES: dict[str, Callable[[argparse.Namespace], Suite]] = {
    "revisit": lambda args: _chains(RevisitChain, args),
    "tracking": lambda args: _chains(VariableTracking, args),
    "perplexity": lambda args: perplexity.suite(args.items or 24),
    "needle": lambda args: needle.suite(args.items or 4),
    "gsm8k": lambda args: gsm8k.suite(args.items or 24),
    "reasoning": lambda args: reasoning.suite(
        args.model, args.sgl_eval, args.new_tokens, args.items, args.math500
    ),
}


def options_of(method: Method, budget: int | None) -> dict[str, Any]:
    """A method's own options at a budget, which must not grow."""
    fixed = {"max_budget": budget} if "recas" in method.policy else {}
    return {**method.options, **fixed}


def observing(method: Method, n_recent: int) -> Method:
    """A method that has as many more beacons as its recent queries are fewer than by default."""
    fewer = KVPolicyConfig().n_recent - n_recent
    defaults = POLICIES[method.policy].defaults if method.policy in POLICIES else {}
    if fewer == 0 or "n_beacon" not in defaults:
        return method
    beacons = defaults["n_beacon"] + fewer
    return replace(method, options={**method.options, "n_beacon": beacons})


def cache_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all policies of a server share."""
    config = KVPolicyConfig(shared_prefix=args.shared_prefix, n_recent=args.n_recent)
    shared = ("shared_prefix", "n_prefix", "n_recent", "keep_ratio")
    return {name: getattr(config, name) for name in shared}


def ask(server: Server, task: Task, method: Method, budget: int | None) -> Outcome:
    """Run one method on one task, from an empty prefix tree."""
    server.wait_idle(timeout_s=60)
    server.flush()
    params: dict[str, Any] = {"kv_policy": method.policy}
    if budget is not None:
        params |= {"kv_budget": budget, "kv_policy_config": options_of(method, budget)}
    return task.run(server, params)


def serving(suite: Suite, args: argparse.Namespace, method: Method, budget: int | None) -> Server:
    """A server whose own policy is the method."""
    flags = ["--dtype", args.dtype, "--random-seed", str(args.seed), *suite.flags]
    flags += ["--kv-policy", method.policy]
    if budget is not None:
        config = {**cache_settings(args), **options_of(method, budget)}
        flags += ["--kv-budget", str(budget), "--kv-policy-config", json.dumps(config)]
    return Server(*flags, model=suite.model, threads=args.threads)


def run(suite: Suite, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what the results do not have yet; prints and returns a record for each cell."""
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {_key(record): record for record in map(json.loads, lines)}
    same = {"checkpoint": checkpoint_hash(suite.model), "dtype": args.dtype, **machine()}
    cells = [
        (name, None if METHODS[name].policy == "none" else budget)
        for budget in args.budgets or suite.budgets
        for name in args.methods
    ]
    records = []
    with ExitStack() as stack, args.out.open("a") as file:
        shared: Server | None = None
        for name, budget in dict.fromkeys(cells):
            method = observing(METHODS[name], args.n_recent)
            for task in suite.tasks:
                contract = Contract(
                    suite=suite.name,
                    task=task.parameters,
                    items=task.items,
                    context=task.context,
                    memory_budget=budget,
                    cache=cache_settings(args),
                    flags=list(suite.flags),
                    decoding=task.decoding,
                    **same,
                )
                record: dict[str, Any] = {
                    "contract": contract.as_dict(),
                    "method": {"name": name, "policy": method.policy, "options": method.options},
                }
                if (known := done.get(_key(record))) is not None:
                    records.append(known)
                    continue
                if suite.server_each:
                    with serving(suite, args, method, budget) as server:
                        outcome = task.run(server, {})
                else:
                    if shared is None:
                        # The one that remembers most can serve all others' requests.
                        most = observing(METHODS["beacon+recas"], args.n_recent)
                        shared = stack.enter_context(serving(suite, args, most, 2048))
                    outcome = ask(shared, task, method, budget)
                record |= {
                    "scores": outcome.scores,
                    "truncated": outcome.truncated,
                    "behaviour": outcome.behaviour(),
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(describe(record), flush=True)
                records.append(record)
    return records


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
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budgets", nargs="+", type=int)
    parser.add_argument("--tasks", nargs="+", help="names of tasks; all of the suite's")
    parser.add_argument("--items", type=int, help="chains, essays, needles per depth, questions")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.6, top-p 0.95")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a directory or a name in the hub, for the suite reasoning")
    parser.add_argument("--new-tokens", type=int, default=32_768)
    parser.add_argument("--math500", type=Path, help="JSON lines of problem, expected_answer")
    parser.add_argument("--sgl-eval", default="sgl-eval", help="the command, where it is installed")
    parser.add_argument(
        "--dtype", help="float32; what the checkpoint says, for the suite reasoning"
    )
    parser.add_argument(
        "--shared-prefix", choices=("copy", "auto"), default="copy",
        help="whether the budget counts every token, or a shared prompt at the request's share",
    )  # fmt: skip
    parser.add_argument(
        "--n-recent", type=int, default=KVPolicyConfig().n_recent,
        help="newest tokens that stay and whose queries observe; beacons take the others' places",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.jsonl")
    args = parser.parse_args()
    if args.suite == "reasoning" and not args.model:
        parser.error("--suite reasoning needs a --model")
    args.dtype = args.dtype or ("auto" if args.suite == "reasoning" else "float32")
    suite = SUITES[args.suite](args)
    if args.tasks:
        suite = replace(suite, tasks=[task for task in suite.tasks if task.name in args.tasks])
    records = run(suite, args)
    if args.suite == "reasoning":
        for task in suite.tasks:
            for budget in args.budgets or suite.budgets:
                ours = {
                    record["method"]["name"]: fmean(record["scores"][task.main])
                    for record in records
                    if record["contract"]["task"]["name"] == task.name
                    and record["contract"]["memory_budget"] in (budget, None)
                }
                print(reasoning.beside_published(str(args.model), task.name, budget, ours))


if __name__ == "__main__":
    main()
