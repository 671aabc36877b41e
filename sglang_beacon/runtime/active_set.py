"""What a step reads of the tokens a request holds: as few as the error allows.

What is left out stays in the cache, and may be read by the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.bounds import output_error
from sglang_beacon.runtime.mailbox import Mailbox
from sglang_beacon.runtime.selectors import Query, Selector


class ActiveReport(NamedTuple):
    """Over all layers and steps so far.

    ``ratio`` is the share of retained tokens that were read; ``largest`` and ``mean`` bound the
    dropped mass of a head, ``error`` that of a layer's output; ``unmet`` is the share of layers and
    steps above the target.
    """

    steps: int = 0
    ratio: float = 1.0
    largest: float = 0.0
    mean: float = 0.0
    error: float = 0.0
    unmet: float = 0.0


class ActiveSet:
    """Sparse decode attention of one request, under a target for its error.

    Per layer and KV head it attends to the first tokens of the selector's ranking: the smallest
    size of the ladder at which the dropped mass ``delta`` satisfies
    ``2 V_max delta <= epsilon ||o|| / sqrt(H_q)``. The layer's heads together are then off by at
    most ``epsilon ||o||``. ``||o||`` is the norm of the step before, so the bound that a step
    really has is computed afterwards, and reported. Where no size will do, or reading everything is
    cheaper, everything is read.

    Parameters
    ----------
    settings : RecasSettings
    selector : Selector
    n_prefix, n_recent : int
        The first and newest tokens, which are always read.
    layers : int
    device

    Attributes
    ----------
    counts, errors : list of Tensor [H_kv] int64, list of Tensor [] float32
        Tokens that each layer and head read in the newest step, and the bound on each layer's
        relative error.
    """

    def __init__(
        self,
        settings: RecasSettings,
        selector: Selector,
        n_prefix: int,
        n_recent: int,
        layers: int,
        device: torch.device | str,
    ) -> None:
        self.selector = selector
        self.report = ActiveReport()
        self._settings = settings
        self._always = n_prefix, n_recent
        self._mailbox = Mailbox()
        self._layers = layers
        self.counts: list[torch.Tensor | None] = [None] * layers
        self.errors: list[torch.Tensor | None] = [None] * layers
        self._weights: list[torch.Tensor | None] = [None] * layers
        self._steps = 0
        # Sums of ratio, mass and excess over layers and steps; the largest mass and error.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._largest = torch.zeros(2, device=device)

    def restart(self) -> None:
        """The row was rewritten."""
        self.selector.restart()

    def take_weights(self) -> torch.Tensor | None:
        """Weights [layers, H_kv, N] of all that is held in the newest step, if they are known."""
        known = [weights for weights in self._weights if weights is not None]
        self._weights = [None] * self._layers
        return torch.stack(known) if len(known) == self._layers else None

    def begin(self, position: int) -> None:
        """Before the step of the token at a logical position."""
        self.selector.calibrate(position)
        self._take_report(position)

    def end(self, position: int) -> None:
        """After that step: send what it did on its way."""
        self._steps += 1
        if position % self._settings.probe_interval == 0:
            done = torch.tensor([self._steps], dtype=torch.float64, device=self._sums.device)
            self._mailbox.send(position, torch.cat((done, self._sums, self._largest.double())))

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
        value_norm: torch.Tensor,
        norms: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one layer.

        Parameters
        ----------
        layer : int
        queries : Tensor [H_q, D]
        k_pool, v_pool : Tensor [num_slots, H_kv, D]
        slots : Tensor [N] int64
            All that the request holds, the newest token last.
        scale : float
        value_norm : Tensor [H_kv] float32
            The largest norm of the values held, apart from the newest.
        norms : Tensor [H_q] float32
            Of the step before; 0 before the first.

        Returns
        -------
        Tensor [H_q, D]
        """
        heads, held = k_pool.shape[1], len(slots)
        newest = v_pool[slots[-1]].float().norm(dim=-1)
        value_norm = torch.maximum(value_norm, newest)
        sizes = self._usable_sizes(held)
        if sizes:
            query = Query(layer, queries, k_pool, slots, scale, self._forced(held, slots.device))
            order, drop, weights = self.selector.rank(query, sizes)
            tolerance = self._settings.epsilon * norms.norm() / math.sqrt(len(queries))
            fits = output_error(value_norm[:, None], drop) <= tolerance
            steps = torch.tensor([*sizes, held], device=slots.device)
            choice = torch.where(fits.any(1), fits.int().argmax(1), len(sizes))
            counts = steps[choice]
            delta = torch.nn.functional.pad(drop, (0, 1)).gather(1, choice[:, None])[:, 0]
            listed = slots[order]
        else:
            counts = torch.full((heads,), held, device=slots.device)
            delta = torch.zeros(heads, device=slots.device)
            listed = slots.expand(heads, -1)
        attended = ops.sparse_decode(
            queries[None], k_pool, v_pool, listed[None], counts[None], scale
        )
        self.counts[layer] = counts
        self._weights[layer] = weights if sizes else attended.weights[0]
        output = attended.output[0]
        self.errors[layer] = self._tally(counts, held, delta, value_norm, output)
        return output

    def _usable_sizes(self, held: int) -> Sequence[int]:
        """Sizes that hold what is always read, and are cheaper than to read everything."""
        # A key and a value each; ranked keys are read again when they are attended to.
        spare = 2 * held - self.selector.cost(held)
        at_least = sum(self._always)
        return [size for size in self._settings.ladder if size >= at_least and 2 * size < spare]

    def _forced(self, held: int, device: torch.device) -> torch.Tensor:
        place = torch.arange(held, device=device)
        n_prefix, n_recent = self._always
        return (place < n_prefix) | (place >= held - n_recent)

    def _tally(
        self,
        counts: torch.Tensor,
        held: int,
        delta: torch.Tensor,
        value_norm: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        group = len(output) // len(delta)
        bound = math.sqrt(group) * output_error(value_norm, delta).norm()
        error: torch.Tensor = bound / output.float().norm().clamp(min=1e-30)
        ratio = counts.double().mean() / held
        excess = error > self._settings.epsilon
        self._sums += torch.stack((ratio, delta.double().mean(), excess.double()))
        self._largest = torch.maximum(self._largest, torch.stack((delta.max(), error)))
        return error

    def _take_report(self, position: int) -> None:
        for numbers in self._mailbox.collect(before=position - 1):
            steps, ratio, mass, excess, largest, error = numbers.tolist()
            every = steps * self._layers
            self.report = ActiveReport(
                int(steps), ratio / every, largest, mass / every, error, excess / every
            )
