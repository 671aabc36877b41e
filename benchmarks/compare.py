"""Puts runs into one table, if their contracts allow it.

    python -m benchmarks.compare benchmarks/results/quality.jsonl --task revisit_chain --budget 128

Every line of the files is one run: a contract, a method, and one score per item. Differences to the
best method have paired bootstrap intervals. Runs under different contracts are refused by name of
the field.
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


def select(runs: Iterable[Run], task: str | None, budget: int | None) -> list[Run]:
    """The runs of a task at a budget, and the one that keeps everything."""
    return [
        run
        for run in runs
        if (task is None or run["contract"]["task"]["name"] == task)
        and (budget is None or run["contract"]["memory_budget"] in (budget, None))
    ]


def table(runs: Sequence[Run], score: str) -> str:
    """A table of one score, best first.

    Raises
    ------
    ContractError
        When two contracts differ, there is nothing to compare, or a run lacks the score.
    """
    if not runs:
        raise ContractError("no run matches")
    for run in runs:
        require_same(runs[0]["contract"], run["contract"])
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
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or the reason why there is none; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--task")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--score", default="exact")
    options = parser.parse_args(argv)
    try:
        print(table(select(read(options.files), options.task, options.budget), options.score))
    except (ContractError, OSError) as error:
        print(f"not comparable: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
