"""Compaction against a version that copies everything before it writes anything."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, kernel

from sglang_beacon.ops import kv_compact

Pools = tuple[torch.Tensor, torch.Tensor]


def copied_first(
    pool: torch.Tensor, source: list[int], keep: list[list[int]], destination: list[int]
) -> torch.Tensor:
    before = pool.clone()
    after = pool.clone()
    for head, kept in enumerate(keep):
        for place, index in zip(destination, kept, strict=True):
            after[place, head] = before[source[index], head]
    return after


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, NaN included."""
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.view(torch.uint8))


def random_pools(num_slots: int, num_heads: int, dim: int, used: list[int]) -> Pools:
    """Pools with NaN in every slot that the request does not use."""
    generator = torch.Generator().manual_seed(num_slots)
    pools = torch.full((2, num_slots, num_heads, dim), math.nan)
    pools[:, used] = torch.randn(2, len(used), num_heads, dim, generator=generator)
    return pools[0], pools[1]


def check(pools: Pools, source: list[int], keep: list[list[int]], destination: list[int]) -> None:
    expected = [copied_first(pool, source, keep, destination) for pool in pools]
    k, v = pools
    slots = torch.tensor(source), torch.tensor([keep]), torch.tensor(destination)
    kv_compact([k], [v], *slots)
    for pool, right in zip(pools, expected, strict=True):
        assert_same_bits(pool, right)
        assert not pool[destination].isnan().any()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_heads=st.integers(1, 4), held=st.integers(1, 24))
def test_any_overlap(data: st.DataObject, num_heads: int, held: int) -> None:
    """Source slots in any order, destinations among them or not, each head its own choice."""
    num_slots = 32
    slots = data.draw(st.permutations(range(num_slots)))
    source = slots[:held]
    kept = data.draw(st.integers(1, held))
    destination = data.draw(st.permutations(slots))[:kept]
    choice = st.permutations(range(held)).map(lambda order: sorted(order[:kept]))
    keep = [data.draw(choice) for _ in range(num_heads)]
    check(random_pools(num_slots, num_heads, 3, source), source, keep, destination)


@pytest.mark.parametrize("pinned", [0, 5])
def test_an_eviction(pinned: int) -> None:
    """As at run time: the destinations are the first private slots, and sources too."""
    generator = torch.Generator().manual_seed(7)
    source = torch.randperm(64, generator=generator)[:40].tolist()
    keep = [
        sorted((pinned + torch.randperm(40 - pinned, generator=generator)[:20]).tolist())
        for _ in range(3)
    ]
    destination = source[pinned : pinned + 20]
    pools = random_pools(64, 3, 8, source)
    before = [pool.clone() for pool in pools]
    check(pools, source, keep, destination)
    others = [slot for slot in range(64) if slot not in destination]
    for pool, old in zip(pools, before, strict=True):
        assert_same_bits(pool[others], old[others])


def test_keeping_everything_changes_nothing() -> None:
    source = [9, 3, 4, 0, 7]
    pools = random_pools(12, 2, 4, source)
    before = [pool.clone() for pool in pools]
    check(pools, source, [list(range(5))] * 2, source)
    for pool, old in zip(pools, before, strict=True):
        assert_same_bits(pool, old)


def interleaved(pools: Pools) -> Pools:
    """Keys and values of a slot side by side, in a tensor larger than both."""
    k, v = pools
    both = torch.full((k.shape[0], k.shape[1], 2 * k.shape[2] + 3), math.nan)
    dim = k.shape[2]
    both[..., :dim], both[..., dim : 2 * dim] = k, v
    return both[..., :dim], both[..., dim : 2 * dim]


def one_layer_of_many(pools: Pools) -> Pools:
    k, v = pools
    everything = torch.full((2, *k.shape[:1], 5, *k.shape[1:]), math.nan)
    everything[0, :, 3], everything[1, :, 3] = k, v
    return everything[0, :, 3], everything[1, :, 3]


def heads_first(pools: Pools) -> Pools:
    k, v = (pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in pools)
    return k, v


@pytest.mark.parametrize("layout", [interleaved, one_layer_of_many, heads_first])
def test_strided_pools(layout: object) -> None:
    """A view of a larger tensor is modified in place, and nothing around it."""
    source = [11, 2, 3, 8, 5, 6, 0]
    keep = [[0, 2, 4, 6], [1, 3, 5, 6]]
    pools = layout(random_pools(13, 2, 4, source))  # type: ignore[operator]
    assert not pools[0].is_contiguous()
    storage = torch.empty(0).set_(pools[0].untyped_storage())
    nan_before = int(storage.isnan().sum())
    check(pools, source, keep, source[:4])
    assert int(storage.isnan().sum()) == nan_before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_move_bit_for_bit(dtype: torch.dtype) -> None:
    source = [4, 1, 6, 2, 7]
    k, v = random_pools(9, 3, 8, source)
    check((k.to(dtype), v.to(dtype)), source, [[0, 4], [1, 2], [3, 4]], source[:2])


# The kernel.


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("held", "pinned", "kept", "dim"),
    [(5, 0, 1, 8), (40, 5, 31, 16), (129, 16, 96, 64), (70, 0, 70, 24)],
)
def test_kernel(
    held: int, pinned: int, kept: int, dim: int, dtype: torch.dtype, forward: bool
) -> None:
    """Three layers in one tensor; forwards as an eviction moves, or to slots in any order."""
    layers, heads, num_slots = 3, 2, 160
    generator = torch.Generator().manual_seed(held)
    slots = torch.randperm(num_slots, generator=generator)
    source = slots[:held]
    storage = torch.full((2, layers, num_slots, heads, dim), math.nan).to(dtype)
    storage[:, :, source] = torch.randn(2, layers, held, heads, dim, generator=generator).to(dtype)
    first = pinned if forward else 0
    keep = torch.stack(
        [
            (first + torch.randperm(held - first, generator=generator)[:kept]).sort().values
            for _ in range(layers * heads)
        ]
    ).view(layers, heads, kept)
    order = torch.randperm(num_slots, generator=generator)
    destination = source[first : first + kept] if forward else slots[order[:kept]]
    expected = storage.clone()
    kv_compact(list(expected[0]), list(expected[1]), source, keep, destination, forward)
    moved = storage.to(DEVICE)
    launch = kernel("kv_compact", "kv_compact")
    places = [x.to(DEVICE) for x in (source, keep, destination)]
    launch(list(moved[0]), list(moved[1]), *places, forward)
    assert_same_bits(moved.cpu(), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter alone can choose the order")
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_kernel_in_any_order(forward: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs run one by one in random order: no two of them touch the same vector."""
    from triton.runtime.interpreter import interpreter_builder as interpreter

    orders: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    run_program = interpreter.set_grid_idx

    def run_another(*index: int) -> None:
        grid = tuple(interpreter.grid_dim)
        programs = list(itertools.product(*map(range, grid)))
        if grid not in orders:
            orders[grid] = random.Random(seed).sample(programs, len(programs))
        run_program(*orders[grid][programs.index(index)])

    monkeypatch.setattr(interpreter, "set_grid_idx", run_another)
    test_kernel(129, 16, 96, 16, torch.float32, forward)
    assert orders
