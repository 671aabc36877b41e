"""What a step reads of the tokens a request holds: as few as the error allows.

What is left out stays in the cache, and may be read by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.mailbox import Mailbox
from sglang_beacon.runtime.ranked_read import Rows, in_order, read_ranked
from sglang_beacon.runtime.selectors.base import Query, Ranking, Selector, always_read


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
    epsilon : float
        The target.
    always : (int, int)
        ``n_prefix`` and ``n_recent``.
    counts, errors : list of Tensor [H_kv] int64, list of Tensor [] float32
        Tokens that each layer and head reads in the newest step, and the bound on each layer's
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
        self.epsilon, self.always = settings.epsilon, (n_prefix, n_recent)
        self._settings = settings
        self._mailbox = Mailbox()
        self._layers = layers
        self.counts: list[torch.Tensor | None] = [None] * layers
        self.errors: list[torch.Tensor | None] = [None] * layers
        self._dropped: list[torch.Tensor | None] = [None] * layers
        self._weights: list[torch.Tensor | None] = [None] * layers
        self._steps = 0
        self._is_counted = True
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
        """After that step: add up what it did, and now and then send it on its way."""
        if not self._is_counted:
            self._add_up()
        if self._steps and position % self._settings.probe_interval == 0:
            done = torch.tensor([self._steps], dtype=torch.float64, device=self._sums.device)
            self._mailbox.send(position, torch.cat((done, self._sums, self._largest.double())))

    def _add_up(self) -> None:
        counts, dropped, errors = (
            torch.stack([each for each in layers if each is not None])
            for layers in (self.counts, self._dropped, self.errors)
        )
        self._is_counted = True
        self._steps += 1
        ratio = counts.double() / self._held
        excess = (errors > self.epsilon).double()
        self._sums += torch.stack((ratio.mean(1), dropped.double().mean(1), excess)).sum(1)
        self._largest = torch.maximum(self._largest, torch.stack((dropped.max(), errors.max())))

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
        if sizes := self.usable_sizes(held):
            forced = always_read(torch.arange(held, device=slots.device), held, *self.always)
            query = Query(layer, queries, k_pool, slots, scale, forced)
            ranking = self.selector.rank(query, sizes)
        else:
            ranking = in_order(heads, held, slots.device)
        read = read_ranked(
            Rows(
                queries[None],
                slots[None],
                torch.tensor([held], device=slots.device),
                value_norm[None],
                norms[None],
            ),
            Ranking(ranking.order[None], ranking.drop[None]),
            torch.tensor([sizes], dtype=torch.int64, device=slots.device),
            self.epsilon,
            k_pool,
            v_pool,
            scale,
        )
        self._held, self._is_counted = held, False
        self.counts[layer], self.errors[layer] = read.counts[0], read.errors[0]
        self._dropped[layer] = read.dropped[0]
        self._weights[layer] = ranking.weights if sizes else read.weights[0]
        return read.output[0]

    def note(
        self,
        held: int,
        counts: torch.Tensor,
        dropped: torch.Tensor,
        errors: torch.Tensor,
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Take in a step that an `ActiveBatch` did, of ``held`` tokens.

        Parameters are a row of what `ranked_read.Read` holds, of all layers; ``weights`` [H_kv, N]
        of each layer are by row position, and empty where they are not known.
        """
        self._held, self._is_counted = held, False
        self.counts, self._dropped, self.errors = list(counts), list(dropped), list(errors)
        self._weights = list(weights)

    def usable_sizes(self, held: int) -> Sequence[int]:
        """Sizes that hold what is always read, and are cheaper than to read everything."""
        # A key and a value each; ranked keys are read again when they are attended to.
        spare = 2 * held - self.selector.cost(held)
        at_least = sum(self.always)
        return [size for size in self._settings.ladder if size >= at_least and 2 * size < spare]

    def _take_report(self, position: int) -> None:
        for numbers in self._mailbox.collect(before=position - 1):
            steps, ratio, mass, excess, largest, error = numbers.tolist()
            every = steps * self._layers
            self.report = ActiveReport(
                int(steps), ratio / every, largest, mass / every, error, excess / every
            )
