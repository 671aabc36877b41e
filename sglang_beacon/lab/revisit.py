"""Which queries look back at early thoughts, and what they have in common.

The diagnostics of BeaconKV's section 3. A query is *global* when the keys that it attends to most
are far away on average, else *local*. Global queries revisit thoughts; before RoPE they resemble
each other more than their neighbours, which is why a few beacons can stand for those to come.

The paper takes 150 keys and a distance of 200 tokens, of traces of ten thousands; on short ones
both have to shrink, and `Thresholds.of` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from sglang_beacon.core import FAVOURITES, favourite_count
from sglang_beacon.lab.interception import intercepted

PAPER_DISTANCE = 200


class Thresholds(NamedTuple):
    """A query is global if its ``keys`` favourites are ``distance`` tokens away on average."""

    keys: int = FAVOURITES
    distance: float = PAPER_DISTANCE

    @classmethod
    def of(cls, tokens: int) -> Thresholds:
        """The paper's, or a tenth of a trace that is too short for them to be a choice."""
        return cls(max(1, favourite_count(tokens)), min(PAPER_DISTANCE, tokens / 10))


@dataclass(frozen=True)
class RevisitTrace:
    """What a model's attention did over one text.

    Attributes
    ----------
    tokens : tuple of int
    thresholds : Thresholds
    distance : Tensor [layers, H_q, T] float32
        Mean distance of each query to its favourite keys, in tokens.
    favourites : Tensor [layers, H_q, T, keys] int64
        Their positions, the strongest first; -1 where a query sees fewer.
    weights : Tensor, likewise, float32
        Their attention.
    queries : Tensor [layers, H_q, T, D] float32
        Before RoPE.
    """

    tokens: tuple[int, ...]
    thresholds: Thresholds
    distance: torch.Tensor
    favourites: torch.Tensor
    weights: torch.Tensor
    queries: torch.Tensor

    @property
    def is_global(self) -> torch.Tensor:
        """Whether each query looks back, bool [layers, H_q, T]."""
        return self.distance >= self.thresholds.distance

    def counts(self) -> torch.Tensor:
        """Global queries of each head, int64 [layers, H_q]."""
        return self.is_global.sum(-1)

    def rate(self, window: int) -> torch.Tensor:
        """Share of global queries, of all heads, in each stretch of ``window`` tokens."""
        share = self.is_global.float().mean((0, 1))
        whole = len(share) // window * window
        return share[:whole].view(-1, window).mean(1)

    def similarity(self, layer: int, head: int, positions: Sequence[int]) -> torch.Tensor:
        """Cosine similarity of some of a head's queries before RoPE [n, n]."""
        chosen = torch.nn.functional.normalize(self.queries[layer, head, list(positions)], dim=-1)
        return chosen @ chosen.T

    def likeness(self, layer: int, head: int, neighbours: int = 8) -> torch.Tensor:
        """Mean cosine similarity of each query to those right before it [T]; 0 for the first."""
        unit = torch.nn.functional.normalize(self.queries[layer, head], dim=-1)
        similar = unit @ unit.T
        place = torch.arange(len(unit))
        before = place[:, None] - place
        near = (before > 0) & (before <= neighbours)
        return (similar * near).sum(1) / near.sum(1).clamp(min=1)

    def looked_at(self, layer: int, head: int, position: int) -> torch.Tensor:
        """Attention of one query by position [T], of its favourites; the rest is 0."""
        found = torch.zeros(len(self.tokens))
        keys = self.favourites[layer, head, position]
        seen = keys >= 0
        found[keys[seen]] = self.weights[layer, head, position, seen]
        return found


def principal_components(queries: torch.Tensor, count: int = 2) -> tuple[torch.Tensor, list[float]]:
    """Coordinates [n, count] of queries [n, D] along their main directions, and variance shares.

    Raises
    ------
    ValueError
        When there are no more queries than directions.
    """
    if len(queries) <= count:
        raise ValueError(f"{len(queries)} queries have no {count} principal components")
    centred = queries.float() - queries.float().mean(0)
    left, strength, _ = torch.linalg.svd(centred, full_matrices=False)
    share = strength.square() / strength.square().sum().clamp(min=1e-30)
    return left[:, :count] * strength[:count], share[:count].tolist()


def count_clusters(queries: torch.Tensor, similar: float = 0.8) -> int:
    """How many groups queries [n, D] form, where a query joins the first one it resembles."""
    unit = torch.nn.functional.normalize(queries.float(), dim=-1)
    leaders: list[torch.Tensor] = []
    for query in unit:
        if not leaders or float((torch.stack(leaders) @ query).max()) < similar:
            leaders.append(query)
    return len(leaders)


def migration(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far beacons moved: mean ``1 - cosine`` of each new one [n, D] to the nearest old one."""
    unit = torch.nn.functional.normalize
    similar = unit(after.float(), dim=-1) @ unit(before.float(), dim=-1).T
    return float((1 - similar.amax(1)).mean())


@torch.no_grad()
def record(
    model: PreTrainedModel, tokens: Sequence[int], thresholds: Thresholds | None = None
) -> RevisitTrace:
    """Run a text through a Hugging Face decoder of the Llama or Qwen kind, and watch.

    Parameters
    ----------
    model : PreTrainedModel
        In eval mode.
    tokens : sequence of int
    thresholds : Thresholds, optional
        `Thresholds.of` the text's length if not given.
    """
    thresholds = thresholds or Thresholds.of(len(tokens))
    watch = _Watch(model, thresholds)
    with watch.attending():
        model(input_ids=torch.tensor([list(tokens)]), past_key_values=DynamicCache())
    found = [torch.stack(each) for each in zip(*watch.found, strict=True)]
    queries = torch.stack(watch.queries)
    return RevisitTrace(tuple(tokens), thresholds, found[0], found[1], found[2], queries)


class _Watch:
    """Takes each layer's queries before RoPE, and its attention, on their way."""

    def __init__(self, model: PreTrainedModel, thresholds: Thresholds) -> None:
        self.model = model
        self.thresholds = thresholds
        self.queries: list[torch.Tensor] = []
        self.found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attending(self) -> AbstractContextManager[None]:
        return intercepted(self.model, self._attend, self._take)

    def _take(self, layer: int, queries: torch.Tensor) -> None:
        self.queries.append(queries.float().transpose(0, 1))

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        keys = key[0].repeat_interleave(group, 0)
        tokens = query.shape[2]
        place = torch.arange(tokens)
        logits = query[0] @ keys.transpose(1, 2) * scaling
        logits.masked_fill_(place > place[:, None], -torch.inf)
        weights = logits.float().softmax(-1)
        self.found.append(_favourites(weights, self.thresholds.keys))
        output = weights.to(value.dtype) @ value[0].repeat_interleave(group, 0)
        return output.transpose(0, 1)[None], None


def _favourites(
    weights: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean distance, positions and weights of the keys that queries [H, T, T] attend to most."""
    tokens = weights.shape[-1]
    top = weights.topk(min(count, tokens), dim=-1)
    place = torch.arange(tokens)
    seen = top.indices <= place[:, None]
    away = (place[:, None] - top.indices).clamp(min=0) * seen
    distance = away.sum(-1) / seen.sum(-1)
    return distance.float(), top.indices.where(seen, -1), top.values.where(seen, 0.0)
