"""``sglang-beacon report``: a trace (`sglang_beacon.runtime.tracer`) as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/*TRACE*/null"
# Beyond these the page shows the end of the text, and every so manieth cell of a map.
MOST_WORDS, MOST_CELLS = 6000, 800


class ReportError(ValueError):
    """A file is no trace; says in one sentence what is wrong with it."""


def read(path: Path) -> Mapping[str, Any]:
    """Read a trace.

    Raises
    ------
    ReportError
        When it cannot be read or is something else.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        if trace["version"] != 1:
            raise ReportError(f"{path} is a trace of version {trace['version']}, not 1")
        for eviction in trace["evictions"]:
            if eviction["kept"].keys() != eviction["score"].keys():
                raise KeyError("kept")
        len(trace["tokens"]), trace["policy"]["policy"]
    except OSError as error:
        raise ReportError(f"cannot read {path} ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{path} is no trace of sglang-beacon") from error
    return trace


def summary(trace: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of a trace, of bounded size.

    Returns
    -------
    dict
        ``kept``: by eviction, the share of layers and heads that keep each token, in hundredths;
        ``score``: by eviction, the mean rank of each token's score, likewise, and -1 where it is
        gone; ``distance``: by eviction, how far each layer and head looks.
    """
    tokens, evictions = trace["tokens"], trace["evictions"]
    words = trace["words"] or [str(token) for token in tokens]
    begin = max(len(words) - MOST_WORDS, 0)
    length = len(tokens)
    step = max(1, -(-length // MOST_CELLS))
    kept = [shares(eviction["kept"], length) for eviction in evictions]
    return {
        "policy": trace["policy"],
        "prompt": trace["prompt"],
        "length": length,
        "seen": [eviction["seen"] for eviction in evictions],
        "held": [eviction["held"] for eviction in evictions],
        "inAll": trace["evictions_in_all"],
        "begin": begin,
        "words": list(words[begin:]),
        "kept": [row[begin:] for row in kept],
        "step": step,
        "map": [_binned(row, step) for row in kept],
        "score": [_binned(_ranks(eviction, length), step) for eviction in evictions],
        "distance": [eviction["distance"] for eviction in evictions],
    }


def page(trace: Mapping[str, Any]) -> str:
    """The page, with nothing outside it."""
    # A text may hold anything, the end of a script among it.
    data = json.dumps(summary(trace), separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)


def shares(kept: Mapping[str, Sequence[Sequence[int]]], length: int) -> list[int]:
    """How many hundredths of the layers and heads keep each position."""
    counts = [0] * length
    heads = [head for layer in kept.values() for head in layer]
    for head in heads:
        for position in head:
            counts[position] += 1
    return [round(100 * count / max(len(heads), 1)) for count in counts]


def _ranks(eviction: Mapping[str, Any], length: int) -> list[int]:
    """Mean rank of the score of the tokens that stayed, in hundredths."""
    sums, counts = [0.0] * length, [0] * length
    for layer, heads in eviction["score"].items():
        for places, scores in zip(eviction["kept"][layer], heads, strict=True):
            for place, score in zip(places, scores, strict=True):
                sums[place] += score
                counts[place] += 1
    return [round(100 * s / n) if n else -1 for s, n in zip(sums, counts, strict=True)]


def _binned(row: Sequence[int], step: int) -> list[int]:
    """The largest of every ``step`` values."""
    return [max(row[begin : begin + step]) for begin in range(0, len(row), step)]
