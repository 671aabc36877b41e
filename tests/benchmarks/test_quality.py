"""The quality benchmark on a real server, small: every step of it, to a table and a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare, quality, results_page
from benchmarks.suites.reasoning import beside_published


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    quality.main()


def test_revisit_chain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quality.jsonl"
    arguments = [
        "--suite", "revisit", "--tasks", "revisit_chain", "--items", "2", "--budgets", "96",
        "--methods", "none", "beacon", "streaming", "--threads", "1", "--out", str(out),
    ]  # fmt: skip
    run(monkeypatch, *arguments)
    whole, beacon, streaming = (json.loads(line) for line in out.read_text().splitlines())
    assert whole["scores"]["exact"] == [1.0, 1.0]
    assert whole["behaviour"]["evictions"] == 0
    assert beacon["behaviour"]["evictions"] > 10
    assert beacon["contract"]["memory_budget"] == 96
    assert max(streaming["scores"]["steps"]) < 72
    assert beacon["behaviour"]["held_at_end"] <= 97
    said = capsys.readouterr().out
    assert "96 of 576" in said
    assert "truncated 0%" in said

    # What is there is not run again.
    monkeypatch.setattr(quality, "Server", None)
    run(monkeypatch, *arguments)
    assert len(out.read_text().splitlines()) == 3

    assert compare.main([str(out), "--task", "revisit_chain", "--budget", "96"]) == 0
    assert "| none | 1 |" in capsys.readouterr().out

    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "results.md")
    results_page.main()
    page = (tmp_path / "results.md").read_text()
    assert "| everything kept | 100% / 72.0 |" in page
    assert "| **beacon** |" in page
    assert (tmp_path / "revisit_chain.png").exists()


def test_published_numbers_stand_beside_ours() -> None:
    table = beside_published("Qwen/Qwen3-4B", "aime24", 2048, {"none": 0.7, "beacon": 0.66})
    rows = [line.split() for line in table.splitlines()[2:]]
    assert rows == [["none", "70.0", "-"], ["beacon", "66.0", "64.6"], ["rpc", "-", "51.3"]]


def test_reasoning_needs_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--suite", "reasoning")
    assert "needs a --model" in capsys.readouterr().err
