"""Ranking by keys of a few bytes each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_beacon import ops
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.bounds import CalibratedDrop, exact_drop
from sglang_beacon.runtime.mailbox import Mailbox
from sglang_beacon.runtime.selectors.base import Query, Ranking, Selector, ranked


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


def _principal_components(keys: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns [H_kv, D, rank] that keep most of keys [N, H_kv, D]."""
    per_head = keys.float().transpose(0, 1)
    # Ascending eigenvalues.
    basis: torch.Tensor = torch.linalg.eigh(per_head.transpose(1, 2) @ per_head).eigenvectors
    return basis[..., -rank:].contiguous()
