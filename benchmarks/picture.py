"""The picture on the README's first screen: what a small cache still holds of one long thought.

    python -m benchmarks.picture        # writes docs/thought.png

The first RevisitChain of seed 0, answered by a real server under each method and traced there.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sglang_beacon.lab import report
from sglang_beacon.lab.revisit_chain import Chain, RevisitChain, grade, steps_right
from sglang_beacon.lab.serving import Server

PICTURE = Path(__file__).parents[1] / "docs" / "thought.png"
METHODS = {"streaming": "StreamingLLM", "rpc": "RPC", "beacon": "BeaconKV"}
BUDGET = 192
BLUE, ORANGE = "#0072b2", "#d55e00"
# Its trace, and the tokens said.
Answer = tuple[Mapping[str, Any], list[int]]


def held_map(trace: Mapping[str, Any]) -> np.ndarray:
    """Share of the traced heads that hold each token [moments, tokens], by tokens said."""
    length = len(trace["tokens"])
    shares = np.tril(np.ones((length, length)))
    for eviction in trace["evictions"]:
        seen = eviction["seen"]
        # Until the next eviction, which overwrites what follows.
        shares[seen:, :seen] = np.divide(report.shares(eviction["kept"], length)[:seen], 100)
    return shares


def looked_up(chain: Chain) -> list[tuple[int, int]]:
    """Where each step finds its answer, and where it says it."""
    place = {chain.tokens[key]: key + 1 for key in chain.facts[::2]}
    return [(place[chain.tokens[revisit - 1]], revisit) for revisit in chain.revisits]


def traced(server: Server, chain: Chain, method: str, directory: Path) -> Answer:
    """One method's trace and answer."""
    asked = {"kv_policy": method, "kv_trace": True}
    reply = server.generate(chain.prompt, len(chain.answer), rid=method, custom_params=asked)
    return report.read(directory / f"{method}.json"), reply["tokens"]


def draw(chain: Chain, results: Mapping[str, Answer]) -> None:
    """One panel for each method."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 3.9), sharey=True, layout="constrained")
    for axes, (method, (trace, said)) in zip(panels, results.items(), strict=True):
        shares = held_map(trace)
        axes.imshow(shares, cmap="Greys", vmin=0, vmax=1.25, aspect="auto", interpolation="none")
        graded = grade(chain, said)
        lookups = looked_up(chain)
        right = [(x, y) for x, y in lookups if y < chain.n_prompt + graded.correct_tokens]
        axes.scatter(*zip(*right, strict=True), s=9, color=BLUE, label="looked up, right")
        if not graded.exact:
            wrong = lookups[len(right)]
            axes.scatter(
                *wrong, s=70, color=ORANGE, marker="X", edgecolors="w", label="first error"
            )
        steps = int(steps_right(chain, graded))
        axes.set_title(f"{METHODS[method]}: {steps} of {len(lookups)} steps", fontsize=11)
        axes.set_xlabel("token of the thought")
        axes.legend(loc="upper right", fontsize=8, framealpha=1)
    panels[0].set_ylabel("tokens thought so far")
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    """Ask, trace and draw."""
    chain = RevisitChain().sample(random.Random(0))
    directory = Path(tempfile.mkdtemp(prefix="beacon-picture-"))
    config = {"shared_prefix": "copy", "trace_directory": str(directory)}
    flags = ["--dtype", "float32", "--random-seed", "0", "--kv-policy", "beacon"]
    flags += ["--kv-budget", str(BUDGET), "--kv-policy-config", json.dumps(config)]
    with Server(*flags, model=RevisitChain.checkpoint, threads=1) as server:
        results = {method: traced(server, chain, method, directory) for method in METHODS}
    for method, (trace, said) in results.items():
        print(f"{method:14s} {steps_right(chain, grade(chain, said)):.1f} steps", trace["policy"])
    draw(chain, results)


if __name__ == "__main__":
    main()
