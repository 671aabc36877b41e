"""Loads the Triton kernels of an operation, to be compared with its torch reference.

Without a GPU they run in Triton's interpreter (see conftest.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernel(module: str, name: str) -> Callable[..., Any]:
    """The launcher ``name`` of ``sglang_beacon.ops.<module>_triton``."""
    launcher: Callable[..., Any] = getattr(
        importlib.import_module(f"sglang_beacon.ops.{module}_triton"), name
    )
    return launcher


def poisoned(launch: Callable[[], Any]) -> Any:
    """Run something while every new tensor is full of NaN, or of the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        return launch()
    finally:
        torch.use_deterministic_algorithms(False)
