"""Writes down what became of one request's tokens, to be looked at afterwards.

For debugging and teaching: each eviction of a traced request waits for the device. What is written
is bounded; of more evictions than `MOST_EVICTIONS`, every other one is dropped again and again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_beacon.core import CachedKeys, EvictionPlan, Observations
from sglang_beacon.ops.beacon_score import observed_weights
from sglang_beacon.policies.base import Policy

VERSION = 1
MOST_EVICTIONS = 48
MOST_LAYERS = 4
# Keys that say how far a query looks: a tenth of the cache, and no more than the paper's 150.
MOST_KEYS = 150


class Tracer:
    """Follows one request.

    Parameters
    ----------
    directory : Path
        Where its file goes.
    name : str
        Of the request; what is no letter, digit, dash or underscore becomes an underscore.
    layers : sequence of int
        Those whose kept tokens are written; empty: up to `MOST_LAYERS`, evenly spread.
    """

    def __init__(self, directory: Path, name: str, layers: Sequence[int] = ()) -> None:
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}.json"
        self._layers = list(layers)
        self._evictions: list[dict[str, Any]] = []
        self._every, self._count = 1, 0
        self.restart()

    def restart(self) -> None:
        """The cache was lost, and will be computed again."""
        # Logical positions [layers, H_kv, held] after the newest eviction, and what was seen then.
        self._positions: torch.Tensor | None = None
        self._seen = 0

    def eviction(
        self,
        policy: Policy,
        cache: CachedKeys,
        observations: Observations,
        plan: EvictionPlan,
        keep: torch.Tensor,
    ) -> None:
        """Note an eviction that keeps ``keep`` [layers, H_kv, plan.kept] of the cached tokens."""
        positions = self._extend(cache, plan)
        pinned = torch.arange(plan.pinned).expand(*keep.shape[:2], -1)
        kept = torch.cat((pinned, keep.cpu()), dim=2)
        self._positions = positions.gather(2, kept)
        self._seen = plan.lengths.logical
        self._count += 1
        if (self._count - 1) % self._every:
            return
        layers = self._chosen(len(cache.pools))
        ranks = _ranks(policy.score(cache, observations).cpu()).gather(2, kept)
        self._evictions.append(
            {
                "seen": plan.lengths.logical,
                "held": plan.lengths.held,
                "kept": {str(layer): self._positions[layer].tolist() for layer in layers},
                "score": {str(layer): _rounded(ranks[layer]) for layer in layers},
                "distance": _distances(cache, observations, positions),
            }
        )
        if len(self._evictions) > MOST_EVICTIONS:
            self._evictions = self._evictions[::2]
            self._every *= 2

    def write(
        self,
        tokens: Sequence[int],
        prompt: int,
        words: Sequence[str] | None,
        policy: dict[str, Any],
    ) -> Path:
        """Write the file; returns its path.

        Parameters
        ----------
        tokens : sequence of int
            Prompt and answer.
        prompt : int
            How many of them are the prompt.
        words : sequence of str, optional
            Their texts, where there is a tokenizer.
        policy : dict
            What the request's reply says about its cache.
        """
        trace = {
            "version": VERSION,
            "policy": policy,
            "prompt": prompt,
            "tokens": list(tokens),
            "words": None if words is None else list(words),
            "evictions": self._evictions,
            "evictions_in_all": self._count,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(trace), encoding="utf-8")
        return self.path

    def _extend(self, cache: CachedKeys, plan: EvictionPlan) -> torch.Tensor:
        """Logical positions [layers, H_kv, held] before an eviction."""
        layers, heads, held = cache.shape
        before = self._positions
        if before is None:
            before = torch.empty(layers, heads, 0, dtype=torch.int64)
        new = torch.arange(plan.lengths.logical - held + before.shape[2], plan.lengths.logical)
        return torch.cat((before, new.expand(layers, heads, -1)), dim=2)

    def _chosen(self, layers: int) -> list[int]:
        if self._layers:
            return [layer for layer in self._layers if layer < layers][:MOST_LAYERS]
        count = min(layers, MOST_LAYERS)
        return [round(index * (layers - 1) / max(count - 1, 1)) for index in range(count)]


def _ranks(score: torch.Tensor) -> torch.Tensor:
    """Scores by their rank in each head, from 0 to 1: scales differ by method."""
    return score.argsort(-1).argsort(-1).float() / max(score.shape[-1] - 1, 1)


def _rounded(ranks: torch.Tensor) -> list[list[float]]:
    return [[round(value, 2) for value in head] for head in ranks.tolist()]


def _distances(
    cache: CachedKeys, observations: Observations, positions: torch.Tensor
) -> list[list[float]] | None:
    """How far the observed queries of each layer and head look, the farthest of them, in tokens."""
    queries, visible = observations.queries, observations.visible
    if queries is None or visible is None:
        return None
    layers, kv_heads, held = cache.shape
    keys = max(1, min(MOST_KEYS, held // 10))
    rows = []
    for layer in range(layers):
        weights = observed_weights(cache.layer(layer), queries[layer], visible, observations.scale)
        top = weights.cpu().view(kv_heads, -1, held).topk(keys, dim=-1).indices
        place = positions[layer][:, None].expand(-1, top.shape[1], -1)
        away = observations.position - place.gather(2, top).float().mean(-1)
        # One number for each query head, of all its queries.
        farthest = away.view(len(queries[layer]), -1).amax(-1)
        rows.append([round(value, 1) for value in farthest.tolist()])
    return rows
