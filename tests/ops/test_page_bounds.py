"""A page's bound is never below the logit of one of its keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.page_bounds import page_bounds
from sglang_beacon.ops.page_extrema import page_extrema


@settings(max_examples=40, deadline=None)
@given(
    group=st.integers(1, 4),
    count=st.integers(1, 40),
    dim=st.integers(1, 8),
    scale=st.sampled_from([0.0, 0.3, 4.0]),
    seed=st.integers(0, 1000),
)
def test_bounds_every_logit(group: int, count: int, dim: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(40, 2, dim, generator=generator)
    queries = torch.randn(1, 2 * group, dim, generator=generator)
    low, high = page_extrema(pool, torch.arange(40)[None], torch.tensor([count]), 16)
    pages = -(-count // 16)
    bounds = page_bounds(queries, low, high, torch.tensor([pages]), scale)
    for head in range(2 * group):
        logits = pool[:count, head // group] @ queries[0, head] * scale
        for page, members in enumerate(logits.split(16)):
            assert members.max() <= bounds[0, head, page] + 1e-5
    assert (bounds[:, :, pages:] == -math.inf).all()


def test_of_one_key_it_is_the_logit() -> None:
    pool, queries = torch.randn(3, 1, 8), torch.randn(1, 2, 8)
    low, high = page_extrema(pool, torch.arange(3)[None], torch.tensor([3]), 1)
    bounds = page_bounds(queries, low, high, torch.tensor([3]), 0.5)
    torch.testing.assert_close(bounds[0], queries[0] @ pool[:, 0].T * 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 24), (4, 128)])
def test_kernel(group: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    queries = torch.randn(3, 2 * group, dim, generator=generator).to(dtype)
    low = torch.randn(3, 2, 37, dim, generator=generator)
    high = low + torch.rand(low.shape, generator=generator)
    case = queries, low, high, torch.tensor([37, 5, 0], dtype=torch.int32)
    launch = kernel("page_bounds", "page_bounds")
    found = poisoned(lambda: launch(*(x.to(DEVICE) for x in case), dim**-0.5))
    torch.testing.assert_close(found.cpu(), page_bounds(*case, dim**-0.5), atol=1e-5, rtol=1e-5)
