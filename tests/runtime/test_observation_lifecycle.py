"""Whole lives of requests against the published steps, replayed with lists of floats.

`Replay` follows one KV head and the query heads of its group by nothing but token positions: what
is cached, what was observed, which queries are beacons. `Request` drives the package over a small
pool, with NaN in every slot that no request holds. Both see the same random queries, keys and
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support import naive

from sglang_beacon import policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import BufferShape
from sglang_beacon.ops.beacon_score import SOFTNESS
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.runtime import compactor
from sglang_beacon.runtime.compactor import KVView, Work
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.request import RequestState

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
HEADS = KV_HEADS * GROUP
SCALE = 0.8
SLOTS = 512
# Decisions closer than this are ties that float32 may break either way: choose another seed.
MARGIN = 1e-6


@dataclass(frozen=True)
class Scenario:
    """Settings, the prompt in chunks, and how many tokens follow."""

    budget: int = 72
    n_recent: int = 16
    n_beacon: int = 16
    n_prefix: int = 4
    keep_ratio: float = 1 / 2
    aggregation: str = "max"
    page_size: int = 1
    chunks: tuple[int, ...] = (37,)
    in_tree: bool = True
    shared_prefix: str = "pin"
    generated: int = 110
    rotary_dim: int = DIM
    neox: bool = True
    seed: int = 0

    @property
    def length(self) -> int:
        return sum(self.chunks) + self.generated

    @property
    def frequencies(self) -> list[float]:
        return [100.0 ** (-2 * i / self.rotary_dim) for i in range(self.rotary_dim // 2)]

    @property
    def config(self) -> KVPolicyConfig:
        return KVPolicyConfig(
            policy="beacon",
            budget=self.budget,
            keep_ratio=self.keep_ratio,
            n_prefix=self.n_prefix,
            n_recent=self.n_recent,
            shared_prefix=self.shared_prefix,
            options={"n_beacon": self.n_beacon, "aggregation": self.aggregation},
        )


class Data:
    """What a model would compute at each position; keys rotated to their own, in float32."""

    def __init__(self, scenario: Scenario) -> None:
        generator = torch.Generator().manual_seed(scenario.seed)
        length = scenario.length
        self.queries = torch.randn(length, LAYERS, HEADS, DIM, generator=generator)
        # Queries drift, so that those of a late token differ from those of an early one.
        self.queries += 0.02 * torch.arange(length)[:, None, None, None]
        plain = torch.randn(length, LAYERS, KV_HEADS, DIM, generator=generator)
        rotated = [
            [
                [naive.rotate(head, at, scenario.frequencies, scenario.neox) for head in layer]
                for layer in token
            ]
            for at, token in enumerate(plain.double().tolist())
        ]
        self.keys = torch.tensor(rotated)
        self.values = torch.randn(length, LAYERS, KV_HEADS, DIM, generator=generator)


class Replay:
    """The published steps for one KV head of one layer, with positions for tokens."""

    def __init__(self, scenario: Scenario, data: Data, layer: int, kv_head: int) -> None:
        self.scenario = scenario
        self.margin = naive.Margin()
        heads = range(kv_head * GROUP, (kv_head + 1) * GROUP)
        self.queries = [data.queries[:, layer, head].double().tolist() for head in heads]
        self.keys = data.keys[:, layer, kv_head].double().tolist()
        self.cached: list[int] = []
        self.pinned = 0
        # Per query head; beacons are None until they are frozen.
        self.observed: list[list[int]] = [[] for _ in heads]
        self.beacons: list[list[int]] | None = None
        # Consecutive newest tokens whose queries were seen one by one.
        self.newest: list[int] = []

    @property
    def leaves(self) -> bool:
        """Whether an eviction would choose from the tree's part as well."""
        if not self.pinned or self.scenario.shared_prefix == "pin":
            return False
        # Alone, ``auto`` leaves a prompt in the tree that is no more than half of the budget.
        return self.scenario.shared_prefix == "copy" or self.pinned > self.scenario.budget / 2

    @property
    def budget(self) -> int:
        stays = self.scenario.shared_prefix == "auto" and not self.leaves
        return self.scenario.budget - (self.pinned if stays else 0)

    @property
    def counted(self) -> int:
        return len(self.cached) - (0 if self.leaves else self.pinned)

    @property
    def brink(self) -> bool:
        return self.counted >= self.budget - self.scenario.n_recent

    def prefill(self, positions: Sequence[int], pinned: int) -> None:
        """Step 1, chunk by chunk."""
        self.cached += positions
        self.pinned = pinned
        self.newest = list(positions)
        self.observed = [
            self.farthest(head, seen + self.newest) for head, seen in enumerate(self.observed)
        ]
        self.beacons = self.observed if self.brink else None

    def token(self, position: int) -> bool:
        """Steps 2 to 6; whether there was an eviction."""
        self.cached.append(position)
        self.newest.append(position)
        if self.beacons is None:
            self.observed = [[*seen, position] for seen in self.observed]
            full = len(self.observed[0]) == self.scenario.n_beacon + self.scenario.n_recent
            if self.brink or full:
                self.observed = [self.farthest(h, seen) for h, seen in enumerate(self.observed)]
            if self.brink:
                self.beacons = self.observed
        if self.counted < self.budget:
            return False
        self.evict(now=position)
        return True

    def evict(self, now: int) -> None:
        assert self.beacons is not None
        recent = self.newest[-self.scenario.n_recent :]
        score = self.score(now, recent)
        # Kept in any case: the first tokens of the request, and the newest.
        window = self.cached[-self.scenario.n_recent :]
        page = self.scenario.page_size
        stay = int(self.budget * self.scenario.keep_ratio) // page * page
        if self.leaves:
            self.pinned = 0
        eligible = self.cached[self.pinned :]
        fixed = [p for p in eligible if p < self.scenario.n_prefix or p in window]
        others = [p for p in eligible if p not in fixed]
        chosen = naive.top([score[p] for p in others], stay - len(fixed), self.margin)
        self.cached = self.cached[: self.pinned] + sorted(fixed + [others[i] for i in chosen])

        self.observed = [
            self.farthest(head, beacons + recent) for head, beacons in enumerate(self.beacons)
        ]
        self.beacons = self.observed if self.brink else None

    def score(self, now: int, recent: Sequence[int]) -> dict[int, float]:
        """Step 4: by position of the cached token."""
        assert self.beacons is not None
        keys = [self.keys[p] for p in self.cached]
        rows = []
        for head, queries in enumerate(self.queries):
            placed = [(beacon, now) for beacon in self.beacons[head]]
            placed += [(position, position) for position in recent]
            for token, position in placed:
                query = naive.rotate(
                    queries[token], position, self.scenario.frequencies, self.scenario.neox
                )
                visible = len([p for p in self.cached if p <= position])
                rows.append(naive.attention(query, keys, visible, SCALE))
        return {
            position: self.aggregate([row[i] for row in rows])
            for i, position in enumerate(self.cached)
        }

    def aggregate(self, weights: Sequence[float]) -> float:
        if self.scenario.aggregation == "max":
            return max(weights)
        if self.scenario.aggregation == "mean":
            return math.fsum(weights) / len(weights)
        return SOFTNESS * math.log(math.fsum(math.exp(w / SOFTNESS) for w in weights))

    def farthest(self, head: int, positions: Sequence[int]) -> list[int]:
        points = [self.queries[head][p] for p in positions]
        chosen = naive.farthest_points(points, self.scenario.n_beacon, self.margin)
        return [positions[i] for i in sorted(chosen)]


class Pool:
    """Slots handed out page by page in random order; NaN wherever nobody holds anything."""

    def __init__(self, page_size: int, seed: int = 0) -> None:
        # Keys and values of a slot lie side by side, so both pools are strided views.
        self.storage = torch.full((LAYERS, SLOTS, 2, KV_HEADS, DIM), math.nan)
        self.page_size = page_size
        generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(SLOTS // page_size, generator=generator).tolist()

    def extend(self, row: list[int]) -> None:
        """Give one more slot to a row."""
        if len(row) % self.page_size == 0:
            self.page = self.free.pop()
            row.append(self.page * self.page_size)
        else:
            row.append(row[-1] + 1)

    def shorten(self, row: list[int], held: int) -> None:
        """Take back everything past ``held`` and poison it."""
        gone = row[held:]
        del row[held:]
        assert held % self.page_size == 0
        self.free = list({slot // self.page_size for slot in gone}) + self.free
        self.storage[:, gone] = math.nan

    def leave(self, row: list[int], pinned: int, kept: int) -> list[int]:
        """The row of a request that keeps ``kept`` tokens and leaves ``pinned`` to the tree."""
        own = min(kept, (len(row) - pinned) // self.page_size * self.page_size)
        target = row[pinned : pinned + own]
        while len(target) < kept:
            self.extend(target)
        return target

    def view(self, table: RopeTable) -> KVView:
        return KVView(list(self.storage[:, :, 0]), list(self.storage[:, :, 1]), SCALE, table)


class Request:
    """One request driven through the package, beside its replays."""

    def __init__(self, scenario: Scenario, pool: Pool) -> None:
        self.scenario, self.pool = scenario, pool
        self.data = Data(scenario)
        page_size = scenario.page_size
        self.state = RequestState(
            scenario.config, policies.create(scenario.config, page_size), page_size
        )
        assert self.state.shape is not None
        self.buffer = QueryBuffer(self.state.shape, LAYERS, HEADS, DIM, torch.float32, "cpu")
        self.buffer.rows.fill_(math.nan)
        self.replays = [
            [Replay(scenario, self.data, layer, head) for head in range(KV_HEADS)]
            for layer in range(LAYERS)
        ]
        self.row: list[int] = []
        self.pinned = 0
        self.length = 0
        self.evictions = 0
        self.carried: list[int] = []
        self.token_of = [
            [
                {tuple(vector): p for p, vector in enumerate(self.data.queries[:, n, h].tolist())}
                for h in range(HEADS)
            ]
            for n in range(LAYERS)
        ]

    @property
    def table(self) -> RopeTable:
        angles = torch.arange(self.scenario.length)[:, None] * torch.tensor(
            self.scenario.frequencies, dtype=torch.float64
        )
        return RopeTable(torch.cat((angles.cos(), angles.sin()), -1).float(), self.scenario.neox)

    def store(self, count: int) -> range:
        """Compute ``count`` more tokens into the pool; returns their positions."""
        positions = range(self.length, self.length + count)
        for position in positions:
            self.pool.extend(self.row)
            self.pool.storage[:, self.row[-1], 0] = self.data.keys[position]
            self.pool.storage[:, self.row[-1], 1] = self.data.values[position]
        self.length += count
        return positions

    def prefill(self) -> None:
        for count in self.scenario.chunks:
            positions = self.store(count)
            if self.scenario.in_tree:
                self.pinned = self.length // self.scenario.page_size * self.scenario.page_size
            observed = self.state.observed_prompt
            recent = self.state.after_prefill(count, self.pinned, self.length)
            for layer in range(LAYERS):
                stretch = self.data.queries[positions.start : positions.stop, layer]
                self.buffer.fold_prompt(layer, stretch, positions.start, observed, recent)
            for replay in self.everywhere():
                replay.prefill(positions, self.pinned)
        self.check_buffer()

    def token(self) -> Work:
        (position,) = self.store(1)
        self.buffer.append(self.state.after_token(), self.data.queries[position])
        lengths = self.state.lengths(self.pinned, len(self.row))
        plan = self.state.plan(lengths, self.state.allowance(lengths, share=self.pinned))
        if plan.eviction is None:
            return Work(plan, self.state.policy, self.buffer)
        if plan.eviction.detach:
            self.target = self.pool.leave(self.row, self.pinned, plan.eviction.kept)
        else:
            self.target = self.row[self.pinned : plan.eviction.held_after]
        slots = torch.tensor(self.row), torch.tensor(self.target)
        return Work(plan, self.state.policy, self.buffer, *slots)

    def follow(self, work: Work) -> None:
        """Replay the newest token, and compare everything."""
        evicted = {replay.token(self.length - 1) for replay in self.everywhere()}
        eviction = work.plan.eviction
        assert evicted == {eviction is not None}
        if eviction is not None:
            assert eviction.lengths.logical == self.length
            self.evictions += 1
            self.carried.append(work.plan.roll.carried)
            if eviction.detach:
                self.kept_by_tree = self.row[: self.pinned]
                left_over = [slot for slot in self.row[self.pinned :] if slot not in self.target]
                self.row, self.pinned = self.target, 0
                self.pool.storage[:, left_over] = math.nan
            else:
                self.pool.shorten(self.row, eviction.held_after)
        self.check_pool()
        self.check_buffer()

    def check_pool(self) -> None:
        """Each head's slots hold, bit for bit, the tokens that its replay kept."""
        for layer, replays in enumerate(self.replays):
            for head, replay in enumerate(replays):
                assert len(replay.cached) == len(self.row)
                held = self.pool.storage[layer, self.row, :, head]
                assert torch.equal(held[:, 0], self.data.keys[replay.cached, layer, head])
                assert torch.equal(held[:, 1], self.data.values[replay.cached, layer, head])

    def check_buffer(self) -> None:
        phase = self.state.phase
        # Before the beacons are frozen, the newest queries are among the observed.
        chosen = phase.filled - (phase.recent if phase.frozen else 0)
        for layer, replays in enumerate(self.replays):
            for head in range(HEADS):
                replay = replays[head // GROUP]
                rows = self.buffer.rows[layer, head, : phase.filled].tolist()
                tokens = [self.token_of[layer][head][tuple(row)] for row in rows]
                assert phase.frozen == (replay.beacons is not None)
                # Order decides nothing but ties.
                assert sorted(tokens[:chosen]) == sorted(replay.observed[head % GROUP])
                newest = tokens[phase.filled - phase.recent :]
                assert newest == replay.newest[len(replay.newest) - phase.recent :]

    def everywhere(self) -> list[Replay]:
        return [replay for layer in self.replays for replay in layer]

    @property
    def margin(self) -> float:
        return min(replay.margin.smallest for replay in self.everywhere())


def play(scenario: Scenario) -> Request:
    pool = Pool(scenario.page_size)
    request = Request(scenario, pool)
    request.prefill()
    view = pool.view(request.table)
    for _ in range(scenario.generated):
        work = request.token()
        before = pool.storage.clone()
        compactor.run([work], view)
        if work.plan.eviction is not None:
            before[:, request.target] = pool.storage[:, request.target]
        assert_same(pool.storage, before)
        request.follow(work)
    assert request.margin > MARGIN, "a near-tie: choose another seed"
    return request


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, with NaN in the same places."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


SCENARIOS = {
    "prompt in the tree": Scenario(generated=150),
    "prompt in the tree, page 16": Scenario(page_size=16, generated=150),
    "private prompt": Scenario(chunks=(20,), in_tree=False, generated=130),
    "private prompt, page 16": Scenario(page_size=16, in_tree=False, generated=130),
    "short prompt": Scenario(chunks=(3,), in_tree=False, generated=150),
    "other sizes": Scenario(n_beacon=5, n_recent=7, n_prefix=1, budget=48, in_tree=False),
    "recent queries only": Scenario(n_beacon=0, n_recent=8, n_prefix=1, budget=48, in_tree=False),
    "more beacons than recent": Scenario(n_beacon=12, n_recent=3, budget=40, in_tree=False),
    "no prefix": Scenario(n_prefix=0, in_tree=False),
    "an eighth freed": Scenario(budget=128, keep_ratio=7 / 8, chunks=(100,), in_tree=False),
    "mean": Scenario(aggregation="mean", in_tree=False),
    "soft maximum": Scenario(aggregation="logsumexp", in_tree=False),
    "interleaved pairs, half a head": Scenario(neox=False, rotary_dim=4, in_tree=False),
    "chunks in the tree": Scenario(chunks=(17, 40, 5), page_size=16, generated=150),
    "chunks, private": Scenario(chunks=(10, 18, 9), in_tree=False),
}
# The prompt is left to the tree by the first eviction.
LEAVING = {
    "copy": Scenario(shared_prefix="copy"),
    "copy, page 16": Scenario(shared_prefix="copy", page_size=16, generated=130),
    "copy, own slots suffice": Scenario(shared_prefix="copy", chunks=(10,), generated=150),
    "copy, prompt over the budget": Scenario(shared_prefix="copy", chunks=(60, 35), generated=90),
    "copy, prompt over the budget, page 16": Scenario(
        shared_prefix="copy", chunks=(60, 35), page_size=16, generated=90
    ),
    "auto, a large prompt": Scenario(shared_prefix="auto", chunks=(50,)),
}
# An eviction that frees fewer tokens than are recent: the newest queries carry over.
CARRYING = {
    "frees 6": Scenario(budget=48, keep_ratio=7 / 8, in_tree=False, generated=60),
    "frees 6, tree": Scenario(budget=48, keep_ratio=7 / 8, generated=90),
    "frees 1": Scenario(budget=40, keep_ratio=0.99, chunks=(25,), in_tree=False, generated=20),
}
OVERSIZED = {
    "at once": Scenario(chunks=(90,), in_tree=False),
    "in chunks": Scenario(chunks=(50, 40), in_tree=False),
    "page 16": Scenario(chunks=(90,), in_tree=False, page_size=16),
    "a last chunk shorter than the window": Scenario(chunks=(60, 30, 5), in_tree=False),
    "past the brink": Scenario(chunks=(63,), in_tree=False),
    "one short of the budget": Scenario(chunks=(71,), in_tree=False),
    "at the brink": Scenario(chunks=(56,), in_tree=False),
    "chunks past the brink, then little kept free": Scenario(
        budget=48, keep_ratio=7 / 8, chunks=(60, 4), in_tree=False, generated=30
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_life_of_a_request(name: str) -> None:
    request = play(SCENARIOS[name])
    assert request.evictions >= 3
    assert not any(request.carried)


@pytest.mark.parametrize("name", LEAVING)
def test_leaving_the_tree(name: str) -> None:
    """All tokens are chosen from, once; what the tree owns is never written to."""
    request = play(LEAVING[name])
    assert request.evictions >= 2
    assert request.pinned == 0
    positions = range(len(request.kept_by_tree))
    held = request.pool.storage[:, request.kept_by_tree]
    expected = torch.stack((request.data.keys[positions], request.data.values[positions]), dim=2)
    assert torch.equal(held, expected.transpose(0, 1))


def test_auto_pins_a_small_prompt() -> None:
    request = play(Scenario(shared_prefix="auto", chunks=(30,), generated=90))
    assert request.evictions >= 2
    assert request.pinned == 30
    assert len(request.row) < request.scenario.budget


@pytest.mark.parametrize("name", CARRYING)
def test_newest_queries_carry_over(name: str) -> None:
    scenario = CARRYING[name]
    request = play(scenario)
    assert request.evictions >= 3
    freed = scenario.budget - int(scenario.budget * scenario.keep_ratio)
    assert set(request.carried) == {scenario.n_recent - freed}


@pytest.mark.parametrize("name", OVERSIZED)
def test_prompts_near_or_over_the_budget(name: str) -> None:
    """A private prompt larger than the budget is evicted from after the first decoded token."""
    scenario = OVERSIZED[name]
    request = play(scenario)
    assert request.evictions >= 2
    assert len(request.row) < scenario.budget


@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_in_one_batch_do_not_mix(page_size: int) -> None:
    """Two requests share a pool and are worked on together, each at its own length."""
    pool = Pool(page_size)
    first = Scenario(page_size=page_size, in_tree=False)
    second = replace(first, chunks=(30,), in_tree=True, seed=1)
    pair = [Request(first, pool), Request(second, pool)]
    for request in pair:
        request.prefill()
    view = pool.view(pair[0].table)
    for _ in range(first.generated):
        work = [request.token() for request in pair]
        compactor.run(work, view)
        for request, done in zip(pair, work, strict=True):
            request.follow(done)
    assert all(request.evictions >= 2 for request in pair)
    assert all(request.margin > MARGIN for request in pair)


def test_an_eviction_per_head_and_layer() -> None:
    """Heads and layers choose their own tokens: no two kept sets of this run are alike."""
    request = play(replace(SCENARIOS["private prompt"], generated=60))
    kept = {tuple(replay.cached) for replay in request.everywhere()}
    assert len(kept) == LAYERS * KV_HEADS


def test_half_precision_buffer() -> None:
    """Queries are stored in the model's dtype, and a chosen row is one of those appended."""
    buffer = QueryBuffer(BufferShape(16, 16), 1, 2, DIM, torch.bfloat16, "cpu")
    prompt = torch.randn(40, 2, DIM, generator=torch.Generator().manual_seed(0))
    buffer.fold_prompt(0, prompt, 0, 0, 0)
    assert buffer.rows.dtype == torch.bfloat16
    stored = prompt.bfloat16()
    for head in range(2):
        expected = naive.farthest_points(stored[:, head].double().tolist(), 16)
        assert torch.equal(buffer.rows[0, head, :16], stored[sorted(expected), head])
