"""How much attention an approximation drops, and how far its output can therefore be off.

With ``delta`` the attention mass of the tokens that are not attended to, ``o`` the output over all
tokens and ``o'`` the one over the rest, renormalised::

    ||o - o'||_2 <= 2 V_max delta        V_max: the largest norm of a value

since ``o - o' = delta (o_dropped - o')`` and both are averages of values. Three ways to know
``delta``, which all return a number that is at least it, each under its own condition:

``exact``
    The dropped tokens' keys were read: ``delta`` is the sum of their weights.
``certified``
    Only bounds on their logits were read. Holds always.
``calibrated``
    A prediction, widened by the errors that earlier predictions turned out to have. Holds for a
    share ``1 - alpha`` of the steps, as far as those errors and the next one are exchangeable.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import torch


def output_error(value_norm: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Bound on ``||o - o'||_2``.

    Parameters
    ----------
    value_norm : Tensor [...]
        At least the norm of every value, dropped or not.
    delta : Tensor [...]
        At least the dropped mass.
    """
    return 2 * value_norm * delta


def exact_drop(ordered: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Dropped mass, for several numbers of attended tokens.

    Parameters
    ----------
    ordered : Tensor [..., H_kv, N]
        Attention weights of all tokens, in the order in which they are attended to.
    sizes : Tensor [..., sizes] int64
        How many of them are.

    Returns
    -------
    Tensor [..., H_kv, sizes]
    """
    # From the end, so that small sums are not lost to rounding.
    sums = ordered.flip(-1).cumsum(-1).flip(-1)
    sums = torch.nn.functional.pad(sums, (0, 1))
    index = sizes[..., None, :].expand(*ordered.shape[:-1], -1)
    return sums.gather(-1, index).clamp(max=1.0)


def certified_drop(
    lse_active: torch.Tensor, bounds: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Dropped mass at the most, if no dropped key has a larger logit than its page's bound.

    ``delta = Z / (Z_active + Z)`` grows with the dropped tokens' sum of powers ``Z``, which is at
    most ``sum over pages of size * exp(bound)``.

    Parameters
    ----------
    lse_active : Tensor [...]
        Natural logarithm of the attended tokens' sum.
    bounds : Tensor [..., P]
        Upper bounds on the logits of each page, as from `ops.page_bounds`.
    sizes : Tensor [..., P]
        Dropped keys of each page; 0 for pages that are attended to.

    Returns
    -------
    Tensor [...] float32
        1 where nothing is attended to but something is dropped.
    """
    dropped = torch.where(sizes > 0, bounds + sizes.clamp(min=1).log(), -torch.inf)
    # delta = sigmoid(lse_dropped - lse_active), and 0 where nothing is dropped.
    excess = dropped.logsumexp(-1) - lse_active
    return torch.where((sizes > 0).any(-1), excess.sigmoid(), torch.zeros_like(excess))


class CalibratedDrop:
    """Split-conformal upper bounds on a predicted quantity in [0, 1].

    Parameters
    ----------
    alpha : float
        The share of bounds that may fail.
    window : int
        How many of the latest observations count; all residuals of one are as new.

    Attributes
    ----------
    probes, covered : int
        How often the truth was seen, and how often the bound given before had covered it.

    Notes
    -----
    With ``n`` residuals the bound adds the ``ceil((n + 1) (1 - alpha))``-th smallest: the
    finite-sample correction (Vovk et al.; Lei et al. 2018). Where that is more than ``n``, there
    are too few to say anything and the bound is 1.
    """

    def __init__(self, alpha: float, window: int) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self.alpha = alpha
        self.probes = self.covered = 0
        self._window = window
        self._latest: deque[list[float]] = deque()
        self._sorted: list[float] = []

    @property
    def quantile(self) -> float:
        """What the bound adds to a prediction; infinite while there are too few residuals."""
        # Not 1 - alpha of them by floating point, which may be one too few: 0.9 * 10 is 9.
        rank = math.ceil((len(self._sorted) + 1) * (1 - self.alpha) - 1e-9)
        return self._sorted[rank - 1] if rank <= len(self._sorted) else math.inf

    def bound(self, predicted: float) -> float:
        """An upper bound on what was predicted."""
        return min(max(predicted + self.quantile, 0.0), 1.0)

    def observe(self, predicted: Sequence[float], true: Sequence[float]) -> None:
        """Learn what predictions should have been, all of one moment."""
        pairs = list(zip(predicted, true, strict=True))
        self.probes += len(pairs)
        self.covered += sum(seen <= self.bound(guess) for guess, seen in pairs)
        if len(self._latest) == self._window:
            for residual in self._latest.popleft():
                del self._sorted[bisect_left(self._sorted, residual)]
        self._latest.append([seen - guess for guess, seen in pairs])
        for residual in self._latest[-1]:
            insort(self._sorted, residual)

    @property
    def coverage(self) -> float | None:
        """Share of probes that the bound had covered; None before the first."""
        return self.covered / self.probes if self.probes else None
