"""Rotary position embedding from a table, and its inverse."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RopeTable(NamedTuple):
    """A rotary table: ``cos_sin`` [positions, rotary_dim] holds cosines, then sines.

    ``neox`` pairs the two halves of the rotated dimensions; otherwise even and odd ones pair.
    """

    cos_sin: torch.Tensor
    neox: bool


def rotate(x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotate vectors to their positions.

    Parameters
    ----------
    x : Tensor [..., N, D]
        Only the first ``rotary_dim`` of D dimensions turn.
    positions : Tensor [N] or broadcastable to ``x.shape[:-1]``, int64
        Logical positions, below the table's length.
    table : RopeTable

    Returns
    -------
    Tensor [..., N, D] float32
    """
    cos, sin = _cos_sin(positions, table)
    a, b, rest = _pairs(x.float(), table)
    return _join(a * cos - b * sin, b * cos + a * sin, rest, table.neox)


def derotate(x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Undo `rotate`: same parameters, same shapes.

    Dividing by ``cos^2 + sin^2`` also undoes a gain folded into the table, as YaRN does. Exact up
    to the rounding of ``x``'s dtype.
    """
    cos, sin = _cos_sin(positions, table)
    a, b, rest = _pairs(x.float(), table)
    gain = cos.square() + sin.square()
    return _join((a * cos + b * sin) / gain, (b * cos - a * sin) / gain, rest, table.neox)


def average_rotation(table: RopeTable, begin: int, count: int) -> RopeTable:
    """The mean of the rotations to `count` positions from `begin` on, as a table of one row.

    Rotation is linear, so rotating by the mean is the mean of what was rotated. Positions past the
    table's end do not count.
    """
    begin = min(begin, len(table.cos_sin) - 1)
    ahead = table.cos_sin[begin : begin + count].float()
    return RopeTable(ahead.mean(0, keepdim=True), table.neox)


def _cos_sin(positions: torch.Tensor, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = table.cos_sin[positions].float().chunk(2, dim=-1)
    return cos, sin


def _pairs(x: torch.Tensor, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotary_dim = table.cos_sin.shape[-1]
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if table.neox:
        a, b = turning.chunk(2, dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
    return a, b, rest


def _join(a: torch.Tensor, b: torch.Tensor, rest: torch.Tensor, neox: bool) -> torch.Tensor:
    turned = torch.cat((a, b), dim=-1) if neox else torch.stack((a, b), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)
