"""Beacons that stay with cached prefixes, so that a prompt found in the tree is still observed.

On a prefix hit the queries of the cached tokens are not computed again. What a finished prefill
chose to remember of them is kept here, under the tree's node where its prompt ends, and seeds the
next request that matches. Beacons know the position they come from, so a request that shares only
a part of that prompt takes those that lie in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


class Beacons(NamedTuple):
    """What one prefill left in its query buffer.

    Attributes
    ----------
    rows : Tensor [num_layers, H_q, n, D]
        Pre-RoPE queries chosen by FPS, in time order.
    positions : Tensor [num_layers, H_q, n] int64
        Where each of them was in the prompt.
    """

    rows: torch.Tensor
    positions: torch.Tensor

    @property
    def per_head(self) -> int:
        return self.rows.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.positions.nbytes

    def within(self, length: int) -> Beacons:
        """Those of the first ``length`` tokens; a head that has fewer than ``n`` repeats its own.

        FPS takes a repeated query last. A head with none at all keeps what it has: queries of a
        longer prompt that begins the same way.
        """
        inside = self.positions < length
        order = torch.sort(inside.to(torch.int8), dim=-1, descending=True, stable=True).indices
        available = inside.sum(-1, keepdim=True)
        column = torch.arange(self.per_head, device=order.device).expand_as(order)
        index = order.gather(
            -1, torch.where(available > 0, column % available.clamp_min(1), column)
        )
        rows = self.rows.gather(2, index[..., None].expand_as(self.rows))
        return Beacons(rows, self.positions.gather(-1, index))

    def to(self, device: torch.device | str) -> Beacons:
        """A copy on ``device``, in the order of the current stream; nothing waits for it."""
        return Beacons(*(_copy(tensor, torch.device(device)) for tensor in self))


class BeaconStore:
    """Beacons by tree node, at most ``max_bytes`` of them; the least recently used go first.

    ``hits`` counts the requests that found some.

    A prefix tree evicts and splits nodes as it likes. It is asked for the path of a node, and
    answers None for one that is gone: so beacons go with their prefix.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self._stored: OrderedDict[int, Beacons] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, node: int, beacons: Beacons) -> None:
        """Keep the beacons of a prompt that ends at ``node``."""
        self._drop(node)
        if not beacons.per_head or beacons.num_bytes > self.max_bytes:
            return
        while self.num_bytes + beacons.num_bytes > self.max_bytes:
            self._drop(next(iter(self._stored)))
        self._stored[node] = beacons
        self.num_bytes += beacons.num_bytes

    def find(
        self,
        ends: Mapping[int, int],
        path_of: Callable[[int], Sequence[int] | None],
        at_most: int,
    ) -> Beacons | None:
        """Beacons of the longest stored prefix of a matched path.

        Parameters
        ----------
        ends : Mapping[int, int]
            The nodes of the path, and how many tokens lead to the end of each.
        path_of : callable
            The nodes that lead to a node, itself last; None if it is no longer in the tree.
        at_most : int
            Beacons that the request can take.

        Returns
        -------
        Beacons or None
            Of tokens on the path only; None if nothing is stored for any of it.
        """
        best, covered = None, 0
        for node in list(self._stored):
            path = path_of(node)
            if path is None:
                self._drop(node)
                continue
            common = max((ends[step] for step in path if step in ends), default=0)
            if common > covered and self._stored[node].per_head <= at_most:
                best, covered = node, common
        if best is None:
            return None
        self.hits += 1
        self._stored.move_to_end(best)
        return self._stored[best].within(covered)

    def forget_missing(self, path_of: Callable[[int], Sequence[int] | None]) -> None:
        """Drop the beacons whose prefix was evicted."""
        for node in [node for node in self._stored if path_of(node) is None]:
            self._drop(node)

    def clear(self) -> None:
        self._stored.clear()
        self.num_bytes = 0

    def _drop(self, node: int) -> None:
        beacons = self._stored.pop(node, None)
        if beacons is not None:
            self.num_bytes -= beacons.num_bytes


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    pinned = tensor.is_cuda and device.type == "cpu"
    copy = torch.empty_like(tensor, device=device, pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=True)
