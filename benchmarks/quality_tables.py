"""Tables and the figure of quality runs, from runs whose contracts allow it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bootstrap import mean_difference, mean_ratio, paired
from benchmarks.compare import commits
from benchmarks.contract import require_same
from sglang_beacon.config import KVPolicyConfig

OURS = ("beacon", "recas", "beacon+recas")
Run = Mapping[str, Any]


def question(run: Run) -> str:
    """What was asked, of how many, how it was to be answered and held: a table has one of them."""
    return json.dumps([run["contract"][field] for field in ("task", "items", "decoding", "cache")])


def cells(runs: Sequence[Run], like: Run) -> dict[tuple[str, int | None], Run]:
    """Runs of one question by method and budget, once their contracts allow one table."""
    asked = question(like)
    found: dict[tuple[str, int | None], Run] = {}
    for run in runs:
        if question(run) == asked:
            require_same(like["contract"], run["contract"], ("commit", "memory_budget"))
            found[run["method"]["name"], run["contract"]["memory_budget"]] = run
    return found


def bounded(found: Mapping[tuple[str, int | None], Run]) -> list[str]:
    """The methods that were held to a budget, in the order of the file."""
    return list(dict.fromkeys(name for name, budget in found if budget))


def header(first: str, columns: Sequence[object]) -> list[str]:
    """The head of a table with a column for each budget, or server."""
    return [
        f"| {first} | " + " | ".join(map(str, columns)) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]


def grid(
    found: Mapping[tuple[str, int | None], Run], scores: Sequence[str], show: Callable[..., str]
) -> list[str]:
    """A table of methods by budgets; ``show`` formats the means of the scores."""
    budgets = sorted({budget for _, budget in found if budget}, reverse=True)

    def cell(run: Run | None) -> str:
        if run is None:
            return ""
        return show(*(fmean(run["scores"][score]) for score in scores))

    names = bounded(found)
    common = [b for b in budgets if all((name, b) in found for name in names)] or budgets

    def rank(name: str) -> float:
        known = [found[name, b] for b in common if (name, b) in found]
        return -fmean(fmean(run["scores"][scores[-1]]) for run in known)

    lines = header("method", budgets)
    if ("none", None) in found:
        everything = cell(found["none", None])
        lines.append("| everything kept | " + " | ".join([everything] * len(budgets)) + " |")
    for name in sorted(names, key=rank):
        title = f"**{name}**" if name in OURS else name
        row = [cell(found.get((name, budget))) for budget in budgets]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    return lines


def against(
    found: Mapping[tuple[str, int | None], Run], ours: str, score: str, ratio: bool
) -> list[str]:
    """One of our methods against every other: paired ratios or differences, with intervals."""
    budgets = sorted({b for name, b in found if b and name == ours}, reverse=True)
    lines = header(f"{ours} divided by" if ratio else f"{ours} minus", budgets)
    statistic = mean_ratio if ratio else mean_difference
    for name in bounded(found):
        if name == ours:
            continue
        row = []
        for budget in budgets:
            one, other = found[ours, budget], found.get((name, budget))
            pair = other and paired(one["scores"][score], other["scores"][score], statistic)
            row.append(str(pair) if pair else "")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return lines


def title(contract: Mapping[str, Any]) -> str:
    """The task, and in what it was asked differently from the main run of it."""
    words = [contract["task"]["name"]]
    if seed := contract["items"]["seed"]:
        words.append(f"seed {seed}")
    if contract["decoding"]["temperature"]:
        words.append("sampled")
    if contract["cache"]["shared_prefix"] != "copy":
        words.append(f"prefix {contract['cache']['shared_prefix']}")
    if (recent := contract["cache"]["n_recent"]) != KVPolicyConfig().n_recent:
        words.append(f"n_recent {recent}")
    return ", ".join(words)


def quality(runs: Sequence[Run]) -> list[str]:
    """Every question that a method with a budget was asked."""
    lines: list[str] = []
    for first in {question(run): run for run in runs}.values():
        contract, found = first["contract"], cells(runs, first)
        if not bounded(found):
            continue
        task = contract["task"]
        # Texts stand in the contract.
        told = {key: value for key, value in task.items() if isinstance(value, int | float)}
        told = {**told, "items": contract["items"]["count"], "seed": contract["items"]["seed"]}
        shape = ", ".join(f"{key} {value}" for key, value in told.items())
        whole = contract["cache"]["shared_prefix"] == "copy"
        counted = "all of them" if whole else "a prompt in the prefix tree at the request's share"
        lines += [
            f"### {title(contract)}",
            "",
            f"{shape}, temperature {contract['decoding']['temperature']}; a request sees "
            f"{contract['context']} tokens, and the budget counts {counted}.",
            "",
        ]
        if "steps" in first["scores"]:
            lines += ["Exact answers, and steps before the first error:", ""]
            lines += grid(found, ("exact", "steps"), "{:.0%} / {:.1f}".format)
            lines += ["", "Steps, paired, with 95 % intervals:", ""]
            lines += against(found, "beacon", "steps", ratio=True)
        elif "likelihood" in first["scores"]:
            lines += ["Mean log-probability of a token, and perplexity:", ""]
            lines += grid(found, ("likelihood",), lambda x: f"{x:.4f} / {math.exp(-x):.2f}")
            lines += ["", "Paired differences, in nats per token:", ""]
            for ours in ("beacon", "beacon+recas"):
                if any(name == ours for name, _ in found):
                    lines += [*against(found, ours, "likelihood", ratio=False), ""]
        else:
            main = next(iter(first["scores"]))
            lines += [*grid(found, (main,), "{:.0%}".format), "", "Paired differences:", ""]
            lines += against(found, "beacon", main, ratio=False)
        lines += ["", *behaviour(found), commits(found.values()), ""]
    return lines


def behaviour(found: Mapping[tuple[str, int | None], Run]) -> list[str]:
    """Evictions per request, since a policy that is idle looks good."""
    seen = [
        (run["behaviour"]["evictions"], run["behaviour"]["evicted_tokens"])
        for (_, budget), run in found.items()
        if budget and run["behaviour"]
    ]
    if not seen:
        return []
    counts, tokens = zip(*seen, strict=True)
    cut = [run["truncated"] for run in found.values()]
    return [
        f"Evictions per request {min(counts):.1f} to {max(counts):.1f}, "
        f"evicted tokens {min(tokens):.0f} to {max(tokens):.0f}; "
        f"{min(cut):.0%} to {max(cut):.0%} of the answers were cut off."
    ]


def draw(found: Mapping[tuple[str, int | None], Run], path: Path) -> None:
    """Steps before the first error against the budget, by method."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    names = bounded(found)
    markers = "osD^vP*Xh<>pd8H"
    styles = {name: ("-", 2.2) if name in OURS else ("--", 1.0) for name in names}
    for index, name in enumerate(names):
        points = sorted(
            (b, fmean(found[name, b]["scores"]["steps"])) for n, b in found if n == name
        )
        line, width = styles[name]
        axes.plot(
            *zip(*points, strict=True),
            line,
            marker=markers[index % len(markers)],
            linewidth=width,
            markersize=5,
            label=name,
        )
    axes.set_xlabel("budget (tokens per request)")
    axes.set_ylabel("steps before the first error")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)
