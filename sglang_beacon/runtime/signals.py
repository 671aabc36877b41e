"""What RECAS remembers of each token that a request holds, per layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_beacon.core import FAVOURITES, TokenSignals, favourite_count

# Three signals of 4 bytes, or five, and a position of 8, per layer and KV head.
BYTES_PER_TOKEN = 28
# Attention that counts however few tokens share it.
SIGNIFICANT = 0.01


class Revisits(NamedTuple):
    """When attention to an earlier token is a revisit.

    Attributes
    ----------
    far : int
        A query revisits what lies at least this many tokens back.
    top : int
        Keys that decide whether a head looks back as a whole: those it attends to most.
    threshold : int
        Mean distance to them, in tokens, from which on it does; then everything outside ``recent``
        counts.
    recent : int
        The newest tokens, which are never revisited.
    """

    far: int
    top: int = FAVOURITES
    threshold: int = 200
    recent: int = 16


class Signals:
    """Relevance, history and evidence of the tokens in a request's row positions.

    They are kept by row position, so they move as the tokens do. Heads keep different tokens, so
    where a token came from is kept as well.

    Attributes
    ----------
    held : int
        Row positions in use.
    noted : float
        Queries noted, older ones decayed: the history of a token that got all attention.
    relevance : Tensor [layers, H_kv, capacity] float32
        Attention weight by the newest query noted, the largest of the group.
    history : Tensor, likewise
        Sum of those weights, older ones decayed.
    evidence : Tensor, likewise
        Sum of the weights that were revisits, not decayed.
    activated : Tensor, likewise, or None
        Logical position at which each token was last active; None where recurrence is not tracked.
        `view` has the longest time between two such as well.
    positions : Tensor [layers, H_kv, capacity] int64
        Logical position of each token.
    transition : Tensor [] int64
        Logical position of the newest delimiter; -1 before the first.
    value_norm : Tensor [layers, H_kv] float32
        The largest norm of any value so far, evicted ones among them.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        capacity: int,
        device: torch.device | str = "cpu",
        recurrence: float = 0.0,
    ) -> None:
        shape = (layers, kv_heads, capacity)
        self.held = 0
        self.noted = 0.0
        self.recurrence = recurrence
        # One tensor, so that one launch reaches all.
        kinds = len(TokenSignals._fields) if recurrence else 3
        self._table = torch.zeros(kinds, *shape, device=device)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.transition = torch.full((), -1, dtype=torch.int64, device=device)
        self.value_norm = torch.zeros(shape[:2], device=device)

    @property
    def relevance(self) -> torch.Tensor:
        return self._table[0]

    @property
    def history(self) -> torch.Tensor:
        return self._table[1]

    @property
    def evidence(self) -> torch.Tensor:
        return self._table[2]

    @property
    def activated(self) -> torch.Tensor | None:
        return self._table[3] if self.recurrence else None

    @property
    def capacity(self) -> int:
        return self.positions.shape[2]

    def view(self) -> TokenSignals:
        """The signals of the tokens held."""
        return TokenSignals(*self._table[..., : self.held])

    def extend(self, begin: int, end: int, history: float = 0.0, evidence: float = 0.0) -> None:
        """Tokens of the logical positions ``[begin, end)`` follow in the row, with a head start."""
        count = end - begin
        if self.held + count > self.capacity:
            self._grow(self.held + count)
        new = slice(self.held, self.held + count)
        device = self.positions.device
        places = begin if count == 1 else torch.arange(begin, end, device=device)
        self.positions[..., new] = places
        self._table[..., new] = 0
        if history:
            self.history[..., new] = history
        if evidence:
            self.evidence[..., new] = evidence
        if self.activated is not None:
            self.activated[..., new] = self.positions[..., new].float()
        self.held += count

    def see_values(self, pools: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        """Take in the norms of new values, in pools [num_slots, H_kv, D] of each layer."""
        norms = [pool[slots].float().norm(dim=-1).amax(0) for pool in pools]
        self.see_norms(torch.stack(norms))

    def see_norms(self, norms: torch.Tensor) -> None:
        """Take in the largest norms [layers, H_kv] of new values."""
        self.value_norm = torch.maximum(self.value_norm, norms)

    def see_token(self, token: torch.Tensor, position: int, delimiters: torch.Tensor) -> None:
        """Note whether a token [] int64 begins a new thought."""
        begins = torch.isin(token, delimiters)
        self.transition = torch.where(begins, position, self.transition)

    def note(
        self,
        weights: torch.Tensor,
        position: int,
        decay: float,
        revisits: Revisits,
        significance: float = 0.0,
    ) -> None:
        """Take in the attention of one query.

        Parameters
        ----------
        weights : Tensor [layers, H_kv, held]
            The largest attention weight of each group on every token held.
        position : int
            Logical position of the query.
        decay : float
            What earlier history is multiplied with.
        revisits : Revisits
        significance : float
            Multiples of the average weight that attention has to exceed to count; `SIGNIFICANT`
            counts in any case.
        """
        signals, positions = self.view(), self.positions[..., : self.held]
        distance = position - positions
        crosses = self._looks_back(weights, distance, revisits) | (positions < self.transition)
        revisited = (distance >= revisits.far) | (crosses & (distance >= revisits.recent))
        self.noted = self.noted * decay + 1
        signals.relevance.copy_(weights)
        # What anything gets adds up over ten thousands of queries, and would drown a revisit.
        counts_from = min(significance / self.held, SIGNIFICANT)
        counted = torch.where(weights > counts_from, weights, 0.0)
        signals.history.mul_(decay).add_(counted)
        signals.evidence.add_(torch.where(revisited, counted, 0.0))
        if signals.activated is not None and signals.interval is not None:
            active = weights > self.recurrence
            longest = torch.maximum(signals.interval, position - signals.activated)
            signals.interval.copy_(torch.where(active, longest, signals.interval))
            signals.activated.masked_fill_(active, position)

    def keep(self, pinned: int, kept: torch.Tensor) -> None:
        """Follow an eviction.

        Parameters
        ----------
        pinned : int
            Leading row positions that stay as they are.
        kept : Tensor [layers, H_kv, K] int64
            Row positions of the tokens that follow them, as a policy chose them.
        """
        after = pinned + kept.shape[2]
        self.positions[..., pinned:after] = self.positions.gather(2, kept)
        self._table[..., pinned:after] = self._table.gather(
            3, kept.expand(len(self._table), -1, -1, -1)
        )
        self.held = after

    def _looks_back(
        self, weights: torch.Tensor, distance: torch.Tensor, revisits: Revisits
    ) -> torch.Tensor:
        """Whether a head's query is global: its favourite keys are far away [layers, H_kv, 1]."""
        top = favourite_count(self.held, revisits.top)
        if top < 1:
            return torch.zeros_like(distance[..., :1], dtype=torch.bool)
        favourites = weights.topk(top, dim=-1).indices
        mean = distance.gather(-1, favourites).float().mean(-1, keepdim=True)
        return mean >= revisits.threshold

    def _grow(self, needed: int) -> None:
        # Rarely and by much: a prompt may be longer than the budget.
        more = max(needed, 2 * self.capacity) - self.capacity
        self._table = torch.nn.functional.pad(self._table, (0, more))
        self.positions = torch.nn.functional.pad(self.positions, (0, more))
