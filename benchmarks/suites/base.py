"""What a suite is: a model, a server's flags, and tasks that score each of their items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sglang_beacon.lab.serving import Server

Scores = dict[str, list[float]]


@dataclass
class Outcome:
    """What one method made of one task.

    Attributes
    ----------
    scores
        One value per item, higher is better, by name; the first is the task's main one.
    replies
        ``meta_info`` of each item's reply.
    truncated
        Share of items that ended for lack of tokens, where they could have ended earlier.
    totals
        What `behaviour` says, where no replies tell.
    """

    scores: Scores
    replies: list[Mapping[str, Any]] = field(default_factory=list)
    truncated: float = 0.0
    totals: Mapping[str, float] = field(default_factory=dict)

    def behaviour(self) -> dict[str, float]:
        """Evictions and evicted tokens per request, largest number held: an idle policy shows."""
        seen = [reply["kv_policy"] for reply in self.replies if "kv_policy" in reply]
        if not seen:
            return dict(self.totals)
        return {
            "evictions": sum(each["evictions"] for each in seen) / len(seen),
            "evicted_tokens": sum(each["evicted_tokens"] for each in seen) / len(seen),
            "logical_tokens": sum(each["logical_tokens"] for each in seen) / len(seen),
            "held_at_end": max(each["held_tokens"] for each in seen),
        }


class Task(ABC):
    """Items of one kind that every method answers.

    Class attributes
    ----------------
    main : str
        The score that a table shows.
    """

    main: ClassVar[str] = "exact"
    name: str

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """Everything that defines the task, `name` among it."""

    @property
    @abstractmethod
    def items(self) -> Mapping[str, Any]:
        """How many items, and the seeds they were drawn by."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Most tokens that a request sees."""

    @property
    @abstractmethod
    def decoding(self) -> Mapping[str, Any]:
        """Temperature, top-p and new tokens."""

    @abstractmethod
    def run(self, server: Server, custom_params: Mapping[str, Any]) -> Outcome:
        """Ask all items, with the parameters that choose a method."""


@dataclass(frozen=True)
class Suite:
    """A model with the tasks it can be asked.

    Attributes
    ----------
    name
    model
        Directory of the checkpoint.
    tasks
    budgets
        Tokens per request to compare at, unless asked for others.
    flags
        Of the server, besides the policy's.
    server_each
        Whether every method has its own server, since requests cannot name one.
    """

    name: str
    model: Path
    tasks: Sequence[Task]
    budgets: Sequence[int]
    flags: Sequence[str] = ()
    server_each: bool = False
