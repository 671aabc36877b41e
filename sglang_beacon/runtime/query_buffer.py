"""The pre-RoPE queries that one request remembers, in all layers and heads."""

from __future__ import annotations

import torch

from sglang_beacon import ops
from sglang_beacon.core import BufferShape, Fold
from sglang_beacon.runtime.beacon_store import Beacons


class QueryBuffer:
    """Beacon and recent queries of one request.

    Allocated when the request is first computed and dropped with it, so memory follows the running
    requests. Which rows mean what is the host's knowledge (`runtime.phase`).

    Attributes
    ----------
    rows : Tensor [num_layers, H_q, n_beacon + n_recent, D]
        In the model's dtype.
    positions : Tensor [num_layers, H_q, n_beacon] int64
        Where the beacons come from, as long as they are of the prompt.
    """

    def __init__(
        self,
        shape: BufferShape,
        num_layers: int,
        num_query_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shape = shape
        self.rows = torch.empty(
            (num_layers, num_query_heads, shape.rows, head_dim), dtype=dtype, device=device
        )
        self.positions = torch.zeros(
            (num_layers, num_query_heads, shape.n_beacon), dtype=torch.int64, device=device
        )

    def seed(self, beacons: Beacons) -> None:
        """Start from what another request remembered of the same prompt."""
        self.rows[:, :, : beacons.per_head] = beacons.rows
        self.positions[:, :, : beacons.per_head] = beacons.positions

    def beacons(self, count: int) -> Beacons:
        """The first ``count`` rows, as long as they are of the prompt; a view."""
        return Beacons(self.rows[:, :, :count], self.positions[:, :, :count])

    def fold_prompt(
        self, layer: int, queries: torch.Tensor, begin: int, observed: int, recent: int
    ) -> None:
        """Merge a stretch of the prompt's queries into one layer.

        A prompt that arrives in chunks is folded chunk by chunk, so that memory stays bounded:
        FPS over what was chosen before and the new stretch.

        Parameters
        ----------
        layer : int
        queries : Tensor [n, H_q, D]
            Pre-RoPE, of consecutive tokens.
        begin : int
            Position of the first of them.
        observed : int
            Prompt queries folded before, beacons it was seeded with among them.
        recent : int
            How many of the stretch's newest queries follow the chosen ones, as recent queries.
        """
        new = queries.transpose(0, 1).to(self.rows.dtype)
        chosen = min(observed, self.shape.n_beacon)
        queries = torch.cat((self.rows[layer, :, :chosen], new), dim=1)
        index = self._choose(queries)
        beacons = queries.gather(1, index.unsqueeze(-1).expand(*index.shape, queries.shape[-1]))
        kept = torch.cat((beacons, new[:, new.shape[1] - recent :]), dim=1)
        self.rows[layer, :, : kept.shape[1]] = kept
        stretch = torch.arange(begin, begin + new.shape[1], device=new.device)
        place = torch.cat(
            (self.positions[layer, :, :chosen], stretch.expand(new.shape[0], -1)), dim=1
        )
        self.positions[layer, :, : index.shape[1]] = place.gather(1, index)

    def _choose(self, queries: torch.Tensor) -> torch.Tensor:
        """Which of queries [H_q, n, D] stay, in their order."""
        if self.shape.farthest:
            return ops.farthest_point_sample(queries, self.shape.n_beacon).sort(-1).values
        first = torch.arange(min(self.shape.n_beacon, queries.shape[1]), device=queries.device)
        return first.expand(queries.shape[0], -1)

    def append(self, row: int, queries: torch.Tensor) -> None:
        """Write one token's queries [num_layers, H_q, D] to a row."""
        self.rows[:, :, row] = queries

    def compress(self, fold: Fold) -> None:
        """Fold the rows of every layer and head, in place; the chosen ones keep their order."""
        count = self.shape.n_beacon
        if self.shape.farthest:
            ops.query_fold(self.rows, fold.filled, count, fold.carried)
            return
        begin = min(fold.filled, count)
        newest = self.rows[:, :, fold.filled - fold.carried : fold.filled].clone()
        self.rows[:, :, begin : begin + fold.carried] = newest
