"""Rivals against NVIDIA's kvpress, where that is installed: the same scores of the same layer.

It pins its own transformers, so it is no dependency; a directory on ``PYTHONPATH`` is enough::

    pip install --no-deps --target DIR kvpress cachetools fire termcolor
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from sglang_beacon import ops, policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import CachedKeys, Observations
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.runtime.signals import Revisits, Signals

kvpress = pytest.importorskip("kvpress")

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM, WINDOW = 80, 48, 4, 2, 16, 8
POSITIONS = 4096


class Layer:
    """One attention layer that has seen some tokens, as both projects want to see it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=DIM,
            max_position_embeddings=POSITIONS,
        )
        config._attn_implementation = "eager"
        self.module = Qwen3Attention(config, layer_idx=0).eval()
        self.module.rotary_emb = Qwen3RotaryEmbedding(config)
        cos, sin = self.module.rotary_emb(torch.zeros(1), torch.arange(POSITIONS)[None])
        half = DIM // 2
        self.rope = RopeTable(torch.cat((cos[0, :, :half], sin[0, :, :half]), -1), neox=True)
        self.hidden = torch.randn(1, TOKENS, HIDDEN)
        self.embeddings = cos[:, :TOKENS], sin[:, :TOKENS]
        split = (1, TOKENS, -1, DIM)
        with torch.no_grad():
            queries = self.module.q_norm(self.module.q_proj(self.hidden).view(split))
            keys = self.module.k_norm(self.module.k_proj(self.hidden).view(split))
            self.values = self.module.v_proj(self.hidden).view(split).transpose(1, 2)
        self.queries = queries[0].transpose(0, 1)
        place = torch.arange(TOKENS)
        self.keys = ops.rotate(keys.transpose(1, 2), place, self.rope)
        logits = ops.rotate(self.queries, place, self.rope) @ self.keys[0].repeat_interleave(
            HEADS // KV_HEADS, 0
        ).transpose(1, 2)
        causal = place[:, None] >= place
        self.attention = (logits * DIM**-0.5).masked_fill(~causal, -torch.inf).softmax(-1)

    @torch.no_grad()
    def theirs(self, press: Any) -> torch.Tensor:
        """Scores [H_kv, N] by a press."""
        observed = isinstance(press, kvpress.ObservedAttentionPress)
        scores: torch.Tensor = press.score(
            self.module, self.hidden, self.keys, self.values,
            self.attention[None] if observed else None,
            {"position_embeddings": self.embeddings},
        )  # fmt: skip
        return scores[0]

    def ours(self, name: str, window: int = 0, **options: Any) -> torch.Tensor:
        """Scores [H_kv, N] by a policy that sees the newest ``window`` queries."""
        if window > 1:
            options["window"] = window
        policy = policies.create(KVPolicyConfig(policy=name, budget=64, options=options))
        assert policy is not None
        keys, values = (each[0].transpose(0, 1) for each in (self.keys, self.values))
        cache = CachedKeys([keys], torch.arange(TOKENS), [values])
        place = torch.arange(TOKENS - window, TOKENS)
        rows = self.queries[None, :, TOKENS - window :]
        if policy.alignment.future:
            ahead = ops.average_rotation(self.rope, TOKENS, policy.alignment.future)
            rotated = ops.rotate(rows, torch.zeros_like(place), ahead)
        else:
            rotated = ops.rotate(rows, place, self.rope)
        seen = Observations(TOKENS - 1, 0, DIM**-0.5, rotated, place + 1)
        return policy.score(cache, seen)[0]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_snapkv(layer: Layer) -> None:
    """Their pooling averages, the paper's takes the maximum: compared without any."""
    press = kvpress.SnapKVPress(window_size=WINDOW, kernel_size=1)
    theirs = layer.theirs(press)[:, :-WINDOW] * WINDOW
    assert alike(layer.ours("snapkv", WINDOW, kernel=1)[:, :-WINDOW], theirs)


def test_tova(layer: Layer) -> None:
    assert alike(layer.ours("tova", 1)[:, :-1], layer.theirs(kvpress.TOVAPress())[:, :-1])


def test_keydiff(layer: Layer) -> None:
    assert alike(layer.ours("keydiff"), layer.theirs(kvpress.KeyDiffPress()))


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention(layer: Layer, covariance: bool) -> None:
    """Of all queries; their statistics leave out what they call sinks."""
    press = kvpress.ExpectedAttentionPress(n_sink=0, use_covariance=covariance)
    ours = layer.ours("expected_attention", TOKENS, covariance=covariance)
    assert alike(ours, layer.theirs(press))


def test_observed_attention(layer: Layer) -> None:
    """What H2O remembers, of a group's mean and divided by the queries that saw the token."""
    grouped = layer.attention.view(KV_HEADS, -1, TOKENS, TOKENS).mean(1)
    signals = Signals(1, KV_HEADS, TOKENS)
    for position in range(TOKENS):
        signals.extend(position, position + 1)
        weights = grouped[None, :, position, : position + 1]
        signals.note(weights, position, 1.0, Revisits(far=32))
    history = signals.view().history[0] / torch.arange(TOKENS, 0, -1)
    assert alike(history, layer.theirs(kvpress.ObservedAttentionPress()))


def test_streaming(layer: Layer) -> None:
    """The sinks and the newest tokens, and nothing else."""
    press = kvpress.StreamingLLMPress(compression_ratio=0.5, n_sink=4)
    theirs = layer.theirs(press).topk(TOKENS // 2).indices.sort().values
    config = KVPolicyConfig(policy="streaming", budget=64, n_recent=TOKENS // 2 - 4 - 1)
    policy = policies.create(config)
    assert policy is not None
    cache = CachedKeys([layer.keys[0].transpose(0, 1)], torch.arange(TOKENS))
    score = policy.score(cache, Observations(TOKENS - 1, 0, 1.0))[0].clone()
    score[:, :4] = torch.inf
    assert torch.equal(score.topk(TOKENS // 2).indices.sort().values, theirs)
