"""Keys in a few bytes: coordinates in a small subspace, as 8-bit integers."""

from __future__ import annotations

import torch


def key_sketch(keys: torch.Tensor, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Project keys, and round each to 127 steps of its own largest coordinate.

    Parameters
    ----------
    keys : Tensor [N, H_kv, D]
    projection : Tensor [H_kv, D, R] float32
        Orthonormal columns: the subspace of each head.

    Returns
    -------
    codes : Tensor [N, H_kv, R] int8
    scales : Tensor [N, H_kv] float32
        A coordinate is its code times the scale.
    """
    coordinates = torch.einsum("nhd,hdr->nhr", keys.float(), projection)
    scales = coordinates.abs().amax(-1) / 127
    steps = coordinates / scales.clamp(min=1e-30)[..., None]
    # Half steps away from zero, which is what a kernel can do without a rounding mode.
    codes = (steps.abs() + 0.5).floor().clamp(max=127) * steps.sign()
    return codes.to(torch.int8), scales
