"""Every kernel compiles for GPUs that are not there, and keeps within what they have."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang_beacon import ops


def kernels() -> set[str]:
    """The Triton functions of the package that no other one calls."""
    jitted = [node for path in sources() for node in functions(path)]
    called = {
        node.func.id
        for function in jitted
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return {function.name for function in jitted} - called


def sources() -> Iterator[Path]:
    return Path(ops.__file__).parent.glob("*_triton.py")


def functions(source: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            yield node


def test_every_kernel_compiles() -> None:
    """In a process of its own: this one may have the interpreter instead of the compiler."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.aot"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert {row[0] for row in rows} == {name.strip("_") for name in kernels()}
    assert {row[1] for row in rows} == {"80", "90", "100"}
