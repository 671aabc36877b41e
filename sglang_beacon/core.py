"""The vocabulary: what the host knows about a request's cache, and what the device is asked to do.

One request's row of KV slots, in row positions (half-open, in tokens)::

    0               pinned              pinned + kept            held
    |   tree-owned  |   private, kept   |   private, given back   |
    |   read-only   |   rewritten       |   freed, reusable       |

The prefix tree owns ``[0, pinned)``; nobody writes there. An eviction keeps, per layer and KV
head, ``kept`` of the private tokens, moves them into the first ``kept`` private slots in position
order, and gives the rest back. One that *detaches* the request keeps ``kept`` of all its tokens,
in slots that are private, its own first and new ones after them, and leaves the tree its part::

    0                      kept                                  held
    |   private, rewritten  |   own slots left over: given back   |

Row positions count what a request *holds*; ``logical`` counts what it has *seen*, and is what
RoPE positions and stop conditions follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Keys that say how far a query looks: those it attends to most (BeaconKV, section 3).
FAVOURITES = 150


@dataclass(frozen=True)
class RequestLengths:
    """Token counts of one request after its newest token was computed.

    Attributes
    ----------
    logical : int
        Tokens seen since the start; the newest token sits at RoPE position ``logical - 1``.
    pinned : int
        Leading row positions owned by the prefix tree; a multiple of the page size.
    held : int
        Row positions in use, ``pinned`` included.
    """

    logical: int
    pinned: int
    held: int

    def __post_init__(self) -> None:
        if not 0 <= self.pinned <= self.held <= self.logical:
            raise ValueError(f"lengths out of order: {self}")

    @property
    def private(self) -> int:
        """Tokens only this request holds."""
        return self.held - self.pinned


class BufferShape(NamedTuple):
    """Rows of a query buffer: ``n_beacon`` chosen ones, then ``n_recent`` newest.

    Chosen by FPS, or the first ones of the request unless ``farthest``.
    """

    n_beacon: int
    n_recent: int
    farthest: bool = True

    @property
    def rows(self) -> int:
        return self.n_beacon + self.n_recent


class ObservationPhase(NamedTuple):
    """Where one request stands in the life of its query buffer (see `runtime.phase`).

    ``filled`` rows are in use, of which the last ``recent`` are the newest tokens' own queries, in
    order. Once the beacons are ``frozen``, those are kept apart until the eviction.
    """

    filled: int = 0
    frozen: bool = False
    recent: int = 0


NOTHING_OBSERVED = ObservationPhase()


@dataclass(frozen=True)
class EvictionPlan:
    """One eviction of one request: how many tokens stay. Which ones, the device decides.

    Attributes
    ----------
    lengths : RequestLengths
        Before the eviction.
    kept : int
        Tokens that stay, of those past ``pinned``.
    prompt_tokens : int
        Bounds how many of the leading held tokens belong to the prompt (exact for policies that
        prefer them).
    detach : bool
        Whether the tree's part is chosen from as well, and left to the tree.
    """

    lengths: RequestLengths
    kept: int
    prompt_tokens: int
    detach: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.kept < self.lengths.held - self.pinned:
            raise ValueError(f"an eviction must keep some tokens and free some: {self}")

    @property
    def pinned(self) -> int:
        """Leading row positions that stay as they are."""
        return 0 if self.detach else self.lengths.pinned

    @property
    def held_after(self) -> int:
        return self.pinned + self.kept

    @property
    def freed(self) -> int:
        return self.lengths.held - self.held_after


class Fold(NamedTuple):
    """FPS over the first ``filled`` buffer rows; the last ``carried`` of them follow the chosen."""

    filled: int
    carried: int = 0


@dataclass(frozen=True)
class RequestPlan:
    """What one request needs on the device before its next token, in this order.

    1. ``freeze``: fold the query buffer;
    2. ``eviction``: score, select, compact, with the queries described by ``observed``; or
       ``probe``: score and select as if there were one;
    3. ``roll``: fold the query buffer again.
    """

    freeze: Fold | None = None
    eviction: EvictionPlan | None = None
    observed: ObservationPhase = NOTHING_OBSERVED
    roll: Fold | None = None
    probe: EvictionPlan | None = None

    @property
    def is_empty(self) -> bool:
        return self.looks_at is None and self.freeze is None and self.roll is None

    @property
    def looks_at(self) -> EvictionPlan | None:
        """The eviction or probe that needs the request's slots."""
        return self.eviction or self.probe


class Alignment(NamedTuple):
    """Where observation queries are rotated to before they score.

    Recent queries keep their own positions and the others are rotated to the newest one, unless

    Attributes
    ----------
    unrotated : bool
        the others stay as they were before RoPE, as if at position 0; or
    future : int
        all are rotated by the average over so many positions to come.
    """

    unrotated: bool = False
    future: int = 0


class CachedKeys(NamedTuple):
    """The keys of one request in all layers, where they lie.

    Attributes
    ----------
    pools : sequence of Tensor [num_slots, H_kv, D]
        One for each layer; keys are rotated to their own positions.
    slots : Tensor [N] int64
        The request's slots in position order, the same in every layer.
    values : sequence of Tensor [num_slots, H_kv, D], or None
        For who scores by values as well.
    """

    pools: Sequence[torch.Tensor]
    slots: torch.Tensor
    values: Sequence[torch.Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and tokens: that of a score."""
        return len(self.pools), self.pools[0].shape[1], self.slots.shape[0]

    def layer(self, index: int) -> torch.Tensor:
        """A copy of one layer's keys, [H_kv, N, D]."""
        # Several times as fast as indexing, on a CPU.
        return self.pools[index].index_select(0, self.slots).transpose(0, 1)


class TokenSignals(NamedTuple):
    """What is remembered of each cached token [layers, H_kv, N] float32, see `runtime.signals`."""

    relevance: torch.Tensor
    history: torch.Tensor
    evidence: torch.Tensor
    # Where recurrence is tracked.
    activated: torch.Tensor | None = None
    interval: torch.Tensor | None = None


class Observations(NamedTuple):
    """What a policy may look at when it scores the cache of one request.

    Attributes
    ----------
    position : int
        Logical position of the newest token.
    prompt_tokens : int
        Upper bound on how many leading cached tokens belong to the prompt.
    scale : float
        Softmax scale.
    queries : Tensor [layers, H_q, R, D] float32, or None
        Observation queries, rotated as the policy's `alignment` says; None for policies that do
        not observe.
    visible : Tensor [R] int64, or None
        Leading cached tokens each query may attend to.
    signals : TokenSignals or None
        None for policies that need none.
    """

    position: int
    prompt_tokens: int
    scale: float
    queries: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    signals: TokenSignals | None = None


def favourite_count(held: int, most: int = FAVOURITES) -> int:
    """How many of its favourite keys say how far a query looks, among so many that are held.

    A tenth at most: a cache has to be long enough for them to be a choice.
    """
    return min(most, held // 10)
