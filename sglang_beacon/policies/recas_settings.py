"""The settings of RECAS, checked where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from sglang_beacon.config import MAX_TOKENS, ConfigError

SELECTORS = ("auto", "none", "exact", "pages", "sketch")


@dataclass(frozen=True)
class RecasSettings:
    """How RECAS weighs tokens, what error it aims at, and what a step reads.

    Attributes
    ----------
    relevance_weight, history_weight, evidence_weight : float
        The parts of a token's utility, each signal divided by its largest value first.
    decay : float
        What history is multiplied with at each query, in (0, 1].
    note_every : int
        Queries from one whose attention is noted to the next.
    far_distance : int
        A query revisits what lies at least this many tokens back; 0: ``2 * n_recent``.
    top_keys, look_back : int
        A query looks back if its ``top_keys`` favourite keys are ``look_back`` tokens away on
        average; then all it attends to beyond ``n_recent`` is revisited.
    delimiters : tuple of int
        Token ids after which a new thought begins: what lies before one is revisited from then on.
    prompt_evidence : float
        Evidence that the prompt's tokens start with.
    epsilon : float
        Target for the relative error of each layer's attention output.
    alpha : float
        Share of calibrated bounds that may fail, in (0, 1).
    probe_interval : int
        Tokens from one probe of what an eviction would drop to the next.
    residuals : int
        Latest residuals that calibrate.
    max_budget : int
        Up to where the budget may grow, in eighths of it; 0: twice the budget.
    selector : str
        What a step reads of what is retained: ``"none"`` everything, ``"exact"`` all keys but only
        the values that matter, ``"pages"`` bounds on pages of keys first, ``"sketch"`` keys of a
        few bytes first. ``"auto"`` is ``"exact"`` where steps run eagerly and ``"none"`` where CUDA
        graphs do.
    ladder : tuple of int
        Sizes of an active set, in tokens.
    sketch_rank : int
        Dimensions of a sketched key.

    Raises
    ------
    ConfigError
        In one sentence that names the field.
    """

    relevance_weight: float = 1.0
    history_weight: float = 1.0
    evidence_weight: float = 10.0
    decay: float = 0.998
    note_every: int = 1
    far_distance: int = 0
    top_keys: int = 150
    look_back: int = 200
    delimiters: tuple[int, ...] = ()
    prompt_evidence: float = 0.0
    epsilon: float = 0.02
    alpha: float = 0.1
    probe_interval: int = 64
    residuals: int = 1024
    max_budget: int = 0
    selector: str = "auto"
    ladder: tuple[int, ...] = (64, 128, 256, 512, 1024)
    sketch_rank: int = 16

    def __post_init__(self) -> None:
        for name in ("relevance_weight", "history_weight", "evidence_weight", "prompt_evidence"):
            _require(0 <= getattr(self, name) < MAX_TOKENS, name, "not be negative")
        _require(0 < self.decay <= 1, "decay", "lie in (0, 1]")
        _require(0 < self.epsilon < MAX_TOKENS, "epsilon", "be positive")
        _require(0 < self.alpha < 1, "alpha", "lie between 0 and 1")
        for name in ("note_every", "top_keys", "probe_interval", "residuals", "sketch_rank"):
            _require(0 < getattr(self, name) < MAX_TOKENS, name, "be positive")
        for name in ("far_distance", "look_back", "max_budget"):
            _require(0 <= getattr(self, name) <= MAX_TOKENS, name, "not be negative")
        _require(self.selector in SELECTORS, "selector", f"be one of {', '.join(SELECTORS)}")
        _require(_are_integers(self.delimiters), "delimiters", "be a list of token ids")
        rising = all(a < b for a, b in pairwise((0, *self.ladder))) if self.ladder else False
        _require(
            _are_integers(self.ladder) and rising,
            "ladder",
            "be a list of increasing sizes in tokens",
        )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Every option of ``--kv-policy-config`` with its default."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(cls()).items()
        }

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RecasSettings:
        """Take our part of a policy's options."""
        ours: dict[str, Any] = {
            key: tuple(options[key]) if isinstance(default, list) else options[key]
            for key, default in cls.defaults().items()
        }
        return cls(**ours)


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise ConfigError(f"{name} in --kv-policy-config must {what}.")


def _are_integers(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_TOKENS for value in values)
