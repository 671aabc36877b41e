"""Weights of listed keys are those that `sparse_decode` gives them."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.key_weights import key_weights
from sglang_beacon.ops.sparse_decode import sparse_decode

COUNTS = torch.tensor([[1, 255], [256, 0], [65, 513]], dtype=torch.int32)


def random_case(group: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, a pool with a NaN slot, and lists with rubbish past their end."""
    generator = torch.Generator().manual_seed(dim)
    queries = torch.randn(3, 2 * group, dim, generator=generator).to(dtype)
    pool = torch.randn(600, 2, dim, generator=generator).to(dtype)
    pool[0] = math.nan
    slots = torch.stack([1 + torch.randperm(599, generator=generator)[:520] for _ in range(6)])
    slots = slots.view(3, 2, 520).to(torch.int32)
    slots = torch.where(torch.arange(520) < COUNTS[..., None], slots, -9)
    return queries, pool, slots, COUNTS


@pytest.mark.parametrize("group", [1, 3])
def test_equals_sparse_decode(group: int) -> None:
    queries, pool, slots, counts = random_case(group, 16, torch.float32)
    weights, lse = key_weights(queries, pool, slots, counts, 0.3)
    expected = sparse_decode(queries, pool, pool, slots, counts, 0.3)
    torch.testing.assert_close(weights, expected.weights)
    torch.testing.assert_close(lse, expected.lse)
    # The largest of a group is at least its share of the sum.
    sums = weights.sum(-1)
    assert ((sums >= 1 - 1e-5) | (counts == 0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 24), (4, 128), (8, 64)])
def test_kernel(group: int, dim: int, dtype: torch.dtype) -> None:
    case = random_case(group, dim, dtype)
    launch = kernel("key_weights", "key_weights")
    found = poisoned(lambda: launch(*(x.to(DEVICE) for x in case), dim**-0.5))
    expected = key_weights(*case, dim**-0.5)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), right, atol=2e-6, rtol=2e-5)


def test_kernel_of_a_list_for_all_heads() -> None:
    queries, pool, slots, _ = random_case(2, 32, torch.float32)
    lists = slots[:, :1, :40:2].clamp(min=1).expand(-1, 2, -1)
    counts = torch.tensor([20, 7, 1])[:, None].expand(-1, 2)
    case = [x.to(DEVICE) for x in (queries, pool, lists, counts)]
    found = kernel("key_weights", "key_weights")(*case, 0.2)
    for ours, right in zip(found, key_weights(*case, 0.2), strict=True):
        torch.testing.assert_close(ours, right, atol=2e-6, rtol=2e-5)
