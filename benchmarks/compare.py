"""Puts runs into one table, if their contracts allow it.

    python -m benchmarks.compare benchmarks/results/quality.jsonl --task revisit_chain \
        --budget 128 --seed 0 --temperature 0 --any-commit

Every line of the files is one run: a contract, a method, and one score per item. Differences to the
best method have paired bootstrap intervals. Runs under different contracts are refused by name of
the field; with ``--any-commit`` they may be of different commits of this project, and it is said of
which.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bootstrap import mean_difference, paired
from benchmarks.contract import ContractError, require_same

Run = Mapping[str, Any]


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All runs of some files, a later one replacing an earlier one of the same contract and method.

    Raises
    ------
    ContractError
        When a line is not a run.
    """
    runs: dict[str, dict[str, Any]] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                run = json.loads(line)
                key = json.dumps([run["contract"], run["method"]], sort_keys=True)
                if not run["scores"]:
                    raise KeyError("scores")
            except (ValueError, KeyError, TypeError) as error:
                raise ContractError(f"{path.name}:{number} is not a run: {error!r}") from error
            runs[key] = run
    return list(runs.values())


def select(
    runs: Iterable[Run],
    task: str | None = None,
    budget: int | None = None,
    seed: int | None = None,
    temperature: float | None = None,
) -> list[Run]:
    """The runs of a task at a budget, and the one that keeps everything; None takes any."""
    return [
        run
        for run in runs
        if task in (None, run["contract"]["task"]["name"])
        and (budget is None or run["contract"]["memory_budget"] in (budget, None))
        and seed in (None, run["contract"]["items"]["seed"])
        and temperature in (None, run["contract"]["decoding"]["temperature"])
    ]


def commits(runs: Iterable[Run]) -> str:
    """Where runs come from, each commit with its methods if there are several."""
    methods: dict[str, list[str]] = {}
    for run in runs:
        names = methods.setdefault(run["contract"]["commit"], [])
        if run["method"]["name"] not in names:
            names.append(run["method"]["name"])
    if len(methods) == 1:
        return f"Commit {next(iter(methods))}."
    said = "; ".join(f"{commit} ({', '.join(names)})" for commit, names in methods.items())
    return f"Commits {said}."


def table(runs: Sequence[Run], score: str, any_commit: bool = False) -> str:
    """A table of one score, best first.

    Raises
    ------
    ContractError
        When two contracts differ, there is nothing to compare, or a run lacks the score.
    """
    if not runs:
        raise ContractError("no run matches")
    for run in runs:
        require_same(runs[0]["contract"], run["contract"], ("commit",) if any_commit else ())
        if score not in run["scores"]:
            known = ", ".join(run["scores"])
            raise ContractError(f"{run['method']['name']} has no score {score!r}, but {known}")
    ranked = sorted(runs, key=lambda run: -fmean(run["scores"][score]))
    best = ranked[0]["scores"][score]
    lines = [f"| method | {score} | best minus this, 95 % |", "|---|---|---|"]
    for run in ranked:
        values = run["scores"][score]
        behind = paired(best, values, mean_difference)
        lines.append(f"| {run['method']['name']} | {fmean(values):.4g} | {behind} |")
    return "\n".join([*lines, "", commits(runs)])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or the reason why there is none; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--task")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--seed", type=int, help="that items were drawn by")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--any-commit", action="store_true", help="of this project")
    parser.add_argument("--score", default="exact")
    options = parser.parse_args(argv)
    try:
        runs = select(
            read(options.files), options.task, options.budget, options.seed, options.temperature
        )
        print(table(runs, options.score, options.any_commit))
    except (ContractError, OSError) as error:
        print(f"not comparable: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
