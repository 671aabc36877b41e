"""Every notebook runs from a clean kernel, and what is committed shows that it did."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
# A cell's; one that starts a server takes most.
LIMIT_S = 180
MOST_BYTES = 1_000_000


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread a process: kernel and server share two cores with another test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(TUTORIALS)}}
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=place).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path: Path) -> None:
    """Cells ran in order, none failed or complained, and no place of any machine shows."""
    assert path.stat().st_size <= MOST_BYTES
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(place in json.dumps(notebook) for place in ("/root", "/home", str(Path.home())))


def test_all_eight_are_there() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{n:02d}" for n in range(1, 9)]
