"""What a step reads first to find the retained tokens that matter to its query.

A selector orders a request's row positions, per KV head, and says for each size of an active set
how much attention the rest may have: the bound of any query head of the group. Three of them, for
three ways to know it (`runtime.bounds`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.bounds import CalibratedDrop, certified_drop, exact_drop
from sglang_beacon.runtime.mailbox import Mailbox

# Keys that share a bound on their logits.
PAGE = 16


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


class ExactSelector(Selector):
    """Reads every key, and saves the values of the tokens that do not matter."""

    name = "exact"

    def cost(self, tokens: int) -> float:
        return tokens

    def rank(self, query: Query, sizes: Sequence[int]) -> Ranking:
        weights = query.weights()
        wanted = torch.tensor(sizes, device=weights.device)
        return ranked(weights, query.forced, wanted)._replace(weights=weights)


class PageSelector(Selector):
    """Reads bounds on the keys of each page, then the keys of the pages that may matter.

    What lies in no chosen page is bounded for certain, without having been read.
    """

    name = "pages"

    def __init__(self, layers: int) -> None:
        self._extrema: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers
        self._covered = [0] * layers

    def restart(self) -> None:
        self._covered = [0] * len(self._covered)

    def cost(self, tokens: int) -> float:
        return 2 * tokens / PAGE

    def rank(self, query: Query, sizes: Sequence[int]) -> Ranking:
        low, high = self._cover(query)
        heads, pages = low.shape[:2]
        held = len(query.slots)
        device = query.slots.device
        bounds = ops.page_bounds(
            query.queries[None],
            low[None],
            high[None],
            torch.full((1,), pages, device=device),
            query.scale,
        )[0].view(heads, -1, pages)
        page = torch.arange(held, device=device) // PAGE
        forced = torch.zeros(pages, dtype=torch.bool, device=device)
        forced[page[query.forced]] = True
        ranks = bounds.amax(1).masked_fill(forced, torch.inf)
        order = torch.sort(ranks[:, page], dim=-1, descending=True, stable=True).indices
        # Pages in the order of their tokens, and how many of these come before each.
        in_order = torch.sort(ranks, dim=-1, descending=True, stable=True).indices
        tokens = torch.full((pages,), PAGE, device=device)
        tokens[-1] = held - (pages - 1) * PAGE
        before = tokens[in_order].cumsum(-1) - tokens[in_order]
        before = torch.zeros_like(before).scatter_(1, in_order, before)
        drop = [self._drop(query, order, bounds, tokens, before, size) for size in sizes]
        return Ranking(order, torch.stack(drop, dim=-1))

    def _drop(
        self,
        query: Query,
        order: torch.Tensor,
        bounds: torch.Tensor,
        tokens: torch.Tensor,
        before: torch.Tensor,
        size: int,
    ) -> torch.Tensor:
        heads, group, _ = bounds.shape
        first = order[:, :size]
        counts = torch.full((1, heads), first.shape[1], device=order.device)
        attended = ops.key_weights(
            query.queries[None], query.k_pool, query.slots[first][None], counts, query.scale
        )
        left = tokens - (size - before).clamp(min=0).minimum(tokens)
        delta = certified_drop(
            attended.lse.view(heads, group), bounds, left[:, None].expand_as(bounds)
        )
        return delta.amax(1)

    def _cover(self, query: Query) -> tuple[torch.Tensor, torch.Tensor]:
        """Extrema of all pages; only those of pages with new tokens are computed."""
        layer, held = query.layer, len(query.slots)
        known = self._covered[layer] // PAGE
        fresh = query.slots[None, known * PAGE :]
        counts = torch.full((1,), fresh.shape[1], device=fresh.device)
        low, high = (each[0] for each in ops.page_extrema(query.k_pool, fresh, counts, PAGE))
        before = self._extrema[layer]
        if known and before is not None:
            low = torch.cat((before[0][:, :known], low), dim=1)
            high = torch.cat((before[1][:, :known], high), dim=1)
        self._extrema[layer], self._covered[layer] = (low, high), held
        return low, high


class SketchSelector(Selector):
    """Reads keys of a few bytes, and learns from exact probes how much that overlooks.

    The sketch of a head is the space of its first keys' principal components.
    """

    name = "sketch"

    def __init__(self, layers: int, settings: RecasSettings) -> None:
        # A probe is seen layer by layer.
        self.calibration = CalibratedDrop(settings.alpha, settings.calibration_probes * layers)
        self._settings = settings
        self._mailbox = Mailbox()
        self._position = 0
        self._projections: list[torch.Tensor | None] = [None] * layers
        self._sketches: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers

    @property
    def coverage(self) -> float | None:  # type: ignore[override]
        return self.calibration.coverage

    def restart(self) -> None:
        self._sketches = [None] * len(self._sketches)

    def cost(self, tokens: int) -> float:
        # A coordinate is a byte, an element of a key two.
        return tokens * self._settings.sketch_rank / 256

    def calibrate(self, position: int) -> None:
        self._position = position
        for predicted, true in self._mailbox.collect(before=position - 1):
            self.calibration.observe(predicted.flatten().tolist(), true.flatten().tolist())

    def rank(self, query: Query, sizes: Sequence[int]) -> Ranking:
        projection, codes, scales = self._cover(query)
        heads, held = codes.shape[1], len(query.slots)
        device = query.slots.device
        projected = torch.einsum(
            "hgd,hdr->hgr", query.queries.float().view(heads, -1, projection.shape[1]), projection
        )
        logits = ops.sketch_logits(
            projected.flatten(0, 1)[None],
            codes,
            scales,
            torch.arange(held, device=device)[None],
            torch.full((1,), held, device=device),
            query.scale,
        )[0]
        wanted = torch.tensor(sizes, device=device)
        ranking = ranked(logits.softmax(-1), query.forced, wanted)
        if self._position % self._settings.probe_interval == 0:
            weights = query.weights()
            true = exact_drop(weights.gather(1, ranking.order), wanted)
            self._mailbox.send(self._position, torch.stack((ranking.drop, true)))
        drop = (ranking.drop + self.calibration.quantile).clamp(0, 1)
        return Ranking(ranking.order, drop)

    def _cover(self, query: Query) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer, known = query.layer, self._sketches[query.layer]
        covered = 0 if known is None else len(known[0])
        keys = query.k_pool[query.slots[covered:]]
        projection = self._projections[layer]
        if projection is None:
            projection = _principal_components(keys, self._settings.sketch_rank)
            self._projections[layer] = projection
        codes, scales = ops.key_sketch(keys, projection)
        if known is not None:
            codes, scales = torch.cat((known[0], codes)), torch.cat((known[1], scales))
        self._sketches[layer] = codes, scales
        return projection, codes, scales


def create(settings: RecasSettings, name: str, layers: int) -> Selector | None:
    """The selector of a name; None for ``"none"``."""
    if name == "pages":
        return PageSelector(layers)
    if name == "sketch":
        return SketchSelector(layers, settings)
    return ExactSelector() if name == "exact" else None


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


def _principal_components(keys: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns [H_kv, D, rank] that keep most of keys [N, H_kv, D]."""
    per_head = keys.float().transpose(0, 1)
    # Ascending eigenvalues.
    basis: torch.Tensor = torch.linalg.eigh(per_head.transpose(1, 2) @ per_head).eigenvectors
    return basis[..., -rank:].contiguous()
