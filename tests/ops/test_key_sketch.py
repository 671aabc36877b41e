"""A sketch is a key's projection, off by half a step at most."""

from __future__ import annotations

import pytest
import torch
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.key_sketch import key_sketch


def random_case(dim: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, one of them zero, and an orthonormal basis for each head."""
    generator = torch.Generator().manual_seed(dim)
    keys = torch.randn(45, 2, dim, generator=generator).to(dtype)
    keys[7] = 0
    basis = torch.linalg.qr(torch.randn(2, dim, dim, generator=generator)).Q[..., :rank]
    return keys, basis.contiguous()


@pytest.mark.parametrize("rank", [1, 8, 16])
def test_coordinates_come_back(rank: int) -> None:
    keys, basis = random_case(16, rank, torch.float32)
    codes, scales = key_sketch(keys, basis)
    assert codes.dtype == torch.int8
    expected = torch.einsum("nhd,hdr->nhr", keys, basis)
    error = (codes.float() * scales[..., None] - expected).abs()
    assert (error <= 0.5 * scales[..., None] + 1e-6).all()
    assert not codes[7].any()
    assert not scales[7].any()
    used = codes[scales > 0].abs().amax(-1)
    assert (used == 127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rank"), [(64, 32), (128, 32), (24, 5)])
def test_kernel(dim: int, rank: int, dtype: torch.dtype) -> None:
    """Of every other key of a wider tensor; a code may fall the other way at a half step."""
    keys, basis = random_case(dim, rank, dtype)
    wide = torch.stack((keys, keys), dim=1).to(DEVICE)[:, 1]
    launch = kernel("key_sketch", "key_sketch")
    codes, scales = poisoned(lambda: launch(wide, basis.to(DEVICE)))
    expected_codes, expected_scales = key_sketch(keys, basis)
    torch.testing.assert_close(scales.cpu(), expected_scales)
    off = (codes.cpu().int() - expected_codes.int()).abs()
    assert off.max() <= 1
    assert off.float().mean() < 0.01
