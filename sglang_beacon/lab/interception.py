"""Takes a Hugging Face decoder's queries and attention over for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

_NAME = "beacon_interception"


@contextmanager
def intercepted(
    model: PreTrainedModel,
    attend: Callable[..., tuple[torch.Tensor, None]],
    take_queries: Callable[[int, torch.Tensor], None],
) -> Iterator[None]:
    """Compute a model's attention by other means, and see its queries before RoPE.

    Parameters
    ----------
    model : PreTrainedModel
        Of the Llama or Qwen kind, with one sequence at a time.
    attend : callable
        Has the parameters of an attention function of `transformers.AttentionInterface`.
    take_queries : callable
        Called in each forward with every layer's index and its queries [n, H_q, D].
    """
    heads = model.config.num_attention_heads
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    hooks = []
    for index, layer in enumerate(model.get_decoder().layers):
        hook = _query_hook(index, heads, take_queries)
        hooks.append(_query_module(layer).register_forward_hook(hook))
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for hook in hooks:
            hook.remove()


def _query_hook(
    index: int, heads: int, take_queries: Callable[[int, torch.Tensor], None]
) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        head_dim = output.numel() // output.shape[1] // heads
        take_queries(index, output.detach().view(-1, heads, head_dim))

    return hook


def _query_module(layer: torch.nn.Module) -> torch.nn.Module:
    """The module whose output is a layer's queries right before RoPE."""
    attention = layer.self_attn
    return attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
