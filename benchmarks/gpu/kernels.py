"""How near each kernel comes to the time that its bytes alone would take.

    python -m benchmarks.gpu.kernels            # on a GPU
    python -m benchmarks.gpu.kernels --dry-run  # every call once, small, on the CPU; no numbers

Shapes are those of a Qwen3-4B: 36 layers, 32 query and 8 KV heads, head size 128, bfloat16. The
floor is the bytes that have to be moved, at the bandwidth of a plain copy measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from benchmarks.conditions import store
from sglang_beacon import ops
from sglang_beacon.ops import RopeTable


class Shape(NamedTuple):
    """Sizes of what is measured."""

    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    budget: int = 2048
    batch: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def vectors(self, *lead: int) -> torch.Tensor:
        """Random vectors [*lead, dim]."""
        return torch.randn(*lead, self.dim, dtype=self.dtype, device=self.device)


SMALL = Shape(2, 4, 2, 16, 64, 3, torch.float32, "cpu")


class Case(NamedTuple):
    """A call, and the bytes that it has to move."""

    name: str
    call: Callable[[], Any]
    num_bytes: float


def cases(shape: Shape) -> Iterator[Case]:
    """One call of each operation, as a serving step makes it."""
    layers, heads, kv_heads, dim, budget, batch, dtype, device = shape
    vector = dim * dtype.itemsize
    step = shape.vectors(layers, batch, heads)
    table = RopeTable(torch.randn(40_960, dim, device=device), neox=True)
    positions = torch.arange(batch, device=device)
    buffers = [shape.vectors(layers, heads, 32) for _ in range(batch)]
    yield Case(
        f"query_append, batch {batch}",
        lambda: ops.query_append(step, positions, table, buffers, [0] * batch),
        2 * layers * batch * heads * vector,
    )
    buffer = buffers[0]
    yield Case(
        "query_fold",
        lambda: ops.query_fold(buffer, 32, 16),
        layers * heads * (32 + 16) * vector,
    )

    pools = shape.vectors(2, layers, 2 * budget, kv_heads)
    keys, values = list(pools[0]), list(pools[1])
    slots = torch.randperm(2 * budget, device=device)[:budget]
    queries = torch.randn(layers, heads, 32, dim, device=device)
    visible = torch.full((32,), budget, device=device)
    kept = budget * 7 // 8
    scores = torch.rand(layers, kv_heads, budget, device=device)
    rows = layers * kv_heads
    yield Case(
        "beacon_score",
        lambda: ops.beacon_score(keys, slots, queries, visible, dim**-0.5),
        rows * budget * (vector + 4),
    )
    yield Case("select_topk", lambda: ops.select_topk(scores, kept), rows * (budget * 4 + kept * 8))
    keep = ops.select_topk(scores, kept)
    yield Case(
        "kv_compact",
        lambda: ops.kv_compact(keys, values, slots, keep, slots[:kept], forward=True),
        4 * rows * kept * vector,
    )
    yield from attention(shape)


def attention(shape: Shape) -> Iterator[Case]:
    """One layer's attention over all of a budget, over a part of it, and SGLang's own."""
    _, heads, kv_heads, dim, budget, batch, dtype, device = shape
    k, v = shape.vectors(2, batch * budget, kv_heads)
    queries = shape.vectors(batch, heads)
    slots = torch.randperm(batch * budget, device=device, dtype=torch.int32)
    dense = slots.view(batch, 1, budget).expand(-1, kv_heads, -1)
    vector = 2 * dim * dtype.itemsize
    for share in (1.0, 0.293):
        listed = int(budget * share)
        lists = dense[..., :listed].contiguous() if share < 1 else dense
        counts = torch.full((batch, kv_heads), listed, dtype=torch.int32, device=device)
        yield Case(
            f"sparse_decode, {share:.1%} of {batch} x {budget}",
            lambda lists=lists, counts=counts: ops.sparse_decode(
                queries, k, v, lists, counts, dim**-0.5
            ),
            batch * kv_heads * listed * vector,
        )
    yield from selection(shape, queries, k, dense)
    if device == "cuda" and find_spec("flashinfer"):
        yield from flashinfer(queries, k, v, dense, int(budget * 0.293))
    if device == "cuda" and find_spec("sglang"):
        yield Case(
            f"SGLang's decode, {batch} x {budget}",
            sglang_decode(queries, k, v, slots, batch, budget),
            batch * kv_heads * budget * vector,
        )


def flashinfer(
    queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: torch.Tensor, listed: int
) -> Iterator[Case]:
    """FlashInfer over all slots, and our lists for each head through it."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    from flashinfer_ext.per_head_decode import PerHeadSparseDecode
    from flashinfer_ext.per_head_decode import Shape as ListShape

    (batch, heads, dim), kv_heads, budget = queries.shape, k.shape[1], dense.shape[2]
    vector = 2 * dim * k.dtype.itemsize
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=k.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    ends = torch.arange(0, (batch + 1) * budget, budget, dtype=torch.int32)
    pages = dense[:, 0].flatten().to(torch.int32)
    full = torch.ones(batch, dtype=torch.int32)
    types = {"q_data_type": k.dtype, "kv_data_type": k.dtype}
    wrapper.plan(ends, pages, full, heads, kv_heads, dim, 1, **types)
    cache = k[:, None], v[:, None]
    yield Case(
        f"FlashInfer, {batch} x {budget}",
        lambda: wrapper.run(queries, cache),
        batch * kv_heads * budget * vector,
    )
    shape = ListShape(batch, heads, kv_heads, dim, listed)
    decode = PerHeadSparseDecode(shape, k.dtype, torch.empty_like(workspace))
    lists = dense[..., :listed].contiguous()
    counts = torch.full((batch, kv_heads), listed, dtype=torch.int32, device=k.device)
    yield Case(
        f"PerHeadSparseDecode, {listed} of {batch} x {budget}",
        lambda: decode.run(queries, k, v, lists, counts, dim**-0.5),
        batch * kv_heads * listed * vector,
    )


def selection(
    shape: Shape, queries: torch.Tensor, k: torch.Tensor, dense: torch.Tensor
) -> Iterator[Case]:
    """One layer's three ways to say which tokens a step should attend to."""
    _, _, kv_heads, dim, budget, batch, dtype, device = shape
    rank, scale, tokens = 32, dim**-0.5, batch * kv_heads * budget
    lengths = torch.full((batch,), budget, device=device)
    counts = lengths[:, None].expand(-1, kv_heads)
    yield Case(
        f"key_weights, {batch} x {budget}",
        lambda: ops.key_weights(queries, k, dense, counts, scale),
        tokens * (dim * dtype.itemsize + 4),
    )
    low, high = ops.page_extrema(k, dense[:, 0], lengths, 16)
    yield Case(
        f"page_extrema, {batch} x {budget}",
        lambda: ops.page_extrema(k, dense[:, 0], lengths, 16),
        tokens * dim * dtype.itemsize,
    )
    pages = lengths // 16
    yield Case(
        f"page_bounds, {batch} x {budget}",
        lambda: ops.page_bounds(queries, low, high, pages, scale),
        tokens // 16 * 2 * dim * 4,
    )
    basis = torch.linalg.qr(torch.randn(kv_heads, dim, dim, device=device)).Q[..., :rank]
    codes, scales = ops.key_sketch(k, basis.contiguous())
    projected = torch.randn(*queries.shape[:2], codes.shape[2], device=device)
    yield Case(
        f"sketch_logits, {batch} x {budget}",
        lambda: ops.sketch_logits(projected, codes, scales, dense[:, 0], lengths, scale),
        tokens * (codes.shape[2] + 8),
    )
    newest = k[:batch]
    yield Case(
        f"key_sketch, {batch} keys",
        lambda: ops.key_sketch(newest, basis),
        batch * kv_heads * dim * dtype.itemsize,
    )


def sglang_decode(
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    batch: int,
    length: int,
) -> Callable[[], None]:
    """SGLang's Triton decode kernel over the same slots, with as many splits as it may choose."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    splits, heads, dim = 8, queries.shape[1], queries.shape[2]
    device = queries.device
    output = torch.empty_like(queries)
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    partial = torch.empty(batch, heads, splits, dim, device=device)
    sums = torch.empty(batch, heads, splits, device=device)
    counts = torch.full((batch,), splits, dtype=torch.int32, device=device)
    return lambda: decode_attention_fwd(
        queries, k, v, output, ends, slots, partial, sums, counts, splits, dim**-0.5, 1.0, 1.0
    )


def copy_bandwidth() -> float:
    """Bytes per second that a plain copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def seconds(call: Callable[[], Any]) -> float:
    """Median time of a call, its caches cold."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(call, warmup=20, rep=100, return_mode="median")
    return milliseconds / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, no numbers")
    args = parser.parse_args()
    if args.dry_run:
        for case in cases(SMALL):
            case.call()
            print(f"{case.name:<44} ran")
        return
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    table = {}
    for case in cases(Shape()):
        taken, floor = seconds(case.call), case.num_bytes / bandwidth
        print(
            f"{case.name:<44} {taken * 1e6:9.1f} us  floor {floor * 1e6:9.1f}  {floor / taken:.0%}"
        )
        table[case.name] = {"us": taken * 1e6, "floor_us": floor * 1e6}
    store("gpu_kernels", {"copy_tb_per_s": bandwidth / 1e12, "kernels": table})


if __name__ == "__main__":
    main()
