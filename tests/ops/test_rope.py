"""Rotation agrees with SGLang's own modules, and de-rotation gives the query back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import naive

from sglang_beacon.ops import RopeTable, derotate, rotate

HEAD_DIM = 64
LENGTH = 8192
HEADS = 3

# As `rope_scaling` in a model's config.json, with the share of the head that turns.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"is_neox_style": False},
    "partial": {"rotary_dim": 32},
    "partial interleaved": {"rotary_dim": 32, "is_neox_style": False},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        }
    },
    "yarn": {
        "max_position": 2048,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    },
    "linear": {"max_position": 2048, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"max_position": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
}


@pytest.fixture(scope="module")
def build() -> Callable[..., Any]:
    """Builds a rotary module of SGLang, by variant and dtype."""
    # Importing it takes seconds: not while tests are collected.
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    def make(variant: str, dtype: torch.dtype = torch.float32) -> Any:
        settings = {
            "head_size": HEAD_DIM,
            "rotary_dim": HEAD_DIM,
            "max_position": LENGTH,
            "base": 10_000,
            **VARIANTS[variant],
        }
        return get_rope(dtype=dtype, **settings)

    return make


def table_of(rotary: Any) -> RopeTable:
    return RopeTable(rotary.cos_sin_cache, rotary.is_neox_style)


def queries(num: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randn(num, HEADS, HEAD_DIM, generator=generator).to(dtype)


def positions_up_to(length: int, num: int) -> torch.Tensor:
    """From 0 to the last one, in no order."""
    spread = torch.linspace(0, length - 1, num).long()
    return spread[torch.randperm(num, generator=torch.Generator().manual_seed(0))]


def natively_rotated(rotary: Any, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    key = query[:, :1].clone()
    rotated, _ = rotary.forward_native(positions, query.clone().flatten(1), key.flatten(1))
    return rotated.view_as(query)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a vector, relative to its own norm."""
    expected = expected.float()
    return float(((actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_models_own_rotation(variant: str, build: Callable[..., Any]) -> None:
    rotary = build(variant)
    query = queries(97)
    positions = positions_up_to(rotary.cos_sin_cache.shape[0], 97)
    assert positions.max() >= 8191
    native = natively_rotated(rotary, positions, query)
    ours = rotate(query, positions[:, None], table_of(rotary))
    assert relative_error(ours, native) <= 1e-6
    back = derotate(native, positions[:, None], table_of(rotary))
    assert relative_error(back, query) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_variants_differ(variant: str, build: Callable[..., Any]) -> None:
    """Each scheme turns a query differently, and YaRN alone changes its norm."""
    query, position = queries(1), torch.tensor([1777])
    rotated = natively_rotated(build(variant), position, query)
    for other in VARIANTS:
        if other != variant:
            assert relative_error(natively_rotated(build(other), position, query), rotated) > 1e-3
    gain = float(rotated.norm() / query.norm())
    assert gain == pytest.approx(1.1386 if variant == "yarn" else 1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_is_off_by_its_own_rounding_only(
    variant: str, dtype: torch.dtype, build: Callable[..., Any]
) -> None:
    """Table and queries in the model's dtype, as SGLang holds them without a GPU."""
    rotary = build(variant, dtype)
    query = queries(64, dtype)
    positions = positions_up_to(rotary.cos_sin_cache.shape[0], 64)
    native = natively_rotated(rotary, positions, query)
    back = derotate(native, positions[:, None], table_of(rotary))
    assert relative_error(back, query) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_start_up_check_accepts_the_module(variant: str, build: Callable[..., Any]) -> None:
    from sglang_beacon.srt.rotary import TOLERANCE, RotaryAttention, round_trip_error, self_test

    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = SimpleNamespace(qk_head_dim=HEAD_DIM, tp_q_head_num=HEADS)
    model = RotaryAttention(1, attention, build(variant).to(device))
    assert round_trip_error(model, torch.float32, device) <= TOLERANCE[torch.float32]
    self_test(model, torch.float32, device)


def test_the_start_up_check_refuses_a_wrong_table(build: Callable[..., Any]) -> None:
    """A module that pairs other dimensions than its table says must not pass."""
    from sglang_beacon.srt.rotary import RotaryAttention, self_test

    class Liar(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.true = build("plain")
            self.cos_sin_cache = self.true.cos_sin_cache
            self.is_neox_style = False

        def forward(self, *arguments: torch.Tensor) -> Any:
            return self.true.forward_native(*arguments)

    attention = SimpleNamespace(qk_head_dim=HEAD_DIM, tp_q_head_num=HEADS)
    with pytest.raises(RuntimeError, match="Liar is off by"):
        self_test(RotaryAttention(1, attention, Liar()), torch.float32, "cpu")


# The rest needs no engine.


def plain_table(rotary_dim: int, neox: bool, length: int = 4096) -> tuple[RopeTable, list[float]]:
    """A table built from the definition, and its frequencies."""
    frequencies = [10_000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    angles = torch.arange(length)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return RopeTable(torch.cat((angles.cos(), angles.sin()), -1).float(), neox), frequencies


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_rotate_by_definition(rotary_dim: int, neox: bool) -> None:
    """Against sines and cosines of the angles themselves, pair by pair."""
    table, frequencies = plain_table(rotary_dim, neox)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    positions = [0, 1, 77, 2048, 4095]
    expected = [
        naive.rotate(row, position, frequencies, neox)
        for row, position in zip(x.double().tolist(), positions, strict=True)
    ]
    actual = rotate(x, torch.tensor(positions), table)
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-6, rtol=0)
    assert torch.equal(actual[:, rotary_dim:], x[:, rotary_dim:])
    torch.testing.assert_close(
        derotate(actual, torch.tensor(positions), table), x, atol=1e-6, rtol=0
    )


def test_products_depend_on_distance_alone() -> None:
    table, _ = plain_table(8, True)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(4))

    def product(query_position: int, key_position: int) -> float:
        turned_q = rotate(q, torch.tensor([query_position]), table)
        turned_k = rotate(k, torch.tensor([key_position]), table)
        return float((turned_q * turned_k).sum())

    assert product(3000, 2900) == pytest.approx(product(100, 0), abs=1e-5)
    assert product(3000, 2900) != pytest.approx(product(101, 0), abs=1e-3)


def test_positions_broadcast() -> None:
    """[layers, heads, tokens, D] by [tokens], and [tokens, heads, D] by [tokens, 1]."""
    table, _ = plain_table(8, True)
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([9, 4, 100, 4, 0])
    everything = rotate(x, positions, table)
    per_token = rotate(x.permute(2, 0, 1, 3), positions[:, None, None], table)
    assert torch.equal(per_token.permute(1, 2, 0, 3), everything)
    for token, position in enumerate(positions.tolist()):
        alone = rotate(x[:, :, token], torch.tensor(position), table)
        assert torch.equal(alone, everything[:, :, token])


def test_rotation_leaves_its_input_alone() -> None:
    table, _ = plain_table(8, False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))
    before = x.clone()
    for turn in (rotate, derotate):
        turn(x, torch.arange(4), table)
    assert torch.equal(x, before)
    assert rotate(x.bfloat16(), torch.arange(4), table).dtype == torch.float32
