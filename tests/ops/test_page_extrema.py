"""No key of a page lies outside its bounds, and each bound is some key's."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.page_extrema import page_extrema

COUNTS = (37, 16, 0, 48)


def random_case(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(dim)
    pool = torch.randn(80, 2, dim, generator=generator).to(dtype)
    pool[0] = math.nan
    slots = torch.stack([1 + torch.randperm(79, generator=generator)[:48] for _ in COUNTS])
    counts = torch.tensor(COUNTS)
    return pool, torch.where(torch.arange(48) < counts[:, None], slots, -1), counts


@pytest.mark.parametrize("page", [1, 16, 10])
def test_by_page(page: int) -> None:
    pool, slots, counts = random_case(8, torch.float32)
    low, high = page_extrema(pool, slots, counts, page)
    assert low.shape == high.shape == (4, 2, -(-48 // page), 8)
    for request, count in enumerate(COUNTS):
        for index in range(low.shape[2]):
            members = slots[request, page * index : min(page * (index + 1), count)]
            keys = pool[members]
            if len(members):
                assert torch.equal(low[request, :, index], keys.amin(0))
                assert torch.equal(high[request, :, index], keys.amax(0))
            else:
                assert not low[request, :, index].any()
                assert not high[request, :, index].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "page"), [(64, 16), (128, 16), (24, 10)])
def test_kernel(dim: int, page: int, dtype: torch.dtype) -> None:
    case = random_case(dim, dtype)
    launch = kernel("page_extrema", "page_extrema")
    found = poisoned(lambda: launch(*(x.to(DEVICE) for x in case), page))
    for ours, right in zip(found, page_extrema(*case, page), strict=True):
        assert torch.equal(ours.cpu(), right)
