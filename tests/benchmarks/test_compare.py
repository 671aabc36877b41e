"""Runs stand in one table only if nothing but the method differs."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compare, quality_tables
from benchmarks.bootstrap import mean_difference, mean_ratio, paired
from benchmarks.contract import Contract, ContractError, checkpoint_hash, require_same

CONTRACT = Contract(
    suite="revisit",
    task={"name": "revisit_chain", "n_keys": 16, "n_steps": 72},
    items={"count": 3, "seed": 0},
    checkpoint="ab" * 32,
    dtype="float32",
    context=576,
    memory_budget=128,
    cache={"shared_prefix": "copy", "n_recent": 16},
    flags=["--max-total-tokens", "80000"],
    decoding={"temperature": 0.0, "top_p": 1.0, "new_tokens": 537},
    hardware={"gpu": None, "cpu": "some", "cores": 2},
    versions={"python": "3.11.7", "torch": "2.14.1"},
    commit="1234567",
).as_dict()
CHANGES: dict[str, Any] = {
    "suite": "needle",
    "task": {**CONTRACT["task"], "n_steps": 200},
    "items": {"count": 3, "seed": 1},
    "checkpoint": "cd" * 32,
    "dtype": "bfloat16",
    "context": 1400,
    "memory_budget": 96,
    "cache": {**CONTRACT["cache"], "n_recent": 4},
    "flags": [],
    "decoding": {**CONTRACT["decoding"], "temperature": 0.6},
    "hardware": {**CONTRACT["hardware"], "gpu": "one"},
    "versions": {**CONTRACT["versions"], "torch": "2.13.0"},
    "commit": "7654321",
}


def run(name: str, scores: list[float], **changed: Any) -> dict[str, Any]:
    return {
        "contract": {**CONTRACT, **changed},
        "method": {"name": name, "policy": name, "options": {}},
        "scores": {"exact": scores},
    }


def write(path: Path, *runs: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in runs))
    return path


def test_every_field_has_its_refusal() -> None:
    assert set(CHANGES) == {field.name for field in fields(Contract)}


@pytest.mark.parametrize("field", CHANGES)
def test_what_differs_is_named(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = run("beacon", [1, 1, 0]), run("h2o", [0, 1, 0], **{field: CHANGES[field]})
    assert compare.main([str(write(tmp_path / "runs.jsonl", *runs))]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"not comparable: {field} differs: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("field", CHANGES)
def test_what_is_missing_is_named(field: str) -> None:
    partial = {key: value for key, value in CONTRACT.items() if key != field}
    with pytest.raises(ContractError, match=f"does not say its {field}"):
        require_same(CONTRACT, partial)


def test_the_innermost_difference_is_shown() -> None:
    with pytest.raises(ContractError, match=r"versions differs: torch is '2.14.1' .* '2.13.0'"):
        require_same(CONTRACT, {**CONTRACT, "versions": CHANGES["versions"]})


def test_a_run_that_keeps_everything_is_the_reference() -> None:
    require_same(CONTRACT, {**CONTRACT, "memory_budget": None})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "runs.jsonl:1 is not a run"),
        ("[]", "runs.jsonl:1 is not a run"),
        (json.dumps({"contract": CONTRACT, "method": {}}), "scores"),
        (json.dumps(run("beacon", []) | {"scores": {}}), "scores"),
        ("", "no run matches"),
    ],
)
def test_what_is_no_run(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(line)
    assert compare.main([str(path)]) == 1
    assert message in capsys.readouterr().err


def test_an_unknown_score_and_unequal_items_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", run("beacon", [1, 0]), run("h2o", [0, 1]))
    assert compare.main([str(path), "--score", "speed"]) == 1
    with pytest.raises(ValueError, match="2 and 3 items"):
        paired([1, 0], [1, 0, 1], mean_difference)
    with pytest.raises(ValueError, match="0 and 0 items"):
        paired([], [], mean_difference)


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Best first; a later run of the same cell counts; what else the file has is left out."""
    other = {**CONTRACT["task"], "name": "other"}
    path = write(
        tmp_path / "runs.jsonl",
        run("h2o", [1, 1, 1]),
        run("none", [1, 1, 1], memory_budget=None),
        run("h2o", [0, 0, 0]),
        run("random", [1, 1, 1], items={"count": 3, "seed": 1}),
        run("random", [1, 1, 1], decoding={**CONTRACT["decoding"], "temperature": 0.6}),
        run("beacon", [1, 0, 1]),
        run("beacon", [0, 0, 0], memory_budget=96),
        run("beacon", [0, 0, 0], task=other),
    )
    chosen = ["--task", "revisit_chain", "--budget", "128", "--seed", "0", "--temperature", "0"]
    assert compare.main([str(path), *chosen]) == 0
    *rows, _, commits = capsys.readouterr().out.splitlines()[2:]
    assert commits == "Commit 1234567."
    assert [row.split(" | ")[0] for row in rows] == ["| none", "| beacon", "| h2o"]
    assert "| 0.6667 |" in rows[1]
    assert rows[2].endswith("| 0 | 1 [1, 1] |")


def test_rows_of_other_commits_are_let_in_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = run("h2o", [0, 1, 0], commit="7654321")
    path = str(write(tmp_path / "runs.jsonl", run("beacon", [1, 1, 0]), later))
    assert compare.main([path]) == 1
    assert "commit differs" in capsys.readouterr().err
    assert compare.main([path, "--any-commit"]) == 0
    assert capsys.readouterr().out.endswith("\nCommits 1234567 (beacon); 7654321 (h2o).\n")


def test_a_page_shows_each_suite_by_its_main_score() -> None:
    """Best first by the budgets that all methods have; differences are paired."""
    runs = [
        run(name, [])
        | {
            "contract": {**CONTRACT, "memory_budget": budget},
            "scores": {"accuracy": scores},
            "behaviour": {},
        }
        for name, budget, scores in (
            ("h2o", 128, [0.5, 0.5, 0.0]),
            ("h2o", 96, [0.0, 0.0, 0.0]),
            ("beacon", 128, [0.5, 0.25, 0.0]),
        )
    ]
    page = quality_tables.quality(runs)
    assert [line for line in page if line.startswith(("| h2o", "| **"))] == [
        "| h2o | 33% | 0% |",
        "| **beacon** | 25% |  |",
        "| h2o | -0.0833 [-0.25, 0] |",
    ]


def test_intervals_are_paired() -> None:
    """Items differ much more than methods do: only pairing shows the difference."""
    draw = np.random.default_rng(0)
    items = draw.normal(0, 10, 200)
    first, second = items + 1 + draw.normal(0, 0.5, 200), items
    difference = paired(first.tolist(), second.tolist(), mean_difference)
    assert 0.85 < difference.low < difference.value < difference.high < 1.15
    ratio = paired([4.0, 8.0, 6.0], [2.0, 4.0, 3.0], mean_ratio)
    assert ratio == (2.0, 2.0, 2.0)


def test_checkpoints_are_known_by_their_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weights"):
        checkpoint_hash(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    before = checkpoint_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_hash(tmp_path) == before
    (tmp_path / "a.safetensors").write_bytes(b"One")
    assert checkpoint_hash(tmp_path) != before
