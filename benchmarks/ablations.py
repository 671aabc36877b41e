"""BeaconKV's parts taken away or made ideal, on RevisitChain, in the simulator.

    python -m benchmarks.ablations --chains 16 --budgets 192 128

What a server can do is an option of the policy: other numbers of beacons, mean and log-sum-exp, no
alignment. What it cannot, since it takes all queries that ever were, is simulated here: FPS and
k-means over the full history, and beacons that a group of query heads shares. Refreshing beacons
when a revisit is seen, and not every 16 tokens, has nothing to add: whatever came since the latest
refresh is among the recent queries of an eviction.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.bootstrap import mean_difference, paired
from benchmarks.conditions import store
from sglang_beacon import ops
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import Fold
from sglang_beacon.lab.revisit_chain import RevisitChain, grade, steps_right
from sglang_beacon.lab.simulated_run import Run
from sglang_beacon.lab.simulator import Simulator
from sglang_beacon.runtime.query_buffer import QueryBuffer

# From [heads, M, D] queries to the chosen ones [heads, count, D].
Choice = Callable[[torch.Tensor, int], torch.Tensor]


def farthest(queries: torch.Tensor, count: int) -> torch.Tensor:
    """FPS over all of them."""
    return _take(queries, ops.farthest_point_sample(queries, count))


def _take(queries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The queries [heads, M, D] of some indices [heads, n]."""
    return queries.gather(1, index[..., None].expand(*index.shape, queries.shape[-1]))


def medoids(queries: torch.Tensor, count: int, rounds: int = 12) -> torch.Tensor:
    """The query nearest to each centre of spherical k-means that starts from `farthest`."""
    unit = torch.nn.functional.normalize(queries.float(), dim=-1)
    centres = torch.nn.functional.normalize(farthest(unit, count), dim=-1)
    for _ in range(rounds):
        nearest = (unit @ centres.transpose(1, 2)).argmax(-1)
        member = torch.nn.functional.one_hot(nearest, centres.shape[1]).float()
        sums = member.transpose(1, 2) @ unit
        # A centre that lost all its members stays where it was.
        centres = torch.where(sums.norm(dim=-1, keepdim=True) > 0, sums, centres)
        centres = torch.nn.functional.normalize(centres, dim=-1)
    return _take(queries, (centres @ unit.transpose(1, 2)).argmax(-1))


def shared_by(group: int, queries: torch.Tensor, count: int) -> torch.Tensor:
    """FPS over the queries of all heads of a group together; they all observe with the same."""
    heads, _, dim = queries.shape
    together = queries.reshape(heads // group, -1, dim)
    return farthest(together, count).repeat_interleave(group, 0)


class HistoryBuffer(QueryBuffer):
    """A query buffer that never forgets: each fold chooses its beacons from all that was seen."""

    choice: Choice

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[torch.Tensor]] = [[] for _ in range(len(self.rows))]

    def fold_prompt(
        self, layer: int, queries: torch.Tensor, begin: int, observed: int, recent: int
    ) -> None:
        super().fold_prompt(layer, queries, begin, observed, recent)
        self.seen[layer].extend(queries.to(self.rows.dtype))

    def append(self, row: int, queries: torch.Tensor) -> None:
        super().append(row, queries)
        for layer, new in enumerate(queries):
            self.seen[layer].append(new)

    def compress(self, fold: Fold) -> None:
        super().compress(fold)
        count = min(self.shape.n_beacon, fold.filled)
        for layer, seen in enumerate(self.seen):
            history = torch.stack(seen[: len(seen) - fold.carried], dim=1)
            self.rows[layer, :, :count] = type(self).choice(history, count)


def simulator_with(choice: Choice) -> type[Simulator]:
    """A simulator whose beacons are chosen from the full history."""

    class Buffer(HistoryBuffer):
        pass

    Buffer.choice = staticmethod(choice)

    class HistoryRun(Run):
        def _new_buffer(self) -> QueryBuffer:
            plain = super()._new_buffer()
            layers, heads, _, dim = plain.rows.shape
            return Buffer(plain.shape, layers, heads, dim, plain.rows.dtype, "cpu")

    class HistorySimulator(Simulator):
        run_class = HistoryRun

    return HistorySimulator


def variants(group: int) -> dict[str, tuple[type[Simulator], dict[str, Any], int]]:
    """Simulator, options of the policy, and recent queries of each."""
    ratios = {
        f"{beacons} beacons, {32 - beacons} recent": (
            Simulator,
            {"n_beacon": beacons},
            32 - beacons,
        )
        for beacons in (0, 8, 24, 28, 31)
    }
    return {
        "16 beacons, 16 recent": (Simulator, {}, 16),
        **ratios,
        "mean": (Simulator, {"aggregation": "mean"}, 16),
        "logsumexp": (Simulator, {"aggregation": "logsumexp"}, 16),
        "no alignment": (Simulator, {"align": False}, 16),
        "FPS over the full history": (simulator_with(farthest), {}, 16),
        "k-means over the full history": (simulator_with(medoids), {}, 16),
        "beacons shared by a group": (simulator_with(partial(shared_by, group)), {}, 16),
    }


def main() -> None:
    """Run all variants on the same chains; prints steps before the first error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[192, 128])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        RevisitChain.checkpoint, dtype=torch.float32
    ).eval()
    draw = random.Random(1)
    chains = [RevisitChain().sample(draw) for _ in range(args.chains)]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for budget in args.budgets:
        steps: dict[str, list[float]] = {}
        base = KVPolicyConfig(policy="beacon", budget=budget, shared_prefix="copy")
        for name, (kind, options, recent) in variants(group).items():
            simulator = kind(model, replace(base, options=options, n_recent=recent))
            steps[name] = []
            for chain in chains:
                said = simulator.generate(chain.prompt, len(chain.answer)).tokens
                steps[name].append(steps_right(chain, grade(chain, said)))
            lost = paired(next(iter(steps.values())), steps[name], mean_difference)
            print(f"{budget:4d} {name:32s} {fmean(steps[name]):6.1f}   16:16 minus this {lost}")
        store("ablations", {"study": "ablations", "budget": budget, "steps": steps, "seed": 1})


if __name__ == "__main__":
    main()
