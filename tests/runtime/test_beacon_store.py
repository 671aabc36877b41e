"""Beacons follow their prefix: found by path, cut to what is shared, bounded, gone with it."""

from __future__ import annotations

import pytest
import torch

from sglang_beacon.core import BufferShape
from sglang_beacon.runtime.beacon_store import Beacons, BeaconStore
from sglang_beacon.runtime.query_buffer import QueryBuffer

LAYERS, HEADS, DIM = 2, 3, 4


def beacons(*positions: int) -> Beacons:
    """Rows that say where they come from."""
    place = torch.tensor(positions).expand(LAYERS, HEADS, -1).clone()
    return Beacons(place[..., None].expand(-1, -1, -1, DIM).float().clone(), place)


class Tree:
    """Paths of a prefix tree: root 0 - 1 (10 tokens) - 2 (25) - 3 (40), and 1 - 4 (30)."""

    def __init__(self) -> None:
        self.paths = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 4]}
        self.ends = {1: 10, 2: 25, 3: 40, 4: 30}

    def matched(self, node: int) -> dict[int, int]:
        return {step: self.ends[step] for step in self.paths[node]}


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_the_longest_common_prefix_wins(tree: Tree) -> None:
    store = BeaconStore(10**6)
    store.put(1, beacons(1, 2))
    store.put(3, beacons(5, 30))
    found = store.find(tree.matched(2), tree.paths.get, 16)
    # Of 3's beacons only one lies in the 25 common tokens, and is repeated.
    assert found is not None
    assert found.positions.unique().tolist() == [5]
    assert torch.equal(found.rows[..., 0].long(), found.positions)
    found = store.find(tree.matched(4), tree.paths.get, 16)
    assert found is not None
    assert found.positions[0, 0].tolist() == [1, 2]
    assert store.hits == 2


def test_nothing_in_common(tree: Tree) -> None:
    store = BeaconStore(10**6)
    assert store.find(tree.matched(4), tree.paths.get, 16) is None
    store.put(4, beacons(1, 2))
    assert store.find({9: 12}, tree.paths.get, 16) is None
    assert store.find(tree.matched(4), tree.paths.get, 1) is None, "more than the request can take"
    assert store.hits == 0


def test_evicted_prefixes_take_their_beacons_along(tree: Tree) -> None:
    store = BeaconStore(10**6)
    store.put(3, beacons(1))
    store.put(4, beacons(2))
    del tree.paths[3]
    store.forget_missing(tree.paths.get)
    assert len(store) == 1
    del tree.paths[4]
    assert store.find(tree.matched(2), tree.paths.get, 16) is None
    assert len(store) == store.num_bytes == 0


def test_bytes_are_bounded_and_the_oldest_go(tree: Tree) -> None:
    size = beacons(1).num_bytes
    store = BeaconStore(2 * size)
    store.put(1, beacons(1))
    store.put(2, beacons(1))
    assert store.find(tree.matched(1), tree.paths.get, 16) is not None
    store.put(4, beacons(1))
    assert store.num_bytes == 2 * size
    # Node 1 is the closest prefix of both 1 and 2; 2 was used least recently.
    assert store.find({2: 25}, tree.paths.get, 16) is None
    store.put(4, beacons(1, 2, 3))
    assert store.find({4: 30}, tree.paths.get, 16) is None, "larger than the store"
    store.clear()
    assert store.num_bytes == 0


def test_each_head_keeps_its_own() -> None:
    rows = beacons(1, 2, 3)
    rows.positions[0, 0] = torch.tensor([7, 8, 9])
    rows.positions[1, 2] = torch.tensor([2, 6, 9])
    rows.rows.copy_(rows.positions[..., None].float())
    cut = rows.within(5)
    assert cut.positions[0, 1].tolist() == [1, 2, 3]
    assert cut.positions[1, 2].tolist() == [2, 2, 2]
    assert cut.positions[0, 0].tolist() == [7, 8, 9], "nothing of its own: what there is"
    assert torch.equal(cut.rows[..., 1].long(), cut.positions)


def test_a_buffer_remembers_where_beacons_come_from() -> None:
    """Chunk by chunk, on top of a seed: positions stay with the rows that FPS chose."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(50, LAYERS, HEADS, DIM, generator=generator)
    buffer = QueryBuffer(BufferShape(8, 4), LAYERS, HEADS, DIM, torch.float32, "cpu")
    place = torch.tensor([3, 11, 17]).expand(LAYERS, HEADS, -1)
    rows = queries[[3, 11, 17]].permute(1, 2, 0, 3)
    buffer.seed(Beacons(rows, place))
    for begin, end, observed in ((20, 33, 3), (33, 50, 16)):
        for layer in range(LAYERS):
            buffer.fold_prompt(layer, queries[begin:end, layer], begin, observed, 0)
    kept = buffer.beacons(8)
    for layer in range(LAYERS):
        for head in range(HEADS):
            expected = queries[kept.positions[layer, head], layer, head]
            assert torch.equal(kept.rows[layer, head], expected)
    copy = kept.to("cpu")
    buffer.rows.zero_()
    assert copy.rows.abs().sum() > 0
