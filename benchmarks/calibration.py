"""What a calibrated bound is worth when residuals are not exchangeable: coverage under drift.

Residuals are exponential, in units of their mean. They drift (the mean grows steadily), jump (it
doubles once) or follow a slow wave; the bound sees the latest ``window`` of them::

    python -m benchmarks.calibration
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from benchmarks.conditions import store
from sglang_beacon.runtime.bounds import CalibratedDrop

ALPHA = 0.1
PROBES = 6000
WINDOWS = (64, 256, 1024)
# Factor on the mean residual at each probe.
SCENARIOS: dict[str, Callable[[int], float]] = {
    "exchangeable": lambda probe: 1.0,
    "grows by 1 % in 100 probes": lambda probe: 1.01 ** (probe / 100),
    "grows by 10 % in 100 probes": lambda probe: 1.1 ** (probe / 100),
    "doubles half way": lambda probe: 1.0 + (probe >= PROBES // 2),
    "wave of 1,000 probes": lambda probe: 1.0 + 0.5 * math.sin(2 * math.pi * probe / 1000),
}


def coverage(factor: Callable[[int], float], window: int, seed: int = 0) -> float:
    """Share of residuals that the bound before each had covered."""
    generator = torch.Generator().manual_seed(seed)
    draws = -torch.rand(PROBES, generator=generator).log() * 0.002
    drop = CalibratedDrop(ALPHA, window)
    for probe, draw in enumerate(draws.tolist()):
        drop.observe([0.0], [min(draw * factor(probe), 1.0)])
    assert drop.coverage is not None
    return drop.coverage


def main() -> None:
    """Print and store coverage by scenario and window."""
    rows = {
        name: {window: coverage(factor, window) for window in WINDOWS}
        for name, factor in SCENARIOS.items()
    }
    print(f"{'alpha 0.1, target 90 %':30s}" + "".join(f"{window:>10d}" for window in WINDOWS))
    for name, row in rows.items():
        print(f"{name:30s}" + "".join(f"{value:10.1%}" for value in row.values()))
    store("calibration", {"study": "calibration", "alpha": ALPHA, "probes": PROBES, "rows": rows})


if __name__ == "__main__":
    main()
