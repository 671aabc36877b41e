"""A tiny random model: made in a moment, and sensitive to everything its cache holds."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
CONTEXT = 16_384


def save_random_qwen3(directory: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write a random Qwen3 of 4 layers with 4:2 heads and no tokenizer; returns the directory.

    Weights are scaled so that greedy output does not repeat: wide embeddings and sharp attention
    make every token depend on what the cache holds.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        rope_theta=10_000.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.fill_(1.5)
            elif weight.dim() == 2:
                wide = "embed" in name or "lm_head" in name
                weight.normal_(0, 1.0 if wide else 1.6 / weight.shape[1] ** 0.5)
    model.save_pretrained(directory)
    return directory


def random_prompt(length: int, seed: int) -> list[int]:
    """Tokens that the model knows, special ones aside: the same for the same seed."""
    return random.Random(seed).choices(range(2, VOCABULARY), k=length)
