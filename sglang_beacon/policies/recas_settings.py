"""The settings of RECAS, checked where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from sglang_beacon.config import MAX_TOKENS
from sglang_beacon.policies.signal_settings import SignalSettings, are_counts, require

SELECTORS = ("auto", "none", "exact", "pages", "sketch")


@dataclass(frozen=True)
class RecasSettings(SignalSettings):
    """How RECAS weighs tokens, what error it aims at, and what a step reads.

    Attributes
    ----------
    relevance_weight, history_weight, evidence_weight : float
        The parts of a token's utility, each signal divided by its largest value first.
    evidence_cap : float
        Evidence beyond which more makes no difference, in attention mass.
    epsilon : float
        Target for the relative error of each layer's attention output.
    alpha : float
        Share of calibrated bounds that may fail, in (0, 1).
    probe_interval : int
        Tokens from one probe of what an eviction would drop to the next.
    calibration_probes : int
        Latest probes whose residuals, of all layers and heads, calibrate: few, since they drift.
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
    """

    relevance_weight: float = 1.0
    history_weight: float = 1.0
    evidence_weight: float = 10.0
    evidence_cap: float = 0.05
    epsilon: float = 0.02
    alpha: float = 0.1
    probe_interval: int = 64
    calibration_probes: int = 16
    max_budget: int = 0
    selector: str = "auto"
    ladder: tuple[int, ...] = (64, 128, 256, 512, 1024)
    sketch_rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("relevance_weight", "history_weight", "evidence_weight"):
            require(0 <= getattr(self, name) < MAX_TOKENS, name, "not be negative")
        require(0 < self.epsilon < MAX_TOKENS, "epsilon", "be positive")
        require(0 < self.evidence_cap < MAX_TOKENS, "evidence_cap", "be positive")
        require(0 < self.alpha < 1, "alpha", "lie between 0 and 1")
        for name in ("probe_interval", "calibration_probes", "sketch_rank"):
            require(0 < getattr(self, name) < MAX_TOKENS, name, "be positive")
        require(0 <= self.max_budget <= MAX_TOKENS, "max_budget", "not be negative")
        require(self.selector in SELECTORS, "selector", f"be one of {', '.join(SELECTORS)}")
        rising = all(smaller < larger for smaller, larger in pairwise((0, *self.ladder)))
        require(
            are_counts(self.ladder) and rising and bool(self.ladder),
            "ladder",
            "be a list of increasing sizes in tokens",
        )

    def limit(self, budget: int) -> int:
        """Up to where a budget may grow."""
        return self.max_budget or 2 * budget

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
