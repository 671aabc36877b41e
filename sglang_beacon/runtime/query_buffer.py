"""The pre-RoPE queries that one request remembers, in all layers and heads."""

from __future__ import annotations

import torch

from sglang_beacon import ops
from sglang_beacon.core import BufferShape


class QueryBuffer:
    """Beacon and recent queries of one request.

    Allocated when the request is first computed and dropped with it, so memory follows the running
    requests. Which rows mean what is the host's knowledge (`runtime.phase`).

    Attributes
    ----------
    rows : Tensor [num_layers, H_q, n_beacon + n_recent, D]
        In the model's dtype.
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

    def fold_prompt(self, layer: int, queries: torch.Tensor, observed: int, recent: int) -> None:
        """Merge a stretch of the prompt's queries into one layer.

        A prompt that arrives in chunks is folded chunk by chunk, so that memory stays bounded:
        FPS over what was chosen before and the new stretch.

        Parameters
        ----------
        layer : int
        queries : Tensor [n, H_q, D]
            Pre-RoPE, of consecutive tokens.
        observed : int
            Prompt queries folded before, 0 for the first stretch.
        recent : int
            How many of the stretch's newest queries follow the chosen ones, as recent queries.
        """
        new = queries.transpose(0, 1).to(self.rows.dtype)
        chosen = self.rows[layer, :, : min(observed, self.shape.n_beacon)]
        beacons = _choose(torch.cat((chosen, new), dim=1), self.shape.n_beacon)
        kept = torch.cat((beacons, new[:, new.shape[1] - recent :]), dim=1)
        self.rows[layer, :, : kept.shape[1]] = kept

    def append(self, row: int, queries: torch.Tensor) -> None:
        """Write one token's queries [num_layers, H_q, D] to a row."""
        self.rows[:, :, row] = queries

    def compress(self, filled: int, carried: int = 0) -> None:
        """FPS over the first ``filled`` rows of every layer and head, in place.

        The chosen rows come first, in their old order; the last ``carried`` of the filled rows
        follow them.
        """
        used = self.rows[:, :, :filled]
        kept = _choose(used, self.shape.n_beacon)
        kept = torch.cat((kept, used[:, :, filled - carried :]), dim=2)
        self.rows[:, :, : kept.shape[2]] = kept


def _choose(queries: torch.Tensor, count: int) -> torch.Tensor:
    """FPS over [..., M, D], in time order: [..., min(count, M), D]."""
    index = ops.farthest_point_sample(queries, count).sort(-1).values
    return queries.gather(-2, index.unsqueeze(-1).expand(*index.shape, queries.shape[-1]))
