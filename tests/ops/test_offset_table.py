"""One launch reaches several tensors by their distance from the first."""

from __future__ import annotations

import pytest
import torch

from sglang_beacon.ops.launch import offset_table


def test_distances_in_elements() -> None:
    storage = torch.zeros(5, 3, 16, dtype=torch.float16)
    assert offset_table(list(storage)).tolist() == [0, 48, 96, 144, 192]
    assert offset_table([storage[3], storage[0]]).tolist() == [0, -144]


def test_remembered_as_long_as_they_stay() -> None:
    tensors = [torch.zeros(64), torch.zeros(64)]
    assert offset_table(tensors) is offset_table(tensors)
    assert offset_table(tensors[::-1]) is not offset_table(tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(2, 16), torch.zeros(2, 32)[:, :16]], "alike"),
        ([torch.zeros(16), torch.zeros(16, dtype=torch.int32)], "alike"),
        ([torch.zeros(2, 32)[:, ::2]], "contiguous"),
        (list(torch.zeros(2, 3, 8)[:, 0, :8]), "16 elements apart"),
    ],
)
def test_layouts_that_a_launch_cannot_reach(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offset_table(tensors)
