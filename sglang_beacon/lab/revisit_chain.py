"""Two small tasks whose reasoning must look back at its own thoughts, and how they are graded.

No model that fits a laptop reasons for long, so these tasks isolate what long reasoning does: it
states facts, leaves them, and needs them again at irregular distances. The facts are said during
decoding, so protecting the prompt cannot save a policy that forgets them.

* `RevisitChain` states a table once and looks it up forever: every fact stays alive.
* `VariableTracking` overwrites its facts while it uses them: only the newest value of each counts.

Everything but the lookups follows from the last 16 tokens, so that an error is a lost revisit; a
step takes 7 tokens, coprime with the usual 16 of rings and eviction periods, so that no phase is
favoured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

# Of each task a Qwen3 of 0.8 M parameters that does it, trained by `revisit_training`.
CHECKPOINTS = Path(__file__).parent / "checkpoints"

MAX_KEYS = 24
N_ADDENDS = 3
STEP_TOKENS = 7

_WORDS = ("<pad>", "<s>", "size", "map", "shift", "set", "think", "go", "step", "</s>")
# Apart from each other, so that a key is found where it is a key.
_KEYS = tuple(f"k{key}" for key in range(MAX_KEYS))
_GIVEN = tuple(f"p{value}" for value in range(MAX_KEYS))
_VALUES = tuple(f"v{value}" for value in range(MAX_KEYS))
_ADDENDS = tuple(f"+{addend}" for addend in range(N_ADDENDS))
_FILLERS = ("hm", "so", "ok")
VOCABULARY = (*_WORDS, *_KEYS, *_GIVEN, *_VALUES, *_ADDENDS, *_FILLERS)
_ID = {word: token for token, word in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class Chain:
    """One instance of a task.

    Attributes
    ----------
    tokens
        Prompt and the only correct continuation.
    n_prompt
        Tokens of the prompt; the rest is for the model to say.
    first_step
        Index of the token that opens the first step.
    revisits
        Indices of the tokens that can only be known by looking far back.
    facts
        Indices that hold the answers: what a keep-set must have to be exact.
    until
        For each of them, the first index at which it is no longer true, or the chain's length.
    """

    tokens: tuple[int, ...]
    n_prompt: int
    first_step: int
    revisits: tuple[int, ...]
    facts: tuple[int, ...]
    until: tuple[int, ...]

    @property
    def prompt(self) -> list[int]:
        """What the model is given."""
        return list(self.tokens[: self.n_prompt])

    @property
    def answer(self) -> list[int]:
        """What the model must say."""
        return list(self.tokens[self.n_prompt :])


@dataclass(frozen=True)
class Grade:
    """How far an answer went.

    Attributes
    ----------
    correct_tokens
        Tokens before the first wrong one, of those said.
    lost_revisit
        Whether the first wrong token is one that only a look far back tells; None without an error.
    """

    correct_tokens: int
    lost_revisit: bool | None

    @property
    def exact(self) -> bool:
        """Whether nothing was wrong."""
        return self.lost_revisit is None


def steps_right(chain: Chain, graded: Grade) -> float:
    """Steps before the first wrong token, and what of the step it is in was right."""
    said_before = chain.first_step - chain.n_prompt
    return max(graded.correct_tokens - said_before, 0) / STEP_TOKENS


def grade(chain: Chain, said: Sequence[int]) -> Grade:
    """Compare what a model said with the correct continuation.

    Raises
    ------
    ValueError
        When fewer tokens were said than the continuation has.
    """
    answer = chain.answer
    if len(said) < len(answer):
        raise ValueError(f"{len(said)} tokens said, {len(answer)} needed")
    wrong = next((i for i, token in enumerate(answer) if said[i] != token), None)
    if wrong is None:
        return Grade(len(answer), None)
    return Grade(wrong, chain.n_prompt + wrong in chain.revisits)


@dataclass(frozen=True)
class RevisitChain:
    """A shifted permutation is written down, then walked.

    Prompt: the largest key, a permutation ``pi`` of the keys and a shift ``c`` of 1 to 3. First
    thought: the table ``rho(k) = pi(k) + c``. Second thought: steps ``step +a k rho(k) hm so ok``,
    the next key being ``rho(k) + a``, and ``a`` cycling through its values.
    """

    name: ClassVar[str] = "revisit_chain"
    checkpoint: ClassVar[Path] = CHECKPOINTS / name
    n_keys: int = 16
    n_steps: int = 72

    def sample(self, draw: random.Random) -> Chain:
        """Draw one chain."""
        n = self.n_keys
        pi = draw.sample(range(n), n)
        order = draw.sample(range(n), n)
        shift = draw.randint(1, 3)
        rho = [(value + shift) % n for value in pi]
        tokens = [_ID["<s>"], _ID["size"], _key(n - 1), _ID["map"]]
        for key in order:
            tokens += [_key(key), _ID[_GIVEN[pi[key]]]]
        tokens += [_ID["shift"], _ID[_GIVEN[shift]], _ID["think"]]
        n_prompt = len(tokens)
        for key in order:
            tokens += [_key(key), _value(rho[key])]
        facts = range(n_prompt, len(tokens))
        tokens.append(_ID["go"])
        first_step = len(tokens)
        revisits = []
        key = order[0]
        for step in range(self.n_steps):
            addend = step % N_ADDENDS
            revisits.append(len(tokens) + 3)
            tokens += [_ID["step"], _addend(addend), _key(key), _value(rho[key])]
            tokens += [_ID[filler] for filler in _FILLERS]
            key = (rho[key] + addend) % n
        forever = (len(tokens),) * len(facts)
        return Chain(tuple(tokens), n_prompt, first_step, tuple(revisits), tuple(facts), forever)


@dataclass(frozen=True)
class VariableTracking:
    """Variables are read and overwritten in turn.

    Prompt: the largest key, and a value for every key. Steps ``step +a k value k value+1 hm`` read
    the newest value of ``k`` and write the next one; the next key is ``value + a``.
    """

    name: ClassVar[str] = "variable_tracking"
    checkpoint: ClassVar[Path] = CHECKPOINTS / name
    n_keys: int = 16
    n_steps: int = 72

    def sample(self, draw: random.Random) -> Chain:
        """Draw one chain."""
        n = self.n_keys
        values = draw.sample(range(n), n)
        order = draw.sample(range(n), n)
        tokens = [_ID["<s>"], _ID["size"], _key(n - 1), _ID["set"]]
        newest, facts, until = {}, [], []
        for key in order:
            newest[key] = len(tokens)
            tokens += [_key(key), _value(values[key])]
        tokens += [_ID["think"]]
        n_prompt = first_step = len(tokens)
        revisits = []
        key = order[0]
        for step in range(self.n_steps):
            addend = step % N_ADDENDS
            value, new = values[key], (values[key] + 1) % n
            revisits.append(len(tokens) + 3)
            tokens += [_ID["step"], _addend(addend), _key(key), _value(value)]
            facts += [newest[key], newest[key] + 1]
            until += [len(tokens)] * 2
            newest[key] = len(tokens)
            tokens += [_key(key), _value(new), _ID[_FILLERS[0]]]
            values[key], key = new, (value + addend) % n
        for place in newest.values():
            facts += [place, place + 1]
            until += [len(tokens)] * 2
        return Chain(
            tuple(tokens), n_prompt, first_step, tuple(revisits), tuple(facts), tuple(until)
        )


RevisitTask = RevisitChain | VariableTracking
TASKS: dict[str, type[RevisitTask]] = {task.name: task for task in (RevisitChain, VariableTracking)}


def sizes(kind: type[RevisitTask]) -> dict[str, RevisitTask]:
    """The sizes of a task that models are accepted and methods compared at, by name."""
    return {
        kind.name: kind(),
        f"{kind.name}_8_keys": kind(n_keys=8),
        f"{kind.name}_24_keys": kind(n_keys=24),
        f"{kind.name}_200_steps": kind(n_steps=200),
    }


def _key(key: int) -> int:
    return _ID[_KEYS[key]]


def _value(value: int) -> int:
    return _ID[_VALUES[value]]


def _addend(addend: int) -> int:
    return _ID[_ADDENDS[addend]]


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer of both tasks, one word a token, as Hugging Face files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(_ID), unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<pad>",
    ).save_pretrained(directory)
