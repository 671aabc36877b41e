"""The README's picture shows what its trace says."""

from __future__ import annotations

import random

import numpy as np

from benchmarks.picture import held_map, looked_up
from sglang_beacon.lab.revisit_chain import RevisitChain


def test_the_map_follows_the_evictions() -> None:
    evictions = [
        {"seen": 4, "kept": {"0": [[0, 3], [0, 2]]}},
        {"seen": 6, "kept": {"0": [[0, 5], [2, 4]]}},
    ]
    shares = held_map({"tokens": list(range(7)), "evictions": evictions})
    assert np.array_equal(shares[3], [1, 1, 1, 1, 0, 0, 0])
    assert np.array_equal(shares[4], [1, 0, 0.5, 0.5, 1, 0, 0])
    assert np.array_equal(shares[6], [0.5, 0, 0.5, 0, 0.5, 0.5, 1])


def test_a_step_looks_up_what_it_says() -> None:
    chain = RevisitChain().sample(random.Random(7))
    for fact, said in looked_up(chain):
        assert fact in chain.facts
        assert chain.tokens[fact] == chain.tokens[said]
        assert chain.tokens[fact - 1] == chain.tokens[said - 1]
