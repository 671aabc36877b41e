"""Finds a model's attention layers and their rotary table, and proves de-rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.ops.rope import RopeTable

if TYPE_CHECKING:
    from torch import nn

# De-rotating what the model's own module rotated must give the query back, relative to its norm.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class RotaryAttention(NamedTuple):
    """The attention layers of a model, which are alike.

    ``attention`` is the RadixAttention of the first, ``rotary`` the module its queries pass.
    """

    num_layers: int
    attention: Any
    rotary: Any

    @property
    def query_heads(self) -> int:
        return self.attention.tp_q_head_num

    @property
    def kv_heads(self) -> int:
        return self.attention.tp_k_head_num

    @property
    def head_dim(self) -> int:
        return self.attention.qk_head_dim

    @property
    def table(self) -> RopeTable:
        # Read at each use: SGLang replaces the tensor when it grows or changes its dtype.
        return RopeTable(self.rotary.cos_sin_cache, self.rotary.is_neox_style)


def find(model: nn.Module) -> RotaryAttention:
    """The attention layers of a model.

    Raises
    ------
    RuntimeError
        If one is of a kind the policies cannot serve, or another than the rest; the message says
        which.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, tuple[Any, Any]] = {}
    for name, module in model.named_modules():
        attention = next((c for c in module.children() if isinstance(c, RadixAttention)), None)
        if attention is None:
            continue
        rotary = getattr(module, "rotary_emb", None)
        if problem := _problem(attention, rotary):
            raise RuntimeError(f"--kv-policy does not work with this model: {name} {problem}.")
        found[attention.layer_id] = attention, rotary
    if sorted(found) != list(range(len(found))) or not found:
        raise RuntimeError("--kv-policy does not work with this model: its layers are not 0..L-1.")
    first = RotaryAttention(len(found), *found[0])
    for attention, rotary in found.values():
        if _description(attention) != _description(first.attention):
            raise RuntimeError(
                "--kv-policy does not work with this model: its attention layers differ."
            )
        if rotary is not first.rotary and not _same_table(rotary, first.rotary):
            raise RuntimeError(
                "--kv-policy does not work with this model: its rotary embeddings differ."
            )
    return first


def self_test(model: RotaryAttention, dtype: torch.dtype, device: torch.device | str) -> None:
    """Send random queries through the rotary module and back; raise if they do not come back."""
    error = round_trip_error(model, dtype, device)
    if not error <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"--kv-policy does not work with this model: de-rotating the queries of "
            f"{type(model.rotary).__name__} is off by {error:.1e} of their norm."
        )


def round_trip_error(
    model: RotaryAttention, dtype: torch.dtype, device: torch.device | str
) -> float:
    """Largest error of rotate-then-derotate, relative to the largest query norm."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(64, model.query_heads, model.head_dim, generator=generator)
    query = query.to(device, dtype)
    last = min(model.rotary.cos_sin_cache.shape[0], 4096) - 1
    positions = torch.linspace(0, last, 64).long().to(device)
    key = query[:, :1].clone()
    # The module may rotate in place.
    rotated, _ = model.rotary(positions, query.clone().flatten(1), key.flatten(1))
    back = ops.derotate(rotated.view_as(query), positions[:, None], model.table)
    norm = query.float().norm(dim=-1).max()
    return float((back - query.float()).norm(dim=-1).max() / norm)


def _description(attention: Any) -> tuple[Any, ...]:
    """What all layers must have in common."""
    heads = attention.tp_q_head_num, attention.tp_k_head_num
    return *heads, attention.qk_head_dim, attention.scaling


def _same_table(a: Any, b: Any) -> bool:
    return a.is_neox_style == b.is_neox_style and torch.equal(a.cos_sin_cache, b.cos_sin_cache)


def _problem(attention: Any, rotary: Any) -> str | None:
    if attention.sliding_window_size > -1:
        return "has a sliding window"
    if attention.is_cross_attention or attention.attn_type.value != "decoder":
        return "is not causal self-attention"
    if attention.logit_cap:
        return "caps its logits"
    if attention.use_irope or attention.xai_temperature_len > 0:
        return "scales attention by position"
    if attention.qk_head_dim != attention.v_head_dim:
        return "has values of another size than keys"
    if getattr(rotary, "cos_sin_cache", None) is None or hasattr(rotary, "mrope_section"):
        return "has no plain rotary embedding"
    return None
