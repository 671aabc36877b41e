"""Writes ``docs/results.md`` and its figures from the results that are stored.

    python -m benchmarks.results_page

Nothing is measured here; what has not been run is left out. A number that is not in a file of
``benchmarks/results/`` is not on the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bootstrap import mean_difference, paired
from benchmarks.compare import read
from benchmarks.conditions import RESULTS
from benchmarks.quality_tables import cells, draw, header, quality

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def ablations(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Steps before the first error of BeaconKV's variants."""
    page = []
    for record in lines:
        first = next(iter(record["steps"].values()))
        page += [
            f"Budget {record['budget']}, {len(first)} chains, seed {record['seed']}:",
            "",
            "| variant | steps before the first error | 16:16 minus this, 95 % |",
            "|---|---|---|",
        ]
        for name, steps in record["steps"].items():
            page.append(
                f"| {name} | {fmean(steps):.1f} | {paired(first, steps, mean_difference)} |"
            )
        page.append("")
    return page


def mechanism(record: Mapping[str, Any]) -> list[str]:
    """The controlled study's medians."""
    lines = [
        f"{record['traces']} traces of {record['median_tokens']:.0f} tokens (median), one layer "
        "and head each, of our own making: a comparison of mechanisms, not of the published data. "
        "`clairvoyant` keeps what the queries to come will look at the most.",
        "",
        "| method | removed | mass | critical recall | interactions removed | error | cosine |",
        "|---|---|---|---|---|---|---|",
        "| *RECAS, published* | 65.5% | 98.6% | 100% | 70.7% | 1.40% | 0.999988 |",
    ]
    for name, row in record["table"].items():
        lines.append(
            f"| {name} | {row['removed']:.1%} | {row['mass']:.1%} | {row['recall_mean']:.1%} | "
            f"{row['interactions']:.1%} | {row['error']:.2%} | {row['cosine']:.6f} |"
        )
    saved = record["latency"]["saved"]
    lines += ["", "![Recall and error](../benchmarks/results/recas_mechanism.png)"]
    lines += ["", f"Decode attention of a layer under RECAS, selection included: {-saved:.1%} "]
    lines[-1] += "(published: -75.2%)."
    return lines


def serving(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Medians of the newest run of each study, a column for each server."""
    page = []
    for study, record in {record["study"]: record for record in lines}.items():
        about = ("batch", "requests", "asked", "said", "generated", "new_tokens", "seen")
        setup = [f"{key} {record[key]}" for key in (*about, "budget", "slots") if key in record]
        rounds, where = record["rounds"], record["conditions"]
        # Medians have ratios of servers as well.
        servers = list(rounds[0])
        page += [
            f"### {study}",
            "",
            f"{', '.join(setup)}; {record['model']}, {record['threads']} threads, "
            f"{len(rounds)} rounds, {where['gpu'] or where['cpu']}, commit {where['commit']}.",
            "",
            *header("median", servers),
        ]
        for figure, row in record["median"].items():
            values = [f"{row[name]:.4g}" for name in servers]
            page.append(f"| {figure} | " + " | ".join(values) + " |")
        page.append("")
    return page


def records(path: Path) -> list[dict[str, Any]]:
    """What is stored, a line each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Write the page."""
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.results_page` from the files in `benchmarks/results/`, "
        "each of which says its conditions; what went wrong on the way stands in [LOG.md](LOG.md).",
        "",
    ]
    stored = RESULTS / "quality.jsonl"
    if stored.exists():
        runs = read([stored])
        contract = runs[0]["contract"]
        versions = ", ".join(f"{name} {version}" for name, version in contract["versions"].items())
        lines += [
            "## Answers from a bounded cache",
            "",
            f"`python -m benchmarks.quality --suite NAME`. {contract['hardware']['cpu']}, "
            f"{contract['hardware']['cores']} cores; {versions}.",
            "",
        ]
        chain = next((r for r in runs if r["contract"]["task"]["name"] == "revisit_chain"), None)
        if chain is not None:
            figure = RESULTS / "revisit_chain.png"
            draw(cells(runs, chain), figure)
            lines += [f"![Steps by budget](../benchmarks/results/{figure.name})", ""]
        lines += quality(runs)
    if (stored := RESULTS / "ablations.jsonl").exists():
        lines += ["## BeaconKV's parts", "", "`python -m benchmarks.ablations`.", ""]
        lines += ablations(records(stored))
    if (stored := RESULTS / "recas_mechanism.json").exists():
        lines += ["## RECAS's mechanism", "", "`python -m benchmarks.recas_mechanism`.", ""]
        lines += mechanism(json.loads(stored.read_text()))
    for title, command in (("Serving", "serve STUDY"), ("Peers", "peers")):
        if (stored := RESULTS / f"{command.split()[0]}.jsonl").exists():
            lines += ["", f"## {title}", "", f"`python -m benchmarks.{command}`, medians.", ""]
            lines += serving(records(stored))
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
