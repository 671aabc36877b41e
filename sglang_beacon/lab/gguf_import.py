"""Convert a GGUF file of the llama architecture into a Hugging Face model directory.

The engine takes GGUF on CUDA only; the directory written here loads everywhere. Weights become
bfloat16, whatever their quantization. What cannot be converted exactly in this way is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
}


class UnsupportedGGUFError(ValueError):
    """A GGUF file whose model this module cannot convert exactly; says why in one sentence."""


def convert(gguf_path: Path, out_dir: Path) -> None:
    """Write config, bfloat16 safetensors, tokenizer and chat template of a GGUF model.

    Parameters
    ----------
    gguf_path
        A llama-architecture model with a byte-level BPE tokenizer, quantized or not. All weights
        are in memory at once, 2 bytes per parameter.
    out_dir
        Created if missing; files of the same names are replaced.

    Raises
    ------
    UnsupportedGGUFError
        Before anything is written, when the architecture or the tokenizer is another one.
    """
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, {tensor.name: tensor.shape.tolist() for tensor in reader.tensors})
    tokenizer = _tokenizer(fields)
    weights = dict(_weights(reader, config))

    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", ids)
    tokenizer.save_pretrained(out_dir)
    # safetensors makes its file private to the user; the model is as readable as its config.
    shutil.copymode(out_dir / "config.json", out_dir / "model.safetensors")


def _config(fields: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Return the Hugging Face config; `shapes` are GGUF's, the contiguous dimension first."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedGGUFError(f"GGUF architecture {architecture!r} is not 'llama'")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"llama.{key}", default)
        if value is None:
            raise UnsupportedGGUFError(f"the GGUF file has no field 'llama.{key}'")
        return value

    heads = get("attention.head_count")
    hidden = get("embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "vocab_size": shapes["token_embd.weight"][1],
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "bfloat16",
    }
    for name in ("bos", "eos", "pad"):
        config[f"{name}_token_id"] = _token_id(fields, name)
    if get("rope.scaling.type", "none") != "none":
        raise UnsupportedGGUFError("scaled rotary positions (llama.rope.scaling) are unsupported")
    if get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedGGUFError("partial rotary positions are unsupported")
    return config


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor under its Hugging Face name."""
    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        _, _, suffix = tensor.name.partition("blk.")
        layer, _, part = suffix.partition(".")
        name = _TOP_LEVEL.get(tensor.name)
        if part in _PER_LAYER:
            name = f"model.layers.{layer}.{_PER_LAYER[part]}"
        if name is None:
            raise UnsupportedGGUFError(f"the GGUF tensor {tensor.name!r} has no place in a llama")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            weight = _halves_rotary(weight, heads[part])
        # A copy, because unquantized tensors are read-only views of the file.
        yield name, torch.from_numpy(np.array(weight, order="C")).to(torch.bfloat16)


def _halves_rotary(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorder rows [num_heads * head_dim, hidden] from rotary pairs (2i, 2i + 1) to (i, i + half).

    GGUF stores queries and keys for the interleaved rotary embedding, Hugging Face for the halved.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedGGUFError(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is none of byte-level BPE "
            f"with {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    bpe.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind == TokenType.CONTROL:
            bpe.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            bpe.add_tokens([AddedToken(token, normalized=False)])

    ids = {name: _token_id(fields, name) for name in ("bos", "eos", "unk", "pad")}
    if ids["bos"] is not None and fields.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[ids["bos"]]
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _token_id(fields: dict[str, Any], name: str) -> int | None:
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    token_id: int | None = fields.get(f"tokenizer.ggml.{key}_token_id")
    return token_id


def _shortest(value: float) -> float:
    """Undo the float32 rounding of a decimal: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
