"""Imports point one way, SGLang stays at the edge, and public names are explained."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_beacon

PACKAGE = Path(sglang_beacon.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
NAME = PACKAGE.name

# What each part may import of the package, besides itself.
BASE = {"core", "config", "capacity", "ops"}
ALLOWED = {
    "core": set(),
    "config": {"core"},
    "capacity": {"core"},
    "ops": {"core"},
    "policies": BASE,
    "runtime": BASE | {"policies"},
    "lab": BASE | {"policies", "runtime"},
    "srt": BASE | {"policies", "runtime"},
    "plugin": BASE | {"policies", "runtime", "srt"},
    "cli": BASE | {"policies", "runtime", "srt", "plugin", "lab"},
    "__main__": {"cli"},
    "__init__": set(),
}


def part_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def parse(module: Path) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


def imports(module: Path) -> Iterator[str]:
    """Names that a module imports, inside functions too."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_one_way(module: Path) -> None:
    part = part_of(module)
    for name in imports(module):
        top, *rest = name.split(".")
        if top == NAME and not rest[0].startswith("__"):
            assert rest[0] in ALLOWED[part] | {part}, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_sglang_is_imported_at_the_edge_alone(module: Path) -> None:
    if part_of(module) in ("srt", "plugin"):
        return
    names = [name for name in imports(module) if name.split(".")[0] == "sglang"]
    assert not names, f"{module} imports {names}"


KERNELS = [module for module in MODULES if module.stem.endswith("_triton")]


@pytest.mark.parametrize("module", KERNELS, ids=str)
def test_kernels_stand_beside_their_reference(module: Path) -> None:
    """The launcher has the reference's name and parameters, and a test that compares them."""
    reference = module.with_name(module.name.replace("_triton", ""))
    (launcher,) = (f for f in public_functions(module) if not f.decorator_list)
    (same,) = (f for f in public_functions(reference) if f.name == launcher.name)
    assert ast.dump(launcher.args) == ast.dump(same.args)
    test = Path(__file__).parent / "ops" / f"test_{reference.stem}.py"
    assert f'kernel("{reference.stem}", "{launcher.name}")' in test.read_text()


def public_functions(module: Path) -> list[ast.FunctionDef]:
    return [
        node
        for node in parse(module).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def imported_by(statement: str) -> set[str]:
    """Top-level packages loaded after a statement, in a process of its own."""
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_the_package_costs_nothing() -> None:
    statement = f"import {NAME}, {NAME}.config, {NAME}.capacity"
    assert not imported_by(statement) & {"sglang", "triton", "torch", "transformers", "numpy"}


def test_policies_run_without_sglang() -> None:
    statement = f"import {NAME}.policies, {NAME}.runtime.compactor, {NAME}.runtime.request"
    assert not imported_by(statement) & {"sglang", "transformers"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_public_names_are_explained(module: Path) -> None:
    """Modules, and the functions and classes at their top level."""
    tree = parse(module)
    assert ast.get_docstring(tree), f"{module} has no docstring"
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent, f"{module}: {silent}"
