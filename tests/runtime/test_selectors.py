"""Each selector's order and bounds, against attention computed in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime import selectors
from sglang_beacon.runtime.selectors.base import Query, Ranking, Selector
from sglang_beacon.runtime.selectors.pages import PAGE

KV_HEADS, GROUP, DIM = 2, 3, 16
SETTINGS = RecasSettings(probe_interval=1, sketch_rank=8)
SIZES = (8, 20, 48)


def make_query(held: int, seed: int, sharp: float = 0.4, slots: int = 500) -> Query:
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(held)
    return Query(
        layer=0,
        queries=torch.randn(KV_HEADS * GROUP, DIM, generator=generator),
        k_pool=torch.randn(slots, KV_HEADS, DIM, generator=generator),
        slots=torch.randperm(slots, generator=generator)[:held],
        scale=sharp,
        forced=(place < 2) | (place >= held - 3),
    )


def attention(query: Query) -> torch.Tensor:
    """Weights [H_kv, group, N] in float64."""
    keys = query.k_pool[query.slots].double().transpose(0, 1)
    grouped = query.queries.double().view(KV_HEADS, GROUP, DIM)
    return (grouped @ keys.transpose(1, 2) * query.scale).softmax(-1)


def dropped(query: Query, ranking: Ranking, size: int) -> torch.Tensor:
    """The largest mass [H_kv] that any query head gives to what follows the first ``size``."""
    rest = ranking.order[:, size:]
    weights = attention(query).gather(2, rest[:, None].expand(-1, GROUP, -1))
    return weights.sum(-1).amax(1)


def check(query: Query, ranking: Ranking, sizes: Sequence[int], certain: bool) -> None:
    held = len(query.slots)
    assert ranking.drop.shape == (KV_HEADS, len(sizes))
    for order in ranking.order.tolist():
        assert sorted(order) == list(range(held))
        forced = {p for p in range(held) if query.forced[p]}
        assert forced <= set(order[: PAGE * (len(forced) + 1)])
    if certain:
        for index, size in enumerate(sizes):
            assert (ranking.drop[:, index] >= dropped(query, ranking, size) - 1e-6).all()


def create(name: str) -> Selector:
    selector = selectors.create(SETTINGS, name, layers=1)
    assert selector is not None
    return selector


@pytest.mark.parametrize("name", ["exact", "pages"])
@settings(max_examples=60, deadline=None)
@given(held=st.integers(50, 200), seed=st.integers(0, 10**6), sharp=st.floats(0.01, 3.0))
def test_bounds_hold(name: str, held: int, seed: int, sharp: float) -> None:
    query = make_query(held, seed, sharp)
    check(query, create(name).rank(query, SIZES), SIZES, certain=True)


def test_exact_ranks_by_the_largest_weight_of_the_group() -> None:
    query = make_query(100, 0)
    order = create("exact").rank(query, SIZES).order
    weights = attention(query).amax(1)
    for head in range(KV_HEADS):
        assert set(order[head, :5].tolist()) == {0, 1, 97, 98, 99}
        chosen = weights[head, order[head, 5:]]
        assert (chosen[:-1] >= chosen[1:] - 1e-9).all()


def test_pages_come_in_the_order_that_quest_gives_them() -> None:
    """By the sum over dimensions of max(q * smallest, q * largest), the largest of the group."""
    query = make_query(100, 4)
    order = create("pages").rank(query, SIZES).order
    grouped = query.queries.view(KV_HEADS, GROUP, DIM).tolist()
    for head in range(KV_HEADS):
        columns = [page.T.tolist() for page in query.k_pool[query.slots][:, head].split(PAGE)]
        bounds = [
            max(
                sum(max(x * min(c), x * max(c)) for x, c in zip(q, page, strict=True))
                for q in grouped[head]
            )
            for page in columns
        ]
        pages = list(dict.fromkeys(token // PAGE for token in order[head].tolist()))
        # What is read in any case comes first: sinks and the newest.
        assert set(pages[:2]) == {0, 6}
        assert pages[2:] == sorted(pages[2:], key=lambda page: -bounds[page])


def test_pages_take_new_tokens_in_and_forget_rewritten_ones() -> None:
    """Bounds kept from step to step are those that a fresh look gives."""
    selector, fresh = create("pages"), create("pages")
    query = make_query(70, 1)
    for held in (50, 51, 64, 65, 70):
        part = query._replace(slots=query.slots[:held], forced=query.forced[:held])
        ranking = selector.rank(part, SIZES)
        fresh.restart()
        again = fresh.rank(part, SIZES)
        assert torch.equal(ranking.order, again.order)
        assert torch.allclose(ranking.drop, again.drop)
    moved = query._replace(slots=query.slots.flip(0))
    selector.restart()
    check(moved, selector.rank(moved, SIZES), SIZES, certain=True)


def test_a_page_that_matters_is_found_without_reading_the_others() -> None:
    query = make_query(160, 2, sharp=1.0)
    query.k_pool[query.slots] *= 0.1
    query.k_pool[query.slots[70], 0] = 4 * query.queries[1] / query.queries[1].norm()
    order = create("pages").rank(query, SIZES).order
    assert 70 in order[0, : 3 * PAGE].tolist()


def test_sketches_promise_nothing_before_they_were_checked() -> None:
    selector = create("sketch")
    ranking = selector.rank(make_query(100, 3), SIZES)
    assert (ranking.drop == 1).all()
    assert selector.coverage is None


def test_sketches_learn_how_much_they_overlook() -> None:
    """On queries of one kind, bounds hold for about the share that was asked for."""
    selector = create("sketch")
    held = total = 0
    for step in range(120):
        query = make_query(100, 4)._replace(queries=make_query(100, 100 + step).queries)
        selector.calibrate(step)
        ranking = selector.rank(query, SIZES)
        check(query, ranking, SIZES, certain=False)
        if step >= 40:
            for index, size in enumerate(SIZES):
                covered = ranking.drop[:, index] >= dropped(query, ranking, size)
                held, total = held + int(covered.sum()), total + KV_HEADS
    # 480 bounds, not independent of each other.
    assert held / total > 0.85
    assert selector.coverage == pytest.approx(0.9, abs=0.06)


def test_names() -> None:
    assert selectors.create(SETTINGS, "none", layers=1) is None
    for name in ("exact", "pages", "sketch"):
        assert create(name).name == name
