"""Top-K is exact, ascending, and breaks ties towards the lower index."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import naive
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.select_topk import select_topk

values = st.one_of(
    st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, math.inf]),
    st.floats(-4, 4, width=32),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_heads=st.integers(1, 4), num_keys=st.integers(1, 50))
def test_equals_a_full_sort(data: st.DataObject, num_heads: int, num_keys: int) -> None:
    row = st.lists(values, min_size=num_keys, max_size=num_keys)
    rows = data.draw(st.lists(row, min_size=num_heads, max_size=num_heads))
    count = data.draw(st.integers(0, num_keys))
    scores = torch.tensor(rows)
    before = scores.clone()
    chosen = select_topk(scores, count)
    assert chosen.dtype == torch.int64
    assert chosen.shape == (num_heads, count)
    assert chosen.tolist() == [naive.top(one, count) for one in rows]
    assert torch.equal(scores, before)


@pytest.mark.parametrize("num_keys", [3, 16, 17, 1000, 5000])
@pytest.mark.parametrize("value", [0.0, 1.0, math.inf, -math.inf])
def test_all_equal_keeps_the_first(num_keys: int, value: float) -> None:
    count = num_keys // 2 + 1
    chosen = select_topk(torch.full((2, num_keys), value), count)
    assert torch.equal(chosen, torch.arange(count).expand(2, -1))


def test_many_ties_at_length() -> None:
    """Few distinct scores over thousands of keys, where an unstable sort would show."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (3, 4097), generator=generator).float()
    for count in (1, 1024, 3000, 4097):
        assert select_topk(scores, count).tolist() == [
            naive.top(row, count) for row in scores.tolist()
        ]


def test_inf_forces_in_and_minus_inf_keeps_out() -> None:
    scores = torch.rand(2, 20, generator=torch.Generator().manual_seed(1))
    scores[:, [0, 7, 19]] = math.inf
    scores[:, [1, 2]] = -math.inf
    for count in range(3, 19):
        for row in select_topk(scores, count).tolist():
            assert {0, 7, 19} <= set(row)
            assert not {1, 2} & set(row)
    # With nothing else left they follow, the lower first.
    assert {1} == set(select_topk(scores, 19)[0].tolist()) & {1, 2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    scores = torch.rand(3, 100, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert select_topk(scores, 31).tolist() == [naive.top(row, 31) for row in scores.tolist()]


# The kernel.


def by_kernel(scores: torch.Tensor, count: int) -> torch.Tensor:
    launch = kernel("select_topk", "select_topk")
    return poisoned(lambda: launch(scores.to(DEVICE), count)).cpu()


@pytest.mark.parametrize("num_keys", [1, 2, 31, 64, 1000, 2049])
def test_kernel(num_keys: int) -> None:
    """With ties, forced entries and forbidden ones, and both zeros."""
    generator = torch.Generator().manual_seed(num_keys)
    scores = torch.randn(2, 2, num_keys, generator=generator)
    scores[0] = (scores[0] * 2).round()
    scores[0, 0] *= -1.0
    scores[1, 0, ::3] = math.inf
    scores[1, 1, ::2] = -math.inf
    for count in {0, 1, num_keys // 2, num_keys - 1, num_keys}:
        assert torch.equal(by_kernel(scores, count), select_topk(scores, count))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernel_of_strided_rows(dtype: torch.dtype) -> None:
    scores = torch.rand(4, 300, generator=torch.Generator().manual_seed(2)).to(dtype)[::2, 3:200:2]
    assert torch.equal(by_kernel(scores, 31), select_topk(scores, 31))
