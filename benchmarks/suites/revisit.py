"""RevisitChain and VariableTracking: reasoning that needs its own early thoughts, exactly."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.suites.base import Outcome, Suite, Task
from sglang_beacon.lab.revisit_chain import Chain, RevisitTask, grade, sizes, steps_right
from sglang_beacon.lab.serving import Server


@dataclass
class ChainTask(Task):
    """Chains that the model must continue without an error.

    Scores: ``exact``, ``steps`` before the first error, and ``revisit_or_none``, 0 where the first
    error is not a lost revisit.
    """

    name: str
    kind: RevisitTask
    chains: int
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self._chains: list[Chain] = [self.kind.sample(draw) for _ in range(self.chains)]

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"name": self.name, **asdict(self.kind)}

    @property
    def items(self) -> Mapping[str, Any]:
        return {"count": self.chains, "seed": self.seed}

    @property
    def context(self) -> int:
        return len(self._chains[0].tokens)

    @property
    def decoding(self) -> Mapping[str, Any]:
        drawn = {"seed": self.seed} if self.temperature else {}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "new_tokens": len(self._chains[0].answer),
            **drawn,
        }

    def run(self, server: Server, custom_params: Mapping[str, Any]) -> Outcome:
        replies = server.generate_all(
            [
                {
                    "input_ids": chain.prompt,
                    "max_new_tokens": len(chain.answer),
                    "temperature": self.temperature,
                    "top_p": self.top_p,
                    "custom_params": dict(custom_params),
                }
                for chain in self._chains
            ]
        )
        grades = [
            grade(chain, reply["tokens"])
            for chain, reply in zip(self._chains, replies, strict=True)
        ]
        return Outcome(
            {
                "exact": [float(each.exact) for each in grades],
                "steps": list(map(steps_right, self._chains, grades)),
                "revisit_or_none": [float(each.lost_revisit is not False) for each in grades],
            },
            [reply["meta_info"] for reply in replies],
        )


def suite(
    name: str,
    kind: type[RevisitTask],
    chains: int,
    seed: int = 0,
    sampled: bool = False,
) -> Suite:
    """The main task of a kind, and the same with other sizes."""
    how: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95} if sampled else {}
    tasks = [ChainTask(each, task, chains, seed, **how) for each, task in sizes(kind).items()]
    pool = ("--max-total-tokens", "80000", "--skip-tokenizer-init")
    return Suite(name, kind.checkpoint, tasks, (192, 160, 128, 112, 96), pool)
