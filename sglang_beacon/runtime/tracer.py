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

from sglang_beacon.core import CachedKeys, EvictionPlan, Observations, favourite_count
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.recent_window import attention_weights

VERSION = 1
MOST_EVICTIONS = 48
MOST_LAYERS = 4


class Tracer:
    """Follows one request.

    Parameters
    ----------
    directory : Path
        Where its file goes.
    name : str
        Of the request; what is no letter, digit, dash or underscore becomes an underscore.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}.json"
        self._evictions: list[dict[str, Any]] = []
        self._every, self._count = 1, 0
        self.restart()

    def restart(self) -> None:
        """The cache was lost, and will be computed again."""
        # Logical positions [layers, H_kv, held] after the newest eviction.
        self._positions: torch.Tensor | None = None

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
        self._count += 1
        if (self._count - 1) % self._every:
            return
        layers = _spread(len(cache.pools))
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


def _spread(layers: int) -> list[int]:
    """The layers that are written, `MOST_LAYERS` at most, from the first to the last."""
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
    if observations.queries is None:
        return None
    keys = max(1, favourite_count(len(cache.slots)))
    rows = []
    layers = attention_weights(cache, observations)
    for place, weights in zip(positions, layers, strict=True):
        top = weights.cpu().topk(keys, dim=-1).indices
        seen = place[:, None, None].expand(*weights.shape).gather(3, top)
        away = observations.position - seen.float().mean(-1)
        # One number for each query head, of all its queries.
        rows.append([round(value, 1) for value in away.amax(-1).flatten().tolist()])
    return rows
