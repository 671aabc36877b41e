"""Attention over lists of slots, against SDPA over what is listed."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.sparse_decode import sparse_decode

SLOTS = 700


def random_case(
    group: int, dim: int, counts: list[list[int]], dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Queries, pools with a NaN slot, lists with rubbish past their end, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(counts, dtype=torch.int32)
    batch, kv_heads = lengths.shape
    queries = torch.randn(batch, kv_heads * group, dim, generator=generator).to(dtype)
    pools = torch.randn(2, SLOTS, kv_heads, dim, generator=generator).to(dtype)
    pools[:, 0] = math.nan
    slots = torch.full((batch, kv_heads, max(map(max, counts)) + 3), -7, dtype=torch.int32)
    for request in range(batch):
        for head in range(kv_heads):
            count = counts[request][head]
            order = 1 + torch.randperm(SLOTS - 1, generator=generator)
            slots[request, head, :count] = order[:count]
    return queries, pools[0], pools[1], slots, lengths


def by_definition(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """One list after the other, in float64."""
    group = queries.shape[1] // slots.shape[1]
    output = torch.zeros(queries.shape, dtype=torch.float64)
    lse = torch.full(queries.shape[:2], -math.inf, dtype=torch.float64)
    weights = torch.zeros(slots.shape, dtype=torch.float64)
    for request, row in enumerate(counts.tolist()):
        for head, count in enumerate(row):
            listed = slots[request, head, :count].long()
            mine = slice(head * group, (head + 1) * group)
            logits = queries[request, mine].double() @ k_pool[listed, head].double().T * scale
            if count:
                output[request, mine] = logits.softmax(-1) @ v_pool[listed, head].double()
                lse[request, mine] = logits.logsumexp(-1)
                weights[request, head, :count] = logits.softmax(-1).amax(0)
    return output, lse, weights


@pytest.mark.parametrize("group", [1, 3, 4])
def test_equals_dense_attention_over_the_list(group: int) -> None:
    case = random_case(group, 16, [[5, 1], [9, 0]], torch.float32)
    found = sparse_decode(*case, 0.3)
    for ours, right in zip(found, by_definition(*case, 0.3), strict=True):
        torch.testing.assert_close(ours.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 24), (3, 128), (4, 64), (8, 128)])
def test_kernel(group: int, dim: int, dtype: torch.dtype) -> None:
    """Lists of odd lengths, whole tiles, many tiles, and none; at most twice as wrong as torch."""
    case = random_case(group, dim, [[1, 63], [64, 0], [65, 515]], dtype)
    exact = by_definition(*case, dim**-0.5)
    by_torch = sparse_decode(*case, dim**-0.5)
    launch = kernel("sparse_decode", "sparse_decode")
    found = poisoned(lambda: launch(*(x.to(DEVICE) for x in case), dim**-0.5))
    # Weights are rounded to the values' dtype before they are multiplied, as everywhere.
    ulp = torch.finfo(dtype).eps
    for ours, theirs, right in zip(found, by_torch, exact, strict=True):
        finite = right.isfinite()
        assert torch.equal(ours.cpu().isfinite(), finite)
        error = (ours.cpu().double() - right)[finite].abs().max()
        assert error <= 2 * (theirs.double() - right)[finite].abs().max() + 4 * ulp


def test_kernel_of_a_list_for_all_heads() -> None:
    """Expanded over the heads, and every other entry of a longer one."""
    queries, k, v, slots, _ = random_case(2, 32, [[80, 80], [80, 80]], torch.float32)
    shared = slots[:, :1, :80:2].expand(-1, 2, -1)
    counts = torch.tensor([40, 17])[:, None].expand(-1, 2)
    case = [x.to(DEVICE) for x in (queries, k, v)]
    lists = shared.to(DEVICE), counts.to(DEVICE)
    found = kernel("sparse_decode", "sparse_decode")(*case, *lists, 0.2)
    for ours, right in zip(found, sparse_decode(*case, *lists, 0.2), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
