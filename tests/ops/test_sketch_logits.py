"""Logits from sketches are those of the projected keys, up to the sketches' rounding."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import DEVICE, kernel, poisoned

from sglang_beacon.ops.key_sketch import key_sketch
from sglang_beacon.ops.sketch_logits import sketch_logits

COUNTS = (130, 0, 1)


def random_case(group: int, dim: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Keys and queries, then the arguments of the operation."""
    generator = torch.Generator().manual_seed(dim)
    keys = torch.randn(200, 2, dim, generator=generator)
    queries = torch.randn(3, 2 * group, dim, generator=generator)
    basis = torch.linalg.qr(torch.randn(2, dim, dim, generator=generator)).Q[..., :rank]
    projected = torch.einsum("bhgd,hdr->bhgr", queries.view(3, 2, group, dim), basis)
    slots = torch.stack([torch.randperm(200, generator=generator)[:140] for _ in COUNTS])
    counts = torch.tensor(COUNTS)
    slots = torch.where(torch.arange(140) < counts[:, None], slots, -1)
    sketch = key_sketch(keys, basis.contiguous())
    return keys, queries, projected.flatten(1, 2), *sketch, slots, counts


def test_in_a_whole_basis_they_are_the_logits() -> None:
    keys, queries, *case = random_case(2, 16, 16)
    logits = sketch_logits(*case, 0.25)
    *_, slots, _ = case
    for request, count in enumerate(COUNTS):
        for head in range(2):
            mine = queries[request, 2 * head : 2 * head + 2]
            exact = (mine @ keys[slots[request, :count], head].T * 0.25).amax(0)
            torch.testing.assert_close(logits[request, head, :count], exact, atol=0.05, rtol=0.05)
        assert (logits[request, :, count:] == -math.inf).all()


@pytest.mark.parametrize(("group", "rank"), [(1, 32), (3, 5), (8, 16)])
def test_kernel(group: int, rank: int) -> None:
    _, _, *case = random_case(group, 64, rank)
    launch = kernel("sketch_logits", "sketch_logits")
    found = poisoned(lambda: launch(*(x.to(DEVICE) for x in case), 0.125))
    torch.testing.assert_close(found.cpu(), sketch_logits(*case, 0.125), atol=1e-5, rtol=1e-5)
