"""The quality benchmark on a real server, small: every step of it, to a table and a page."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import compare, quality, results_page
from benchmarks.suites.reasoning import beside_published
from sglang_beacon.lab import demo_model


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


def test_texts_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Needles and perplexity: what is forced is said, and measured under eviction."""
    out = tmp_path / "quality.jsonl"
    same = ["--items", "1", "--threads", "1", "--out", str(out)]
    methods = ["--budgets", "96", "--methods", "none", "streaming"]
    run(monkeypatch, "--suite", "needle", "--tasks", "needle_prompt_512", *methods, *same)
    run(monkeypatch, "--suite", "perplexity", *methods, *same)
    needle, lost, text, worse = (json.loads(line) for line in out.read_text().splitlines())
    assert len(needle["scores"]["exact"]) == len(needle["contract"]["task"]["depths"])
    assert needle["behaviour"]["evictions"] == 0
    # A window of 96 tokens has nothing of the prompt's first half.
    assert lost["scores"]["exact"][:3] == [0.0, 0.0, 0.0]
    assert sum(needle["scores"]["exact"]) > sum(lost["scores"]["exact"])
    assert lost["behaviour"]["held_at_end"] <= 97
    # All but the last token are read.
    assert text["behaviour"]["logical_tokens"] == 639
    assert -4 < worse["scores"]["likelihood"][0] < text["scores"]["likelihood"][0] < -2


@pytest.mark.skipif(shutil.which("sgl-eval") is None, reason="needs sgl-eval")
def test_reasoning_benchmarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step but the download: two questions from a file, one server per method."""
    questions, out = tmp_path / "questions.jsonl", tmp_path / "quality.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"problem": f"What is {n} + 1?", "expected_answer": str(n + 1)}) + "\n"
            for n in (1, 2)
        )
    )
    run(
        monkeypatch,
        "--suite", "reasoning", "--model", str(demo_model.ensure()), "--math500", str(questions),
        "--tasks", "math500", "--items", "2", "--new-tokens", "150", "--budgets", "64",
        "--methods", "none", "beacon", "--threads", "1", "--out", str(out),
    )  # fmt: skip
    whole, beacon = (json.loads(line) for line in out.read_text().splitlines())
    for record in (whole, beacon):
        assert len(record["scores"]["accuracy"]) == 2
        assert all(0 <= each <= 1 for each in record["scores"]["accuracy"])
        assert record["contract"]["decoding"]["top_p"] == 0.95
    assert whole["behaviour"]["evictions"] == 0
    assert beacon["behaviour"]["evictions"] > 1
    assert "published" in capsys.readouterr().out


def test_published_numbers_stand_beside_ours() -> None:
    table = beside_published("Qwen/Qwen3-4B", "aime24", 2048, {"none": 0.7, "beacon": 0.66})
    rows = [line.split() for line in table.splitlines()[2:]]
    assert rows == [["none", "70.0", "-"], ["beacon", "66.0", "64.6"], ["rpc", "-", "51.3"]]


def test_fewer_recent_queries_leave_room_for_beacons() -> None:
    for name, expected in (("beacon", 28), ("beacon+recas", 28), ("initial_recent", 28)):
        assert quality.observing(quality.METHODS[name], 4).options["n_beacon"] == expected
    for name, n_recent in (("beacon", 16), ("h2o", 4), ("none", 4)):
        assert quality.observing(quality.METHODS[name], n_recent) is quality.METHODS[name]


def test_reasoning_needs_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--suite", "reasoning")
    assert "needs a --model" in capsys.readouterr().err
