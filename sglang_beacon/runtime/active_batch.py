"""Active sets of all requests of a decode step at once, with storage that never moves.

A step may therefore be captured as a CUDA graph: what differs from one to the next lies in tables
that are written before it, every shape is that of the tables, and nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_beacon.runtime.active_set import ActiveSet
from sglang_beacon.runtime.ranked_read import Rows, in_order, read_ranked
from sglang_beacon.runtime.selectors.base import Ranking, always_read, exact_weights, ranked

# Sizes of a ladder that a captured step has room for.
SIZES = 16


class Entry(NamedTuple):
    """What a step knows of one request before it.

    Attributes
    ----------
    row : int
        Of the batch.
    active : ActiveSet
        Whose selector is ``exact``.
    held : int
        Tokens, the newest included.
    value_norm : Tensor [layers, H_kv] float32
    norms : Tensor [layers, H_q] float32
        As for `ActiveSet.attend`, of all layers.
    """

    row: int
    active: ActiveSet
    held: int
    value_norm: torch.Tensor
    norms: torch.Tensor


class Tables(NamedTuple):
    """A step's inputs and what it did; rows without an active set hold nothing.

    Attributes
    ----------
    slots : Tensor [rows, N] int64
    limits : Tensor [rows, 3 + sizes] int64
        Tokens held, first and newest ones that are always read, and the ladder.
    epsilon : Tensor [rows] float32
    value_norm : Tensor [layers, rows, H_kv] float32
    norms : Tensor [layers, rows, H_q] float32
    counts : Tensor [layers, rows, H_kv] int64
    dropped : Tensor [layers, rows, H_kv] float32
    errors : Tensor [layers, rows] float32
    """

    slots: torch.Tensor
    limits: torch.Tensor
    epsilon: torch.Tensor
    value_norm: torch.Tensor
    norms: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor
    errors: torch.Tensor


class ActiveBatch:
    """Reads the active sets of a batch, layer by layer.

    Parameters
    ----------
    layers, query_heads, kv_heads : int
    captured_rows, captured_tokens : int
        What a captured step may have at most; 0 where none reads active sets. Other steps get
        tables of their own.
    device
    """

    def __init__(
        self,
        layers: int,
        query_heads: int,
        kv_heads: int,
        captured_rows: int,
        captured_tokens: int,
        device: torch.device | str,
    ) -> None:
        self._shape = layers, query_heads, kv_heads
        self._device = device
        self._captured = self._tables(captured_rows, captured_tokens, SIZES)
        self._step: Tables | None = None
        self._entries: Sequence[Entry] = ()
        # A captured step ranks in any case; others only where that may save something.
        self._ranks = True
        self._weights: list[torch.Tensor] = []

    def can_be_captured(self, entries: Sequence[Entry], rows: int) -> bool:
        """Whether the tables of captured steps have room for a batch of so many rows."""
        most_rows, most_tokens = self._captured.slots.shape
        return not entries or (
            rows <= most_rows
            and all(
                entry.held <= most_tokens and len(entry.active.usable_sizes(entry.held)) <= SIZES
                for entry in entries
            )
        )

    @property
    def is_captured(self) -> bool:
        """Whether the step in flight may be a captured one."""
        return self._step is None or self._step is self._captured

    def begin(self, entries: Sequence[Entry], slots: torch.Tensor | None) -> None:
        """Before a step: write down what it needs.

        Parameters
        ----------
        entries : sequence of Entry
        slots : Tensor [rows, N] int64
            Of the whole batch; what follows a row's own are slots too. None without entries.
        """
        self._entries, self._weights, self._step, self._ranks = entries, [], None, True
        if slots is None or not entries:
            # A graph that is replayed now must do nothing.
            self._captured.limits.zero_()
            return
        rows = len(slots)
        ladders = [entry.active.usable_sizes(entry.held) for entry in entries]
        step = self._captured
        if not self.can_be_captured(entries, rows):
            step = self._tables(rows, slots.shape[1], max(map(len, ladders)))
            self._ranks = any(ladders)
        width = min(slots.shape[1], step.slots.shape[1])
        step.slots[:rows, :width] = slots[:, :width]
        limits = torch.zeros(step.limits.shape, dtype=torch.int64)
        epsilon = torch.zeros(len(step.epsilon))
        for entry, ladder in zip(entries, ladders, strict=True):
            known = [entry.held, *entry.active.always, *ladder]
            limits[entry.row, : len(known)] = torch.tensor(known)
            epsilon[entry.row] = entry.active.epsilon
        step.limits.copy_(limits)
        step.epsilon.copy_(epsilon)
        index = torch.tensor([entry.row for entry in entries], device=self._device)
        value_norms = torch.stack([entry.value_norm for entry in entries], dim=1)
        norms = torch.stack([entry.norms for entry in entries], dim=1)
        step.value_norm.index_copy_(1, index, value_norms)
        step.norms.index_copy_(1, index, norms)
        self._step = step

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """During a step, or the capture of one: attention of one layer.

        Parameters
        ----------
        layer : int
        queries : Tensor [rows, H_q * D]
        k_pool, v_pool : Tensor [num_slots, H_kv, D]
        scale : float
        output : Tensor [rows, H_q * D]
            Overwritten in the rows that have an active set.
        """
        step = self._captured if self._step is None else self._step
        count, (_, query_heads, heads) = len(queries), self._shape
        if count > len(step.slots):
            return
        slots, limits = step.slots[:count], step.limits[:count]
        held, n_prefix, n_recent = (limits[:, each, None] for each in range(3))
        sizes = limits[:, 3:]
        rows = Rows(
            queries.view(count, query_heads, -1),
            slots,
            held[:, 0],
            step.value_norm[layer, :count],
            step.norms[layer, :count],
        )
        if self._ranks:
            weights = exact_weights(rows.queries, k_pool, slots, rows.held, scale)
            place = torch.arange(slots.shape[1], device=slots.device)
            ranking = ranked(weights, always_read(place, held, n_prefix, n_recent), sizes)
        else:
            order, drop, _ = in_order(heads, slots.shape[1], slots.device)
            ranking = Ranking(order.expand(count, -1, -1), drop.expand(count, -1, -1))
        read = read_ranked(rows, ranking, sizes, step.epsilon[:count], k_pool, v_pool, scale)
        attended = read.output.flatten(1)
        output.copy_(torch.where(held > 0, attended.to(output.dtype), output))
        step.counts[layer, :count] = read.counts
        step.dropped[layer, :count] = read.dropped
        step.errors[layer, :count] = read.errors
        if step is not self._captured:
            self._weights.append(weights if self._ranks else read.weights)

    def end(self) -> None:
        """After a step: tell each request's active set what was read."""
        step = self._step
        if step is None:
            return
        for row, active, held, *_ in self._entries:
            active.note(
                held,
                step.counts[:, row],
                step.dropped[:, row],
                step.errors[:, row],
                [weights[row, :, :held] for weights in self._weights],
            )

    def _tables(self, rows: int, tokens: int, sizes: int) -> Tables:
        layers, query_heads, heads = self._shape
        zeros, device = torch.zeros, self._device
        return Tables(
            slots=zeros(rows, tokens, dtype=torch.int64, device=device),
            limits=zeros(rows, 3 + sizes, dtype=torch.int64, device=device),
            epsilon=zeros(rows, device=device),
            value_norm=zeros(layers, rows, heads, device=device),
            norms=zeros(layers, rows, query_heads, device=device),
            counts=zeros(layers, rows, heads, dtype=torch.int64, device=device),
            dropped=zeros(layers, rows, heads, device=device),
            errors=zeros(layers, rows, device=device),
        )
