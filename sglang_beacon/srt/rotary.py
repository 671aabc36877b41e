"""Finds the rotary table and softmax scale of every attention layer, and proves de-rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_beacon import ops
from sglang_beacon.ops.rope import RopeTable

if TYPE_CHECKING:
    from torch import nn

# De-rotating what the model's own module rotated must give the query back, relative to its norm.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class RotaryLayer(NamedTuple):
    """One attention layer: its RadixAttention, and the rotary module its queries pass through."""

    attention: Any
    rotary: Any

    @property
    def table(self) -> RopeTable:
        # Read at each use: SGLang replaces the tensor when it grows or changes its dtype.
        return RopeTable(self.rotary.cos_sin_cache, self.rotary.is_neox_style)


def find_layers(model: nn.Module) -> list[RotaryLayer]:
    """All attention layers of a model, by layer id.

    Raises
    ------
    RuntimeError
        If a layer is of a kind the policies cannot serve; the message names it.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, RotaryLayer] = {}
    for name, module in model.named_modules():
        attention = next((c for c in module.children() if isinstance(c, RadixAttention)), None)
        if attention is None:
            continue
        rotary = getattr(module, "rotary_emb", None)
        if problem := _problem(attention, rotary):
            raise RuntimeError(f"--kv-policy does not work with this model: {name} {problem}.")
        found[attention.layer_id] = RotaryLayer(attention, rotary)
    if sorted(found) != list(range(len(found))) or not found:
        raise RuntimeError("--kv-policy does not work with this model: its layers are not 0..L-1.")
    layers = [found[index] for index in range(len(found))]
    shapes = {
        (layer.attention.tp_q_head_num, layer.attention.tp_k_head_num, layer.attention.qk_head_dim)
        for layer in layers
    }
    if len(shapes) > 1:
        raise RuntimeError("--kv-policy does not work with this model: its layers differ in heads.")
    return layers


def self_test(layers: list[RotaryLayer], dtype: torch.dtype, device: torch.device | str) -> None:
    """Send random queries through each distinct rotary module and back; raise if any differs."""
    for rotary in {id(layer.rotary): layer for layer in layers}.values():
        error = round_trip_error(rotary, dtype, device)
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(
                f"--kv-policy does not work with this model: de-rotating the queries of "
                f"{type(rotary.rotary).__name__} is off by {error:.1e} of their norm."
            )


def round_trip_error(layer: RotaryLayer, dtype: torch.dtype, device: torch.device | str) -> float:
    """Largest error of rotate-then-derotate, relative to the largest query norm."""
    head_dim = layer.attention.qk_head_dim
    heads = layer.attention.tp_q_head_num
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(64, heads, head_dim, generator=generator).to(device, dtype)
    last = min(layer.rotary.cos_sin_cache.shape[0], 4096) - 1
    positions = torch.linspace(0, last, 64).long().to(device)
    key = query[:, :1].clone()
    # The module may rotate in place.
    rotated, _ = layer.rotary(positions, query.clone().flatten(1), key.flatten(1))
    back = ops.derotate(rotated.view_as(query), positions[:, None], layer.table)
    norm = query.float().norm(dim=-1).max()
    return float((back - query.float()).norm(dim=-1).max() / norm)


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
