"""The page of a trace: right, self-contained, bounded; and files that are none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_beacon.cli import main
from sglang_beacon.lab import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def trace(tokens: int, evictions: int, words: list[str] | None = None) -> dict[str, Any]:
    """Two layers of two heads that keep every second and every third token."""
    found = []
    for number in range(1, evictions + 1):
        seen = number * tokens // evictions
        heads = [list(range(0, seen, 2)), list(range(0, seen, 3))]
        scores = [[0.5] * len(head) for head in heads]
        found.append(
            {
                "seen": seen,
                "held": seen,
                "kept": {"0": heads, "3": heads},
                "score": {"0": scores, "3": scores},
                "distance": [[1.0, 2.0], [3.0, 40.0]],
            }
        )
    return {
        "version": 1,
        "policy": {"policy": "beacon", "held_tokens": 3},
        "prompt": 2,
        "tokens": list(range(tokens)),
        "words": words,
        "evictions": found,
        "evictions_in_all": evictions,
    }


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_is_shown() -> None:
    shown = report.summary(trace(12, 2))
    assert shown["kept"][1] == [100, 0, 50, 50, 50, 0, 100, 0, 50, 50, 50, 0]
    assert shown["kept"][0] == [100, 0, 50, 50, 50, 0, 0, 0, 0, 0, 0, 0]
    assert shown["score"][1] == [50, -1, 50, 50, 50, -1, 50, -1, 50, 50, 50, -1]
    assert (shown["seen"], shown["words"][:2], shown["step"]) == ([6, 12], ["0", "1"], 1)


def test_a_page_holds_all_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["</script><script>alert(1)</script>", *"bcdefghijkl"]
    path = write(tmp_path / "request.json", trace(12, 2, words))
    assert main(["report", str(path)]) == 0
    out = Path(capsys.readouterr().out.strip())
    page = out.read_text()
    assert out == tmp_path / "request.html"
    assert page.count("</script>") == 1
    assert not re.findall(r"(?:src|href)=|https?://|@import|fetch\(", page)
    data = json.loads(re.search(r"const trace = (.*);", page)[1])
    assert data["words"] == words


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """The slider stands at the last eviction, and the text is there, each token marked."""
    page = tmp_path / "page.html"
    page.write_text(report.page(trace(12, 2, [f" word{n}" for n in range(12)])))
    drawn = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    body = drawn[drawn.index("<body") :]
    assert ">2 of 2, after 12 tokens, 12 held<" in body
    assert all(f"word{n}</" in body for n in range(12))


def test_a_huge_trace_makes_a_small_page() -> None:
    page = report.page(trace(60_000, 24))
    assert len(page) < 3_000_000
    shown = report.summary(trace(60_000, 24))
    assert len(shown["words"]) == report.MOST_WORDS
    assert shown["begin"] == 54_000
    assert len(shown["map"][0]) <= report.MOST_CELLS


def test_a_request_that_was_never_evicted_from() -> None:
    shown = report.summary({**trace(5, 1), "evictions": []})
    assert (shown["kept"], shown["map"], shown["words"]) == ([], [], ["0", "1", "2", "3", "4"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "is no trace"),
        ("[1]", "is no trace"),
        ({"version": 1}, "is no trace"),
        ({**trace(4, 1), "version": 2}, "version 2, not 1"),
        ({**trace(4, 1), "evictions": [{"kept": {"0": []}, "score": {}}]}, "is no trace"),
    ],
)
def test_what_is_no_trace(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        write(path, content)
    assert main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
