"""What a selector is asked and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.runtime.bounds import exact_drop


class Query(NamedTuple):
    """One layer's newest queries [H_q, D] of a request, and where its keys lie.

    ``forced`` [N] says which row positions are read in any case; ``slots`` [N] int64 are theirs in
    ``k_pool`` [num_slots, H_kv, D].
    """

    layer: int
    queries: torch.Tensor
    k_pool: torch.Tensor
    slots: torch.Tensor
    scale: float
    forced: torch.Tensor

    def weights(self) -> torch.Tensor:
        """Exact attention weights [H_kv, N], the largest of each group."""
        held = torch.full((1,), len(self.slots), device=self.slots.device)
        return exact_weights(self.queries[None], self.k_pool, self.slots[None], held, self.scale)[0]


class Ranking(NamedTuple):
    """Row positions [H_kv, N], the best first, and what the rest may have at each size.

    ``drop`` [H_kv, sizes] float32 bounds the attention mass past the first ``size`` positions.
    ``weights`` [H_kv, N] are the exact ones by row position, where they are known.
    """

    order: torch.Tensor
    drop: torch.Tensor
    weights: torch.Tensor | None = None


class Selector(ABC):
    """Ranks a request's tokens for one query after the other."""

    name: ClassVar[str]
    # Share of its bounds that held where they were checked; None where they always do.
    coverage: float | None = None

    @abstractmethod
    def cost(self, tokens: int) -> float:
        """What ranking ``tokens`` retained ones costs, in vectors read."""

    @abstractmethod
    def rank(self, query: Query, sizes: Sequence[int]) -> Ranking:
        """Rank the tokens of a request."""

    def restart(self) -> None:  # noqa: B027
        """The row was rewritten: what was derived from its keys is void."""

    def calibrate(self, position: int) -> None:  # noqa: B027
        """Take in what is known by the step of the token at a logical position."""


def exact_weights(
    queries: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    held: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention weights [B, H_kv, N], the largest of each group; zero past the end of a row.

    Of queries [B, H_q, D] on the first ``held`` [B] of slots [B, N] int64.
    """
    heads = k_pool.shape[1]
    listed = slots[:, None].expand(-1, heads, -1)
    counts = held[:, None].expand(-1, heads)
    return ops.key_weights(queries, k_pool, listed, counts, scale).weights


def always_read(
    place: torch.Tensor,
    held: int | torch.Tensor,
    n_prefix: int | torch.Tensor,
    n_recent: int | torch.Tensor,
) -> torch.Tensor:
    """Which row positions ``place`` are among the first or the newest of those ``held``."""
    return (place < n_prefix) | ((place >= held - n_recent) & (place < held))


def ranked(weights: torch.Tensor, forced: torch.Tensor, sizes: torch.Tensor) -> Ranking:
    """Rank by weights, forced positions first; without an access from the host.

    Parameters
    ----------
    weights : Tensor [..., H_kv, N]
        Zero past the end of a row, if rows differ in length.
    forced : Tensor [..., N] bool
    sizes : Tensor [..., sizes] int64
    """
    keys = weights.masked_fill(forced[..., None, :], torch.inf)
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    return Ranking(order, exact_drop(weights.gather(-1, order), sizes))
