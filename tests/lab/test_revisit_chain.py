"""The tasks are what they say: only lookups need a memory, and grades count what was right."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_beacon.lab.revisit_acceptance import accept
from sglang_beacon.lab.revisit_chain import (
    STEP_TOKENS,
    VOCABULARY,
    Chain,
    RevisitChain,
    RevisitTask,
    VariableTracking,
    grade,
)

TASKS = (RevisitChain(), RevisitChain(n_keys=8), RevisitChain(24, 40), VariableTracking())
SHIPPED = (RevisitChain, VariableTracking)


def words(chain: Chain) -> list[str]:
    return [VOCABULARY[token] for token in chain.tokens]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_chains(task: RevisitTask) -> None:
    chain = task.sample(random.Random(3))
    assert chain == task.sample(random.Random(3))
    assert chain != task.sample(random.Random(4))
    assert chain.prompt + chain.answer == list(chain.tokens)
    assert len(chain.tokens) - chain.first_step == STEP_TOKENS * task.n_steps
    assert len(chain.revisits) == task.n_steps
    steps = words(chain)[chain.first_step :: STEP_TOKENS]
    assert set(steps) == {"step"}


def test_a_revisit_is_answered_by_the_table() -> None:
    chain = RevisitChain().sample(random.Random(0))
    said = words(chain)
    table = {}
    for index in chain.facts[::2]:
        table[said[index]] = said[index + 1]
    assert len(table) == 16
    pi = {said[4 + 2 * i]: said[5 + 2 * i] for i in range(16)}
    shift = int(said[chain.n_prompt - 2][1:])
    for key, value in table.items():
        assert int(value[1:]) == (int(pi[key][1:]) + shift) % 16
    for index in chain.revisits:
        assert said[index] == table[said[index - 1]]


def test_a_variable_has_its_newest_value() -> None:
    chain = VariableTracking().sample(random.Random(0))
    said = words(chain)
    values = {said[4 + 2 * i]: said[5 + 2 * i] for i in range(16)}
    for index in chain.revisits:
        key = said[index - 1]
        assert said[index] == values[key]
        assert said[index + 1] == key
        assert int(said[index + 2][1:]) == (int(values[key][1:]) + 1) % 16
        values[key] = said[index + 2]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_facts_that_are_true_answer_every_revisit(task: RevisitTask) -> None:
    chain = task.sample(random.Random(1))
    keys = list(zip(chain.facts[::2], chain.until[::2], strict=True))
    assert chain.until[::2] == chain.until[1::2]
    for index in chain.revisits:
        key = chain.tokens[index - 1]
        (fact,) = [
            fact for fact, until in keys if fact < index - 1 < until and chain.tokens[fact] == key
        ]
        assert chain.facts[chain.facts.index(fact) + 1] == fact + 1
        assert chain.tokens[fact + 1] == chain.tokens[index]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_all_but_lookups_follow_from_the_last_16_tokens(
    task: RevisitTask,
) -> None:
    """The same 15 words before are always followed by the same one, in all chains."""
    follows: dict[tuple[str, ...], str] = {}
    for seed in range(40):
        chain = task.sample(random.Random(seed))
        said = words(chain)
        for index in range(chain.first_step + 15, len(said)):
            if index not in chain.revisits:
                before = tuple(said[index - 15 : index])
                assert follows.setdefault(before, said[index]) == said[index]


def test_grades() -> None:
    chain = RevisitChain().sample(random.Random(0))
    answer = chain.answer
    right = grade(chain, answer)
    assert (right.exact, right.correct_tokens) == (True, len(answer))
    for index, lost in ((chain.revisits[5], True), (chain.revisits[5] + 1, False)):
        said = list(answer)
        said[index - chain.n_prompt] += 1
        wrong = grade(chain, said)
        assert (wrong.exact, wrong.lost_revisit) == (False, lost)
        assert wrong.correct_tokens == index - chain.n_prompt
    with pytest.raises(ValueError, match="tokens said"):
        grade(chain, answer[:-1])


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.name)
def test_the_shipped_model_is_fit(kind: type[RevisitTask]) -> None:
    """Exact with everything kept, and with the facts, the first tokens and a window."""
    model = AutoModelForCausalLM.from_pretrained(kind.checkpoint, dtype=torch.float32).eval()
    found = accept(model, kind(), 24, window=16)
    assert found["full_exact"] == 1.0
    assert found["oracle_exact"] >= 0.95
    stored = json.loads((kind.checkpoint / "acceptance.json").read_text())
    (main,) = [each for each in stored if (each["n_keys"], each["n_steps"]) == (16, 72)]
    assert main["chains"] == 400
    assert min(main["full_exact"], main["oracle_exact"]) >= 0.95


def test_the_tokenizer_says_the_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(RevisitChain.checkpoint)
    chain = RevisitChain().sample(random.Random(0))
    assert tokenizer(" ".join(words(chain)))["input_ids"] == list(chain.tokens)
