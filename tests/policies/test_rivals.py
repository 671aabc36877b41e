"""Each rival's score, against its formula in plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import naive

from sglang_beacon import policies
from sglang_beacon.config import ConfigError, KVPolicyConfig
from sglang_beacon.core import Alignment, BufferShape, CachedKeys, Observations, TokenSignals
from sglang_beacon.policies import Policy

KV_HEADS, GROUP, HELD, DIM = 2, 2, 24, 8
WINDOW = 4
BEFORE = HELD - WINDOW
SCALE = 0.7


def create(name: str, **options: Any) -> Policy:
    config = KVPolicyConfig(policy=name, budget=64, n_recent=4, options=options)
    policy = policies.create(config)
    assert policy is not None
    return policy


class Layer:
    """One layer's keys, and the window's queries, each of which sees up to its own token."""

    def __init__(self, queries: int = WINDOW) -> None:
        generator = torch.Generator().manual_seed(3)
        self.keys = torch.randn(HELD, KV_HEADS, DIM, generator=generator)
        self.values = torch.randn(HELD, KV_HEADS, DIM, generator=generator)
        self.queries = torch.randn(1, KV_HEADS * GROUP, queries, DIM, generator=generator)
        self.visible = torch.arange(HELD - queries + 1, HELD + 1)

    def score(self, policy: Policy) -> list[list[float]]:
        cache = CachedKeys([self.keys], torch.arange(HELD), [self.values])
        seen = Observations(99, 0, SCALE, self.queries, self.visible)
        return policy.score(cache, seen)[0].tolist()

    def head_keys(self, head: int) -> list[list[float]]:
        return self.keys[:, head].tolist()

    def weights(self, head: int) -> list[list[list[float]]]:
        """Of each query head of the group and each query."""
        group = range(head * GROUP, (head + 1) * GROUP)
        return [
            [
                naive.attention(query, self.head_keys(head), int(visible), SCALE)
                for query, visible in zip(self.queries[0, h].tolist(), self.visible, strict=True)
            ]
            for h in group
        ]


def around(values: list[float], kernel: int) -> list[list[float]]:
    """Each value's neighbours, itself among them."""
    half = kernel // 2
    return [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]


def mean_weight(layer: Layer, head: int) -> list[float]:
    rows = [row for queries in layer.weights(head) for row in queries]
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def largest_logits(layer: Layer, head: int) -> list[float]:
    """Softmax over what lies before the window, by the largest logit of the group's heads."""
    keys = layer.head_keys(head)[:BEFORE]
    group = layer.queries[0, head * GROUP : (head + 1) * GROUP].transpose(0, 1).tolist()
    mean = [0.0] * BEFORE
    for queries in group:
        weights = [math.exp(SCALE * max(naive.dot(q, key) for q in queries)) for key in keys]
        total = math.fsum(weights)
        mean = [m + weight / total / WINDOW for m, weight in zip(mean, weights, strict=True)]
    return mean


def check(policy: Policy, layer: Layer, expected: list[list[float]]) -> None:
    """Compare the scores of the first tokens, as many as are expected."""
    for got, wanted in zip(layer.score(policy), expected, strict=True):
        assert got[: len(wanted)] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_snapkv() -> None:
    """Sum over queries, mean over the group, maximum over neighbours before the window."""
    layer = Layer()
    expected = [
        [max(near) * WINDOW for near in around(mean_weight(layer, head)[:BEFORE], 5)]
        for head in range(KV_HEADS)
    ]
    check(create("snapkv", window=WINDOW, kernel=5), layer, expected)


def test_rpc() -> None:
    """Attention before the window, the mean over queries and heads and neighbours."""
    layer = Layer()
    rows = [row for head in range(KV_HEADS) for queries in layer.weights(head) for row in queries]
    shares = [[weight / math.fsum(row[:BEFORE]) for weight in row[:BEFORE]] for row in rows]
    mean = [math.fsum(column) / len(rows) for column in zip(*shares, strict=True)]
    # Beyond the first and the last there are zeros.
    expected = [math.fsum(near) / 7 for near in around(mean, 7)]
    check(create("rpc", window=WINDOW), layer, [expected] * KV_HEADS)


def test_tova() -> None:
    """The newest query's attention, the mean of all heads: the same for each."""
    layer = Layer(queries=1)
    heads = [mean_weight(layer, head) for head in range(KV_HEADS)]
    expected = [math.fsum(column) / KV_HEADS for column in zip(*heads, strict=True)]
    assert create("tova").observes == BufferShape(0, 1)
    check(create("tova"), layer, [expected] * KV_HEADS)


def test_scissorhands() -> None:
    """How many queries give more than the mean of what they see; ties by total weight."""
    layer = Layer()
    for head, got in enumerate(layer.score(create("scissorhands", window=WINDOW))):
        rows = [
            (row, int(visible))
            for queries in layer.weights(head)
            for row, visible in zip(queries, layer.visible, strict=True)
        ]
        counts = [sum(row[i] > 1 / seen for row, seen in rows) for i in range(HELD)]
        totals = [math.fsum(row[i] for row, _ in rows) for i in range(HELD)]
        assert [int(score) for score in got] == counts
        order = sorted(range(HELD), key=lambda i: (counts[i], totals[i]))
        assert sorted(range(HELD), key=lambda i: got[i]) == order


def test_rkv() -> None:
    """Importance, less what is said already; the newest of many alike is not redundant."""
    layer = Layer()
    layer.keys[5] = layer.keys[9] = layer.keys[14]
    expected = []
    for head in range(KV_HEADS):
        importance = [max(near) for near in around(largest_logits(layer, head), 3)]
        similar = naive.cosines(layer.head_keys(head))
        for i in range(HELD):
            similar[i][i] = 0.0
        for row in similar:
            alike = [j for j, value in enumerate(row) if value > 0.5]
            if alike:
                row[max(alike)] = 0.0
        means = [math.fsum(row[j] for row in similar) / HELD for j in range(HELD)]
        total = math.fsum(math.exp(value) for value in means)
        expected.append(
            [0.3 * i - 0.7 * math.exp(m) / total for i, m in zip(importance, means, strict=False)]
        )
    check(create("rkv", window=WINDOW, kernel=3, mix=0.3), layer, expected)


def test_keydiff() -> None:
    layer = Layer()
    expected = []
    for head in range(KV_HEADS):
        units = [[x / math.sqrt(naive.dot(key, key)) for x in key] for key in layer.head_keys(head)]
        anchor = [math.fsum(column) / HELD for column in zip(*units, strict=True)]
        norm = math.sqrt(naive.dot(anchor, anchor))
        expected.append([-naive.dot(unit, anchor) / norm for unit in units])
    check(create("keydiff"), layer, expected)


def test_h2o() -> None:
    """All attention received, above which half of what is kept is the newest."""
    policy = create("h2o")
    assert policy.signals is not None
    assert (policy.signals.decay, policy.signals.credit, policy.signals.significance) == (1, 0, 0)
    generator = torch.Generator().manual_seed(0)
    history = torch.rand(1, KV_HEADS, HELD, generator=generator) * 90
    zero = torch.zeros_like(history)
    seen = Observations(99, 0, SCALE, signals=TokenSignals(zero, history, zero))
    few = KVPolicyConfig(policy="h2o", budget=24, n_recent=4, n_prefix=0)
    halved = policies.create(few)
    assert halved is not None
    score = halved.score(CachedKeys([Layer().keys], torch.arange(HELD)), seen)
    # Half of the 21 that stay.
    assert torch.equal(score[..., : HELD - 10], history[..., : HELD - 10])
    assert (score[..., HELD - 10 :] > history.max()).all()


def test_lazy_eviction() -> None:
    """Twice the sigmoid of how overdue a token is, and of its longest pause; else nothing."""
    policy = create("lazy_eviction")
    assert policy.signals is not None
    assert policy.signals.recurrence == policy.options["threshold"]
    generator = torch.Generator().manual_seed(0)
    activated = torch.randint(0, 99, (1, KV_HEADS, HELD), generator=generator).float()
    interval = torch.randint(0, 4, (1, KV_HEADS, HELD), generator=generator).float()
    zero = torch.zeros_like(interval)
    signals = TokenSignals(zero, zero, zero, activated, interval)
    seen = Observations(99, 0, SCALE, signals=signals)
    score = policy.score(CachedKeys([Layer().keys], torch.arange(HELD)), seen)[0]

    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    for head in range(KV_HEADS):
        for got, last, pause in zip(
            score[head].tolist(),
            activated[0, head].tolist(),
            interval[0, head].tolist(),
            strict=True,
        ):
            wanted = 0.0
            if pause:
                wanted = 2 * sigma(-(99 - last) / pause) * 2 * sigma(-1 / pause)
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_expected_attention() -> None:
    """Softmax of mean plus half the variance of the logits, times the norm of the value."""
    layer = Layer()
    expected = []
    for head in range(KV_HEADS):
        sums = [0.0] * HELD
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            queries = layer.queries[0, query_head].tolist()
            exponents = []
            for key in layer.head_keys(head):
                logits = [SCALE * naive.dot(query, key) for query in queries]
                mean = math.fsum(logits) / len(logits)
                spread = math.fsum((logit - mean) ** 2 for logit in logits) / len(logits)
                exponents.append(math.exp(mean + spread / 2))
            sums = [
                s + e / math.fsum(exponents) / GROUP for s, e in zip(sums, exponents, strict=True)
            ]
        norms = [math.sqrt(naive.dot(v, v)) for v in layer.values[:, head].tolist()]
        expected.append([s * n for s, n in zip(sums, norms, strict=True)])
    check(create("expected_attention", window=WINDOW), layer, expected)
    assert create("expected_attention").alignment == Alignment(future=512)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("snapkv", {"window": 0}, "window"),
        ("rpc", {"kernel": 4}, "kernel"),
        ("rkv", {"mix": 1.5}, "mix"),
        ("rkv", {"kernel": -1}, "kernel"),
        ("h2o", {"recent_share": 1.0}, "recent_share"),
        ("h2o", {"note_every": 0}, "note_every"),
        ("h2o", {"prompt_queries": -1}, "prompt_queries"),
        ("lazy_eviction", {"threshold": 0}, "threshold"),
        ("expected_attention", {"n_future": 0}, "n_future"),
        ("scissorhands", {"window": 5000}, "window|too small"),
    ],
)
def test_settings_that_cannot_work(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, **options)
