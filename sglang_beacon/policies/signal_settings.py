"""What is remembered of each token, for policies that go by more than the queries of the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_beacon.config import MAX_TOKENS, ConfigError
from sglang_beacon.core import FAVOURITES


@dataclass(frozen=True)
class SignalSettings:
    """How attention becomes signals, see `runtime.signals`.

    Attributes
    ----------
    decay : float
        What history is multiplied with at each token, in (0, 1].
    credit : float
        History that a token starts with, in attention mass: who has just come has not had its
        chance yet.
    significance : float
        Multiples of the average weight that attention has to exceed to count; a hundredth of all
        attention counts in any case.
    note_every : int
        Queries from one whose attention is noted to the next.
    prompt_queries : int
        Newest queries of each prefilled stretch of a prompt that are noted; 0: ``n_recent``.
    far_distance : int
        A query revisits what lies at least this many tokens back; 0: ``2 * n_recent``.
    top_keys, look_back : int
        A query looks back if its ``top_keys`` favourite keys are ``look_back`` tokens away on
        average; then all it attends to beyond ``n_recent`` is revisited.
    delimiters : tuple of int
        Token ids after which a new thought begins: what lies before one is revisited from then on.
    prompt_evidence : float
        Evidence that the prompt's tokens start with.
    recurrence : float
        Attention weight from which on a token counts as active, for methods that go by how often
        it becomes so; 0: not tracked.

    Raises
    ------
    ConfigError
        In one sentence that names the field.
    """

    decay: float = 0.9998
    credit: float = 0.5
    significance: float = 8.0
    note_every: int = 1
    prompt_queries: int = 0
    far_distance: int = 0
    top_keys: int = FAVOURITES
    look_back: int = 200
    delimiters: tuple[int, ...] = ()
    prompt_evidence: float = 0.0
    recurrence: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.decay <= 1, "decay", "lie in (0, 1]")
        for name in ("note_every", "top_keys"):
            require(0 < getattr(self, name) < MAX_TOKENS, name, "be positive")
        for name in (
            "credit", "significance", "prompt_queries", "far_distance", "look_back",
            "prompt_evidence",
        ):  # fmt: skip
            require(0 <= getattr(self, name) <= MAX_TOKENS, name, "not be negative")
        require(0 <= self.recurrence < 1, "recurrence", "lie in [0, 1)")
        require(are_counts(self.delimiters), "delimiters", "be a list of token ids")


def require(holds: bool, name: str, what: str) -> None:
    """Raise the error that a setting is due for."""
    if not holds:
        raise ConfigError(f"{name} in --kv-policy-config must {what}.")


def are_counts(values: tuple[Any, ...]) -> bool:
    """Whether all are integers that could count tokens."""
    return all(type(value) is int and 0 <= value <= MAX_TOKENS for value in values)
