"""The study of RECAS's mechanism, on traces short enough to be run at every commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_quick_study() -> None:
    """All methods at the same memory: what RECAS is for shows at this size already."""
    command = [sys.executable, "-m", "benchmarks.recas_mechanism", "--quick", "--jobs", "1"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    lines = result.stdout.splitlines()
    assert "seeds 0 to 31" in lines[0]
    rows = {line[:24].strip(): [shares(cell) for cell in line[24:].split()] for line in lines[2:13]}
    columns = ("removed", "mass", "recall", "skipped", "error", "cosine")
    table = {method: dict(zip(columns, row, strict=True)) for method, row in rows.items()}
    assert len(table) == 11
    recas = table["RECAS"]
    assert table["full"]["recall"] == 1
    assert table["full"]["error"] == 0
    assert all(row["removed"] > 0.655 for method, row in table.items() if method != "full")
    assert recas["recall"] > table["RECAS without evidence"]["recall"] + 0.03
    assert recas["recall"] > table["SnapKV"]["recall"] + 0.3
    assert recas["mass"] > 0.986
    assert recas["skipped"] > 0.707
    others = [row["mass"] for method, row in table.items() if method not in ("full", "clairvoyant")]
    assert table["clairvoyant"]["mass"] > max(others)
    assert recas["error"] < 0.014
    assert lines[13].startswith("decode attention of a layer, RECAS:")


def shares(cell: str) -> float:
    return float(cell.rstrip("%")) / (100 if cell.endswith("%") else 1)
