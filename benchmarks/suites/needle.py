"""A fact in a long text, asked for at the end: in the prompt, or in what was generated.

Text said during decoding is evicted as it comes, a prompt only once decoding begins; so the same
needle is tried in both places. Haystacks are the essays of `perplexity`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.suites.base import Outcome, Suite, Task
from benchmarks.suites.perplexity import FLAGS, REQUIREMENT, essays, force
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.serving import Server

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = " The magic number of {city} is {number}. "
QUESTION = (
    "\n\nQuestion: What is the magic number of {city}?\nAnswer: The magic number of {city} is"
)
CITIES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Prague", "Berlin", "Madrid")


@dataclass
class NeedleTask(Task):
    """Needles at several depths of a text; ``exact``: the number is said first.

    The question is always said during decoding, so that evictions take place before it.
    """

    model: Path
    length: int
    generated: bool
    per_depth: int = 4
    seed: int = 0
    answer_tokens: int = 8
    prompt: int = 8

    def __post_init__(self) -> None:
        self.name = f"needle_{'generated' if self.generated else 'prompt'}_{self.length}"
        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        draw = random.Random(self.seed)
        encode = self._tokenizer.encode
        texts = [text for text in essays(self.model) if len(text) >= self.length]
        self._items: list[tuple[list[int], list[int], str]] = []
        for depth in DEPTHS:
            for _ in range(self.per_depth):
                city, number = draw.choice(CITIES), str(draw.randrange(1000, 9999))
                hay = draw.choice(texts)[: self.length]
                place = int(depth * self.length)
                needle = encode(NEEDLE.format(city=city, number=number))
                text = [*hay[:place], *needle, *hay[place:]]
                self._items.append((text, encode(QUESTION.format(city=city)), number))

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "length": self.length,
            "generated": self.generated,
            "depths": list(DEPTHS),
            "needle": NEEDLE,
            "question": QUESTION,
            "cities": list(CITIES),
            "prompt": self.prompt if self.generated else self.length,
            "source": REQUIREMENT,
        }

    @property
    def items(self) -> Mapping[str, Any]:
        return {"count": len(self._items), "seed": self.seed}

    @property
    def context(self) -> int:
        return self.length + 64

    @property
    def decoding(self) -> Mapping[str, Any]:
        return {"temperature": 0.0, "forced": True, "new_tokens": self.answer_tokens}

    def run(self, server: Server, custom_params: Mapping[str, Any]) -> Outcome:
        texts = [[*text, *question] for text, question, _ in self._items]
        # All prompts of one task have about one length.
        prompt = self.prompt if self.generated else self.length
        replies = force(server, texts, prompt, custom_params, free=self.answer_tokens)
        exact = [
            float(
                self._tokenizer.decode(reply["output_ids"][-self.answer_tokens :])
                .strip()
                .startswith(number)
            )
            for reply, (_, _, number) in zip(replies, self._items, strict=True)
        ]
        return Outcome({"exact": exact}, [reply["meta_info"] for reply in replies])


def suite(per_depth: int) -> Suite:
    """Needles in 512 and 1,024 tokens of essays, for SmolLM2."""
    model = ensure()
    tasks = [
        NeedleTask(model, length, generated, per_depth)
        for length in (512, 1024)
        for generated in (False, True)
    ]
    return Suite(
        "needle", model, tasks, (256, 192, 128), (*FLAGS, "--chunked-prefill-size", "2048")
    )
