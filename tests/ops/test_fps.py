"""Farthest point sampling follows the published seed and step rules, and never repeats an index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import naive
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops import farthest_point_sample

TOLERANCE = 1e-5


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_follows_the_rules(points: torch.Tensor, chosen: list[int]) -> None:
    """Each choice is the best of those left, given the choices before it, up to rounding."""
    assert len(set(chosen)) == len(chosen)
    similar = naive.cosines(points.double().tolist())
    for step, index in enumerate(chosen):
        before = chosen[:step]
        left = [i for i in range(len(points)) if i not in before]
        value = {
            i: naive.step_criterion(similar, i, before)
            if before
            else naive.seed_criterion(similar, i)
            for i in left
        }
        assert value[index] <= min(value.values()) + TOLERANCE, f"step {step}"


sizes = st.integers(2, 34)
seeds = st.integers(0, 10_000)


@settings(max_examples=60, deadline=None)
@given(num_points=sizes, dim=st.integers(1, 9), count=st.integers(1, 20), seed=seeds)
def test_every_choice_is_the_published_one(
    num_points: int, dim: int, count: int, seed: int
) -> None:
    points = gaussian(num_points, dim, seed=seed)
    chosen = farthest_point_sample(points, count).tolist()
    if num_points <= count:
        assert chosen == list(range(num_points))
    else:
        assert len(chosen) == count
        assert_follows_the_rules(points, chosen)


@settings(max_examples=60, deadline=None)
@given(num_points=sizes, dim=st.integers(2, 9), count=st.integers(1, 20), seed=seeds)
def test_same_indices_as_brute_force(num_points: int, dim: int, count: int, seed: int) -> None:
    points = gaussian(num_points, dim, seed=seed)
    margin = naive.Margin()
    expected = naive.farthest_points(points.double().tolist(), count, margin)
    assume(margin.smallest > TOLERANCE)
    assert farthest_point_sample(points, count).tolist() == expected


@settings(max_examples=80, deadline=None)
@given(
    axes=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0, 8.0])),
        min_size=1,
        max_size=24,
    ),
    count=st.integers(1, 20),
)
def test_exact_ties_go_to_the_lowest_index(axes: list[tuple[int, float]], count: int) -> None:
    """Along the axes every similarity is exactly -1, 0 or 1, also for zero and equal vectors."""
    points = torch.zeros(len(axes), 4)
    for row, (axis, length) in enumerate(axes):
        points[row, axis] = length
    expected = naive.farthest_points(points.tolist(), count)
    assert farthest_point_sample(points, count).tolist() == expected


def test_a_worked_example() -> None:
    """Angles 0, 10, 20 and 200 degrees: the outlier first, then the farthest from it."""
    angles = torch.deg2rad(torch.tensor([0.0, 10.0, 20.0, 200.0]))
    points = torch.stack((angles.cos(), angles.sin()), dim=-1)
    assert farthest_point_sample(points, 3).tolist() == [3, 2, 0]


def test_the_seed_ignores_similarity_to_itself() -> None:
    """A zero vector has mean 0 to the others; points with a positive mean must not win over it."""
    points = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.1], [1.0, -0.1]])
    assert farthest_point_sample(points, 1).tolist() == [1]
    # With itself counted in, every mean but that of the zero vector would be positive.
    opposed = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 1.0], [1.0, 1.0]])
    assert farthest_point_sample(opposed, 1).tolist() == [2]


@pytest.mark.parametrize("dim", [1, 5, 16, 33])
@pytest.mark.parametrize("num_points", [3, 17, 33, 100])
@pytest.mark.parametrize("kind", ["identical", "zero", "two kinds"])
def test_no_index_repeats_among_equal_vectors(kind: str, num_points: int, dim: int) -> None:
    points = gaussian(dim, seed=dim).expand(num_points, dim).clone()
    if kind == "zero":
        points.zero_()
    elif kind == "two kinds":
        points[::2] = gaussian(dim, seed=99)
    count = min(16, num_points - 1)
    chosen = farthest_point_sample(points, count).tolist()
    assert len(set(chosen)) == count
    assert all(0 <= index < num_points for index in chosen)
    assert_follows_the_rules(points, chosen)


@pytest.mark.parametrize(("num_points", "count"), [(1, 1), (3, 16), (16, 16)])
def test_no_more_points_than_asked_for_are_all_kept(num_points: int, count: int) -> None:
    for points in (gaussian(2, num_points, 8), torch.zeros(2, num_points, 8)):
        expected = torch.arange(num_points).expand(2, -1)
        assert torch.equal(farthest_point_sample(points, count), expected)


@settings(max_examples=30, deadline=None)
@given(num_points=st.integers(3, 30), dim=st.integers(2, 8), seed=seeds, data=st.data())
def test_order_of_the_points_does_not_matter(
    num_points: int, dim: int, seed: int, data: st.DataObject
) -> None:
    points = gaussian(num_points, dim, seed=seed)
    order = data.draw(st.permutations(range(num_points)))
    count = data.draw(st.integers(1, num_points - 1))
    margin = naive.Margin()
    naive.farthest_points(points.double().tolist(), count, margin)
    assume(margin.smallest > TOLERANCE)
    shuffled = farthest_point_sample(points[list(order)], count).tolist()
    assert [order[i] for i in shuffled] == farthest_point_sample(points, count).tolist()


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_only_directions_count(seed: int) -> None:
    """Powers of two scale without rounding, so not a single choice may change."""
    points = gaussian(24, 8, seed=seed)
    lengths = 2.0 ** torch.randint(-12, 12, (24, 1), generator=torch.Generator().manual_seed(seed))
    scaled = farthest_point_sample(points * lengths, 12).tolist()
    assert_follows_the_rules(points, scaled)


def test_leading_dimensions_are_independent() -> None:
    points = gaussian(3, 5, 33, 16)
    chosen = farthest_point_sample(points, 16)
    assert chosen.shape == (3, 5, 16)
    assert chosen.dtype == torch.int64
    for layer in range(3):
        for head in range(5):
            margin = naive.Margin()
            one = points[layer, head]
            expected = naive.farthest_points(one.double().tolist(), 16, margin)
            assert margin.smallest > TOLERANCE
            assert chosen[layer, head].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_but_not_computed_in(dtype: torch.dtype) -> None:
    """Nearly parallel points, whose similarities differ by less than the dtype resolves."""
    points = (gaussian(4, 33, 64) + 8 * gaussian(64, seed=1)).to(dtype)
    chosen = farthest_point_sample(points, 16)
    assert torch.equal(chosen, farthest_point_sample(points.float(), 16))
    for head in range(4):
        assert_follows_the_rules(points[head], chosen[head].tolist())


def test_strided_input_and_untouched_input() -> None:
    wide = gaussian(2, 64, 24)
    view = wide[:, ::2, 4:12]
    before = wide.clone()
    assert torch.equal(farthest_point_sample(view, 8), farthest_point_sample(view.clone(), 8))
    assert torch.equal(wide, before)


def test_a_long_prompt() -> None:
    """Thousands of correlated points: rounding of the mean must not decide the seed."""
    points = gaussian(3000, 16) + 3 * gaussian(16, seed=1)
    chosen = farthest_point_sample(points, 16)
    unit = torch.nn.functional.normalize(points.double(), dim=-1)
    similar = unit @ unit.T
    means = (similar.sum(1) - similar.diagonal()) / (len(points) - 1)
    assert means[chosen[0]] <= means.min() + TOLERANCE
    for step in range(1, 16):
        nearest = similar[:, chosen[:step]].amax(1)
        nearest[chosen[:step]] = torch.inf
        assert nearest[chosen[step]] <= nearest.min() + TOLERANCE


@pytest.mark.parametrize("num_points", [3, 5, 9, 33])
@pytest.mark.parametrize("dim", [5, 64])
def test_identical_vectors_are_chosen_in_order(num_points: int, dim: int) -> None:
    """Equal rows must give equal similarities, or ties would depend on where a row lies."""
    point = gaussian(dim, seed=1)
    chosen = farthest_point_sample(point.expand(num_points, dim).contiguous(), 4)
    assert chosen.tolist() == list(range(min(4, num_points)))


# The kernel.


def by_kernel(points: torch.Tensor, count: int) -> torch.Tensor:
    launch = kernel("fps", "farthest_point_sample")
    return poisoned(lambda: launch(points.to(DEVICE), count)).cpu()


@pytest.mark.parametrize("dim", [5, 64, 128])
@pytest.mark.parametrize(("num_points", "count"), [(3, 16), (17, 16), (32, 16), (37, 5), (150, 16)])
def test_kernel(num_points: int, count: int, dim: int) -> None:
    points = gaussian(2, 2, num_points, dim)
    assert torch.equal(by_kernel(points, count), farthest_point_sample(points, count))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernel_of_a_view(dtype: torch.dtype) -> None:
    """The rows in use of a buffer of several layers and heads."""
    points = gaussian(3, 4, 40, 24).to(dtype)[:, ::2, :33, :16]
    assert torch.equal(by_kernel(points, 16), farthest_point_sample(points, 16))
    assert torch.equal(by_kernel(points[0, 0], 16), farthest_point_sample(points[0, 0], 16))


@pytest.mark.parametrize("kind", ["identical", "zero", "along the axes"])
def test_kernel_breaks_ties_alike(kind: str) -> None:
    if kind == "identical":
        points = gaussian(33, seed=1).expand(300, 33).contiguous()
    elif kind == "zero":
        points = torch.zeros(40, 16)
    else:
        points = torch.eye(4).repeat(12, 1)
        points[1::3] *= -2
    assert torch.equal(by_kernel(points, 16), farthest_point_sample(points, 16))
