"""What the kernels' launchers share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

# Kernels may then assume that a row of any of the tensors starts at a vector's boundary.
ALIGNMENT = 16


def upcasts(kernel: Any, dtype: torch.dtype) -> bool:
    """Whether products of a dtype need float32 operands: Triton's interpreter has no bfloat16."""
    return dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs at a time, at least."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def offset_table(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where several tensors start, relative to the first, so that one launch can reach them all.

    Parameters
    ----------
    tensors : sequence of Tensor
        Of one shape, dtype, device and layout.

    Returns
    -------
    Tensor [len(tensors)] int64
        In elements; on their device, and the same object as long as they stay where they are.

    Raises
    ------
    ValueError
        If they are laid out differently, or their vectors are not contiguous, or they do not lie
        `ALIGNMENT` elements apart.
    """
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.stride() != first.stride():
            raise ValueError("the tensors of one launch must be laid out alike")
    if first.stride(-1) != 1:
        raise ValueError("the vectors of a launch's tensors must be contiguous")
    return _offsets(tuple(t.data_ptr() for t in tensors), first.element_size(), first.device)


@lru_cache(maxsize=64)
def _offsets(addresses: tuple[int, ...], itemsize: int, device: torch.device) -> torch.Tensor:
    offsets = [(address - addresses[0]) // itemsize for address in addresses]
    for address, offset in zip(addresses, offsets, strict=True):
        if offset % ALIGNMENT or addresses[0] + offset * itemsize != address:
            raise ValueError(f"tensors of one launch must lie {ALIGNMENT} elements apart")
    return torch.tensor(offsets, dtype=torch.int64, device=device)
