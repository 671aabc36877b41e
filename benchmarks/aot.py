"""Compiles every kernel for GPUs that need not be there, and prints what it takes of them.

    python -m benchmarks.aot

What is compiled is what the launchers launch, at the shapes of a Qwen3-4B in bfloat16 with a
budget of 2,048: a launch is recorded instead of run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from sglang_beacon.ops import RopeTable

# Shared memory that a program may have, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MMA = ("tcgen05.mma", "wgmma", "mma.sync")
LAYERS, HEADS, KV_HEADS, DIM, BUDGET = 2, 32, 8, 128, 2048


class Launch(NamedTuple):
    """One launch of a kernel: its arguments by name, and its options."""

    kernel: triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


class Compiled(NamedTuple):
    """What a kernel takes on one architecture; bytes but for registers and seconds."""

    kernel: str
    arch: int
    registers: int
    local: int
    shared: int
    mma: str
    seconds: float


def launches() -> list[Callable[[], Any]]:
    """Calls that between them launch every kernel."""
    from sglang_beacon.ops import beacon_score_triton as beacon_score
    from sglang_beacon.ops import fps_triton as fps
    from sglang_beacon.ops import key_sketch_triton as key_sketch
    from sglang_beacon.ops import key_weights_triton as key_weights
    from sglang_beacon.ops import kv_compact_triton as kv_compact
    from sglang_beacon.ops import page_bounds_triton as page_bounds
    from sglang_beacon.ops import page_extrema_triton as page_extrema
    from sglang_beacon.ops import query_append_triton as query_append
    from sglang_beacon.ops import query_fold_triton as query_fold
    from sglang_beacon.ops import select_topk_triton as select_topk
    from sglang_beacon.ops import sketch_logits_triton as sketch_logits
    from sglang_beacon.ops import sparse_decode_triton as sparse_decode

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    pools = list(half(LAYERS, BUDGET, KV_HEADS, DIM))
    slots = torch.arange(BUDGET)
    kept = BUDGET * 7 // 8
    keep = torch.arange(kept).expand(LAYERS, KV_HEADS, kept)
    queries = torch.empty(LAYERS, HEADS, 32, DIM)
    visible = torch.full((32,), BUDGET)
    table = RopeTable(torch.empty(4096, DIM), neox=True)
    buffer = half(LAYERS, HEADS, 32, DIM)
    step = half(LAYERS, 4, HEADS, DIM)
    scores = torch.empty(LAYERS, KV_HEADS, BUDGET)
    lists = torch.zeros(4, KV_HEADS, 640, dtype=torch.int32)
    counts = lists[..., 0].contiguous()
    extrema = torch.empty(4, KV_HEADS, 40, DIM)
    subspace = torch.empty(KV_HEADS, DIM, 32)
    codes = torch.empty(BUDGET, KV_HEADS, 32, dtype=torch.int8)
    move = (pools, pools, slots, keep, slots[:kept])
    return [
        lambda: query_append.query_append(step, slots[:4], table, [buffer] * 4, [0, 1, 2, 3]),
        lambda: query_fold.query_fold(buffer, 32, 16, 4),
        lambda: fps.farthest_point_sample(buffer, 16),
        lambda: beacon_score.beacon_score(pools, slots, queries, visible, 0.1),
        lambda: select_topk.select_topk(scores, kept),
        lambda: kv_compact.kv_compact(*move, forward=True),
        lambda: kv_compact.kv_compact(*move),
        lambda: key_weights.key_weights(step[0], pools[0], lists, counts, 0.1),
        lambda: page_extrema.page_extrema(pools[0], lists[:, 0], counts[:, 0], 16),
        lambda: page_bounds.page_bounds(step[0], extrema, extrema, counts[:, 0], 0.1),
        lambda: key_sketch.key_sketch(pools[0], subspace),
        lambda: sketch_logits.sketch_logits(
            step[0, ..., :32], codes, scores[0].T, lists[:, 0], counts[:, 0], 0.1
        ),
        lambda: sparse_decode.sparse_decode(step[0], pools[0], pools[1], lists, counts, 0.1),
    ]


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    recorded: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = kernel.arg_names
        arguments = dict(zip(names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in names}
        options = {name: value for name, value in kwargs.items() if name not in names}
        recorded.append(Launch(kernel, arguments, options))

    run, triton.JITFunction.run = triton.JITFunction.run, record
    try:
        yield recorded
    finally:
        triton.JITFunction.run = run


def compile_for(launch: Launch, arch: int) -> Compiled:
    """Compile one launch as Triton would at run time, for one architecture."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    begin = time.perf_counter()
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=launch.options,
    )
    seconds = time.perf_counter() - begin
    usage = resource_usage(compiled.asm["cubin"])
    return Compiled(
        kernel=launch.kernel.__name__.strip("_"),
        arch=arch,
        registers=usage["REG"],
        local=usage["STACK"] + usage["LOCAL"],
        shared=compiled.metadata.shared,
        mma=next((name for name in MMA if name in compiled.asm["ptx"]), "-"),
        seconds=seconds,
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory of the one kernel of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main() -> None:
    with recording() as recorded:
        for call in launches():
            call()
    table = [compile_for(launch, arch) for launch in recorded for arch in SHARED_LIMIT]
    print(f"{'kernel':<14} {'arch':>5} {'registers':>9} {'local':>6} {'shared':>7}  mma")
    for row in table:
        print(
            f"{row.kernel:<14} {row.arch:>5} {row.registers:>9} {row.local:>6} {row.shared:>7}  "
            f"{row.mma}"
        )
    too_much = [row for row in table if row.local or row.shared > SHARED_LIMIT[row.arch]]
    if too_much:
        raise SystemExit(f"these take local memory, or more than there is: {too_much}")


if __name__ == "__main__":
    main()
