"""How many bytes a model, a token and a request take, and how many requests fit.

Pure integer arithmetic on the standard library, used by admission, by ``sglang-beacon plan`` and
by the tests alike, so that they cannot disagree. Sizes are bytes, lengths are tokens, and every
number is per rank: divide a model with `ModelShape.shard` first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

# An assumption, not a measurement: CUDA context, library workspaces and the activations of one
# decode step on one GPU. Larger prefill chunks and CUDA graphs for many batch sizes need more.
RUNTIME_OVERHEAD_BYTES = 1 << 30

# Queries kept per layer and query head for scoring: 16 beacons and 16 recent ones.
DEFAULT_NUM_QUERIES = 32

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder with grouped-query attention that decide its memory.

    Attributes
    ----------
    num_layers, num_query_heads, num_kv_heads, head_dim
        Attention layers, heads per layer and elements per head.
    num_parameters
        Elements of all weights; tied embeddings count once.
    dtype_bytes
        Bytes of one element, the same for weights, keys, values and queries.

    Raises
    ------
    ValueError
        On construction, when a field is not positive or the heads do not form groups.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_query_heads} query heads cannot share {self.num_kv_heads} KV heads"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the contents of a Hugging Face ``config.json``.

        Parameters
        ----------
        config
            Of a dense decoder of type llama, mistral, qwen2 or qwen3. A missing ``head_dim`` is
            ``hidden_size // num_attention_heads``; a missing dtype is a 2-byte one.

        Raises
        ------
        ValueError
            One sentence that names the missing key or says why the model is unsupported.
        """
        _refuse_other_than_dense(config)
        query_heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        shape = cls(
            num_layers=_positive(config, "num_hidden_layers"),
            num_query_heads=query_heads,
            num_kv_heads=_positive(config, "num_key_value_heads", default=query_heads),
            head_dim=_positive(config, "head_dim", default=hidden // query_heads),
            num_parameters=1,
            dtype_bytes=_dtype_bytes(config),
        )
        return replace(shape, num_parameters=_count_parameters(shape, config))

    def shard(self, tp: int) -> ModelShape:
        """Return the shape that one of `tp` tensor-parallel ranks holds.

        KV heads replicate when there are fewer than ranks. The parameters are divided evenly:
        the copies of norms and of replicated KV projections are not added.

        Raises
        ------
        ValueError
            When the query heads or the KV heads cannot be divided over the ranks.
        """
        if tp <= 0:
            raise ValueError(f"tensor parallel size must be positive, not {tp}")
        if self.num_query_heads % tp:
            raise ValueError(
                f"{self.num_query_heads} query heads cannot be divided over {tp} ranks"
            )
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} KV heads cannot be divided or replicated over {tp} ranks"
            )
        return replace(
            self,
            num_query_heads=self.num_query_heads // tp,
            num_kv_heads=max(1, self.num_kv_heads // tp),
            num_parameters=-(-self.num_parameters // tp),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def query_state_bytes(self, num_queries: int = DEFAULT_NUM_QUERIES) -> int:
        """Bytes of the pre-RoPE queries (``n_beacon + n_recent``) kept of one request."""
        return (
            self.num_layers * self.num_query_heads * num_queries * self.head_dim * self.dtype_bytes
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that `batch` requests take at their peak, and the lengths they follow from."""

    batch: int
    tokens_per_request: int
    weight_bytes: int
    kv_bytes: int
    query_state_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return self.weight_bytes + self.kv_bytes + self.query_state_bytes + self.overhead_bytes


def held_tokens(prompt: int, generated: int, budget_tokens: int | None, page_size: int = 1) -> int:
    """Return the token slots one request holds at its peak during decoding.

    Parameters
    ----------
    prompt, generated
        Tokens of the prompt and of the answer.
    budget_tokens
        Most tokens a request keeps, prompt and recent window included; None without a policy.
        A prompt longer than the budget is held whole until its prefill ends: not counted here.
    page_size
        Slots are given out in pages of this many tokens, so the result is a multiple of it.

    Raises
    ------
    ValueError
        When a length is negative, or the budget or the page size is not positive.
    """
    if prompt < 0 or generated < 0:
        raise ValueError(f"lengths must not be negative: prompt {prompt}, generated {generated}")
    if page_size <= 0:
        raise ValueError(f"page size must be positive, not {page_size}")
    tokens = prompt + generated
    if budget_tokens is not None:
        if budget_tokens <= 0:
            raise ValueError(f"KV budget must be positive, not {budget_tokens}")
        tokens = min(tokens, budget_tokens)
    return -(-tokens // page_size) * page_size


def estimate(
    shape: ModelShape,
    batch: int,
    prompt: int,
    generate: int,
    budget: int | None = None,
    *,
    page_size: int = 1,
    num_queries: int = DEFAULT_NUM_QUERIES,
    overhead_bytes: int = RUNTIME_OVERHEAD_BYTES,
) -> MemoryEstimate:
    """Return the peak memory of `batch` equal requests, term by term.

    `budget` None means no policy: then requests hold every token and no observed queries. The
    other parameters are those of `held_tokens` and `ModelShape.query_state_bytes`.

    Raises
    ------
    ValueError
        When the batch is negative, or a length is as in `held_tokens`.
    """
    if batch < 0:
        raise ValueError(f"batch must not be negative, not {batch}")
    tokens = held_tokens(prompt, generate, budget, page_size)
    queries = 0 if budget is None else shape.query_state_bytes(num_queries)
    return MemoryEstimate(
        batch=batch,
        tokens_per_request=tokens,
        weight_bytes=shape.weight_bytes,
        kv_bytes=batch * tokens * shape.kv_bytes_per_token,
        query_state_bytes=batch * queries,
        overhead_bytes=overhead_bytes,
    )


def largest_batch(one: MemoryEstimate, memory_bytes: int) -> int:
    """Return the most requests like that of ``one`` that fit; 0 when not even one does.

    Parameters
    ----------
    one
        The `estimate` of a batch of 1.
    memory_bytes
        For everything, weights and overhead included.

    Raises
    ------
    ValueError
        When the request holds no token at all.
    """
    if one.tokens_per_request == 0:
        raise ValueError("a request needs at least one prompt or generated token")
    free = memory_bytes - one.weight_bytes - one.overhead_bytes
    return max(0, free // (one.kv_bytes + one.query_state_bytes))


def parse_size(text: str | int) -> int:
    """Return the bytes of ``"80GB"`` (powers of 1000), ``"80GiB"`` (of 1024) or a plain number.

    Raises
    ------
    ValueError
        One sentence, when the text is no such size or is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(I?)B)?\s*", str(text).upper())
    size = 0
    if match is not None:
        number, prefix, binary = match.groups()
        power = " KMGT".index(prefix) if prefix else 0
        size = int(Decimal(number) * (1024 if binary else 1000) ** power)
    if size <= 0:
        raise ValueError(f"{text!r} is not a positive size such as 80GB, 80GiB or 80000000000")
    return size


def _refuse_other_than_dense(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind is None:
        raise ValueError("the model config has no 'model_type'")
    if config.get("kv_lora_rank"):
        raise ValueError(f"multi-head latent attention ({kind}) is unsupported")
    if any(config.get(key) for key in _MOE_KEYS):
        raise ValueError(f"mixture-of-experts models ({kind}) are unsupported")
    if kind not in _DENSE_TYPES:
        raise ValueError(
            f"model type {kind!r} is unsupported: use one of {', '.join(_DENSE_TYPES)}"
        )
    if config.get("quantization_config"):
        raise ValueError(f"quantized weights ({kind}) are unsupported: give the unquantized model")
    # Mistral has no switch: a window in its config is in use.
    windowed = config.get("use_sliding_window", kind == "mistral") and config.get("sliding_window")
    if windowed or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layers without full attention ({kind}) are unsupported")


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"the model config has no {key!r}")
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{key!r} in the model config must be a positive integer, not {value!r}")
    return value


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    # transformers 4 writes `torch_dtype`, transformers 5 `dtype`; loaded configs hold torch.dtype.
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is unsupported: use one of {list(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def _count_parameters(shape: ModelShape, config: Mapping[str, Any]) -> int:
    kind = config["model_type"]
    hidden = _positive(config, "hidden_size")
    inner = _positive(config, "intermediate_size")
    query = shape.num_query_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim

    attention = 2 * hidden * query + 2 * hidden * kv
    if kind == "qwen2":
        attention += query + 2 * kv
    elif config.get("attention_bias"):
        attention += query + 2 * kv + hidden
    if kind == "qwen3":
        attention += 2 * shape.head_dim
    mlp = 3 * hidden * inner
    if config.get("mlp_bias"):
        mlp += 2 * inner + hidden
    layers = shape.num_layers * (attention + mlp + 2 * hidden)

    embedding = _positive(config, "vocab_size") * hidden
    tied = config.get("tie_word_embeddings", False)
    return (1 if tied else 2) * embedding + layers + hidden
