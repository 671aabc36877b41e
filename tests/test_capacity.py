"""The memory arithmetic: published numbers, parameter counts, bounds and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_beacon.capacity import (
    MemoryEstimate,
    ModelShape,
    estimate,
    held_tokens,
    largest_batch,
    parse_size,
)

QWEN3_4B: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "qwen3_4b_config.json").read_text()
)
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}

shapes = st.builds(
    lambda layers, groups, kv_heads, head_dim, parameters, dtype_bytes: ModelShape(
        layers, groups * kv_heads, kv_heads, head_dim, parameters, dtype_bytes
    ),
    st.integers(1, 80),
    st.integers(1, 8),
    st.integers(1, 16),
    st.sampled_from([64, 80, 128, 256]),
    st.integers(1, 10**11),
    st.sampled_from([1, 2, 4]),
)
lengths = st.integers(1, 100_000)
budgets = st.none() | st.integers(1, 40_000)
page_sizes = st.sampled_from([1, 16, 64])


@pytest.mark.parametrize(("budget", "published_gb"), [(None, 77.0), (2048, 13.3)])
def test_published_memory_of_qwen3_4b(budget: int | None, published_gb: float) -> None:
    result = estimate(
        ModelShape.from_config(QWEN3_4B), batch=14, prompt=0, generate=32768, budget=budget
    )
    assert result.total_bytes / 1e9 == pytest.approx(published_gb, rel=0.05)


def test_sizes_of_qwen3_4b_by_hand() -> None:
    shape = ModelShape.from_config(QWEN3_4B)
    assert shape == ModelShape(36, 32, 8, 128, 4_022_468_096)
    assert shape.kv_bytes_per_token == 147_456
    assert shape.query_state_bytes() == 36 * 32 * 32 * 128 * 2


def test_small_llama_with_derived_head_dim() -> None:
    shape = ModelShape.from_config(SMALL)
    assert (shape.head_dim, shape.num_parameters, shape.dtype_bytes) == (64, 134_515_008, 2)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_match_transformers(kind: str, tied: bool, bias: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias and kind == "llama",
        sliding_window=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    written = {**config.to_dict(), "head_dim": model.model.layers[0].self_attn.head_dim}
    if kind == "mistral":  # transformers keeps the key and builds no bias
        written.pop("attention_bias", None)
    assert ModelShape.from_config(written).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ],
)
def test_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ValueError, match=f"no '{key}'"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_experts": 128}, "mixture-of-experts models .* unsupported"),
        ({"kv_lora_rank": 512}, "multi-head latent attention .* unsupported"),
        ({"model_type": "gpt2"}, "model type 'gpt2' is unsupported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights .* unsupported"),
        ({"layer_types": ["sliding_attention"]}, "layers without full attention .* unsupported"),
        ({"model_type": "mistral", "sliding_window": 4096}, "layers without full attention"),
        ({"dtype": "int4"}, "dtype 'int4' is unsupported"),
        ({"num_hidden_layers": "30"}, "'num_hidden_layers' .* must be a positive integer"),
        ({"num_key_value_heads": 2}, "9 query heads cannot share 2 KV heads"),
    ],
)
def test_unsupported_config_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ModelShape.from_config({**SMALL, **change})


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 2), ("torch.float16", 2), ("float32", 4)]
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_of_both_spellings(key: str, dtype: str, expected: int) -> None:
    assert ModelShape.from_config({**SMALL, key: dtype}).dtype_bytes == expected


def test_unused_sliding_window_is_fine() -> None:
    unused = {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "layer_types": ["full_attention"],
    }
    assert ModelShape.from_config({**QWEN3_4B, **unused}) == ModelShape.from_config(QWEN3_4B)


def test_shard_divides_heads_and_replicates_kv_heads() -> None:
    shape = ModelShape.from_config(QWEN3_4B)
    assert shape.shard(1) == shape
    assert shape.shard(4) == replace(
        shape, num_query_heads=8, num_kv_heads=2, num_parameters=1_005_617_024
    )
    assert (shape.shard(16).num_query_heads, shape.shard(16).num_kv_heads) == (2, 1)
    with pytest.raises(ValueError, match="32 query heads cannot be divided over 3 ranks"):
        shape.shard(3)
    with pytest.raises(ValueError, match="6 KV heads cannot be divided or replicated over 4"):
        ModelShape(1, 12, 6, 64, 1).shard(4)
    with pytest.raises(ValueError, match="must be positive"):
        shape.shard(0)


@pytest.mark.parametrize(
    ("prompt", "generated", "budget", "page_size", "expected"),
    [
        (100, 28, None, 1, 128),
        (100, 28, None, 16, 128),
        (100, 29, None, 16, 144),
        (100, 3000, 2048, 1, 2048),
        (100, 3000, 2050, 64, 2112),
        (100, 20, 2048, 1, 120),
        (5000, 20, 2048, 1, 2048),
        (0, 0, None, 16, 0),
    ],
)
def test_held_tokens(
    prompt: int, generated: int, budget: int | None, page_size: int, expected: int
) -> None:
    assert held_tokens(prompt, generated, budget, page_size) == expected


@pytest.mark.parametrize("arguments", [(-1, 1, None), (1, -1, None), (1, 1, 0), (1, 1, None, 0)])
def test_impossible_lengths_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="must"):
        held_tokens(*arguments)


@given(shapes, st.integers(0, 64), lengths, lengths, budgets, page_sizes)
def test_memory_grows_with_everything(
    shape: ModelShape, batch: int, prompt: int, generate: int, budget: int | None, page: int
) -> None:
    def total(batch: int, prompt: int, generate: int, budget: int | None) -> int:
        return estimate(shape, batch, prompt, generate, budget, page_size=page).total_bytes

    here = total(batch, prompt, generate, budget)
    assert total(batch + 1, prompt, generate, budget) > here
    assert total(batch, prompt + 1, generate, budget) >= here
    assert total(batch, prompt, generate + 1, budget) >= here
    if budget is not None:
        assert total(batch, prompt, generate, budget + 1) >= here


@given(shapes, st.integers(1, 10**12), lengths, lengths, budgets, page_sizes)
def test_largest_batch_fits_and_one_more_does_not(
    shape: ModelShape, memory: int, prompt: int, generate: int, budget: int | None, page: int
) -> None:
    def of(batch: int) -> MemoryEstimate:
        return estimate(shape, batch, prompt, generate, budget, page_size=page)

    batch = largest_batch(of(1), memory)
    assert batch == 0 or of(batch).total_bytes <= memory
    assert of(batch + 1).total_bytes > memory


def test_batch_of_empty_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt or generated token"):
        largest_batch(estimate(ModelShape.from_config(SMALL), 1, 0, 0), 10**10)
    with pytest.raises(ValueError, match="batch must not be negative"):
        estimate(ModelShape.from_config(SMALL), -1, 1, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("1.5tb", 1_500_000_000_000),
        ("512MiB", 2**29),
        ("7B", 7),
        ("123456789", 123_456_789),
        (123_456_789, 123_456_789),
    ],
)
def test_parse_size(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "80 G", "GB", "-1GB", "0GB", "1e9", "80XB", 0])
def test_parse_size_refuses(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a positive size such as 80GB"):
        parse_size(text)


@given(st.integers(1, 10**15))
def test_parse_size_keeps_plain_numbers_exact(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == size
