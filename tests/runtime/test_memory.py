"""What is noted of a prompt, against attention in plain loops."""

from __future__ import annotations

import pytest
import torch
from support import naive

from sglang_beacon import policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import CachedKeys
from sglang_beacon.runtime.memory import Memory

KV_HEADS, GROUP, TOKENS, DIM, SCALE = 2, 2, 40, 8, 0.7


@pytest.mark.parametrize("bounds", [(40,), (25, 40)])
@pytest.mark.parametrize(("prompt_queries", "noted"), [(1024, 40), (6, 6), (0, 16)])
def test_the_newest_queries_of_each_stretch_are_noted(
    bounds: tuple[int, ...], prompt_queries: int, noted: int
) -> None:
    options = {"prompt_queries": prompt_queries}
    policy = policies.create(KVPolicyConfig(policy="h2o", budget=64, options=options))
    assert policy is not None
    assert policy.signals is not None
    memory = Memory(policy.signals, None, policy.config)
    memory.begin(1, KV_HEADS * GROUP, KV_HEADS, "none", "cpu")
    draw = torch.Generator().manual_seed(5)
    keys = torch.randn(TOKENS, KV_HEADS, DIM, generator=draw)
    queries = torch.randn(1, TOKENS, KV_HEADS * GROUP, DIM, generator=draw)

    expected = [[0.0] * TOKENS for _ in range(KV_HEADS)]
    begin = 0
    for end in bounds:
        first = max(begin, end - memory.prompt_queries)
        assert end - first == min(noted, end - begin)
        cache = CachedKeys([keys], torch.arange(end), [keys])
        memory.after_prefill(cache, queries[:, first:end], TOKENS, SCALE)
        for position in range(first, end):
            for head, sums in enumerate(expected):
                group = queries[0, position, head * GROUP : (head + 1) * GROUP].tolist()
                rows = [
                    naive.attention(query, keys[:, head].tolist(), position + 1, SCALE)
                    for query in group
                ]
                for token, weights in enumerate(zip(*rows, strict=True)):
                    sums[token] += max(weights)
        begin = end

    assert memory.signals is not None
    for got, wanted in zip(memory.signals.view().history[0].tolist(), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)
