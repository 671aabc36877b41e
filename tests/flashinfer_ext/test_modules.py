"""Our variants become FlashInfer modules: sources everywhere, binaries with a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashinfer_ext import modules
from flashinfer_ext.modules import LOGITS_DECODE, MASKED_DECODE, Variant

# FlashInfer's functions that build a variant, and what they take besides ours.
BUILDERS = {
    MASKED_DECODE: ("gen_customize_batch_decode_module", ()),
    LOGITS_DECODE: ("gen_customize_batch_prefill_module", ("fa2",)),
}
PROGRAM = """
import sys, torch
from flashinfer.jit.attention import modules as jit
from flashinfer_ext import modules
variant = getattr(modules, sys.argv[1])
spec = getattr(jit, sys.argv[2])(*sys.argv[4:], *variant.jit_args(torch.bfloat16, 128))
print(*spec.sources, sep="\\n")
if sys.argv[3] == "build":
    spec.build(verbose=False)
    print(spec.jit_library_path)
"""


def run(variant: Variant, what: str, cache: Path, **env: str) -> list[str]:
    """Generate or build a variant in a process of its own; returns the files it names."""
    builder, more = BUILDERS[variant]
    name = "MASKED_DECODE" if variant is MASKED_DECODE else "LOGITS_DECODE"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, builder, what, *more],
        env={
            **os.environ,
            "FLASHINFER_WORKSPACE_BASE": str(cache),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [line for line in result.stdout.splitlines() if line.startswith("/")]


@pytest.mark.parametrize("variant", BUILDERS, ids=lambda variant: variant.struct)
def test_sources(variant: Variant, tmp_path: Path) -> None:
    """What FlashInfer generates contains the struct and passes each tensor and scalar on."""
    files = run(variant, "generate", tmp_path)
    text = "\n".join(path.read_text() for file in files for path in Path(file).parent.iterdir())
    assert f"struct {variant.struct} : AttentionVariantBase" in text
    for name, kind in variant.tensors:
        assert re.search(rf"{kind}\s*\*\s*{name}", text)
    for name, kind in variant.scalars:
        assert re.search(rf"{kind}\s+{name}", text)


def test_the_name_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources never share a module, nor two types or head sizes."""
    shutil.copytree(modules.SOURCES, tmp_path / "csrc")
    name = MASKED_DECODE.jit_args(torch.bfloat16, 128)[0]
    monkeypatch.setattr(modules, "SOURCES", tmp_path / "csrc")
    assert MASKED_DECODE.jit_args(torch.bfloat16, 128)[0] == name
    others = [
        MASKED_DECODE.jit_args(torch.float16, 128)[0],
        MASKED_DECODE.jit_args(torch.bfloat16, 64)[0],
        replace(MASKED_DECODE, scalars=()).jit_args(torch.bfloat16, 128)[0],
    ]
    source = tmp_path / "csrc" / MASKED_DECODE.source
    source.write_text(source.read_text() + "// changed\n")
    others.append(MASKED_DECODE.jit_args(torch.bfloat16, 128)[0])
    assert len({name, *others}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("variant", BUILDERS, ids=lambda variant: variant.struct)
def test_compiles_without_a_gpu(variant: Variant, tmp_path: Path) -> None:
    """nvcc and the linker, for sm_90a; the driver's library is a stub. Minutes for the second."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    root = toolkit(nvcc, tmp_path)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    gcc = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-"]
    subprocess.run([*gcc, "-o", stubs / "libcuda.so"], input="", text=True, check=True)
    *_, library = run(
        variant,
        "build",
        tmp_path,
        CUDA_HOME=str(root),
        FLASHINFER_EXTRA_LDFLAGS=f"-L{stubs}",
        MAX_JOBS="2",
    )
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    for function in ("plan", "run"):
        assert re.search(rf"T \S*{function}", symbols.stdout)


def toolkit(nvcc: str, directory: Path) -> Path:
    """The CUDA toolkit that a compiler, which may be a script, belongs to."""
    source = directory / "nothing.cu"
    source.touch()
    dry = [nvcc, "--dryrun", "-c", source]
    said = subprocess.run(dry, capture_output=True, text=True, check=False).stderr
    found = re.search(r"TOP=(\S+)", said)
    assert found, said
    return Path(found[1]).resolve()
