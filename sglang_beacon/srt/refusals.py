"""What a policy cannot work with yet, and the flag to change: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer")


class Refusal(NamedTuple):
    """``applies`` reads resolved settings; ``reason`` is completed to one sentence."""

    applies: Callable[[Any], bool]
    reason: str


def _attention_backends(settings: Any) -> set[str]:
    base = settings.attention_backend
    chosen = {
        settings.prefill_attention_backend or base,
        settings.decode_attention_backend or base,
    }
    return {name for name in chosen if name is not None}


def _layer_types(model: Any) -> tuple[str, ...]:
    return tuple(getattr(model.hf_text_config, "layer_types", None) or ())


SETTINGS = (
    Refusal(
        lambda s: s.speculative_algorithm is not None,
        "with speculative decoding: remove --speculative-algorithm",
    ),
    Refusal(
        lambda s: bool(s.enable_dp_attention),
        "with data-parallel attention: remove --enable-dp-attention",
    ),
    Refusal(lambda s: s.pp_size > 1, "with pipeline parallelism: set --pp-size 1"),
    Refusal(lambda s: s.dcp_size > 1, "with decode context parallelism: set --dcp-size 1"),
    Refusal(lambda s: s.attn_cp_size > 1, "with context parallelism: set --attn-cp-size 1"),
    Refusal(lambda s: s.enable_mixed_chunk, "with mixed chunks: remove --enable-mixed-chunk"),
    Refusal(
        lambda s: s.disaggregation_mode != "null",
        "with disaggregated prefill: remove --disaggregation-mode",
    ),
    Refusal(
        lambda s: s.disaggregation_decode_enable_offload_kvcache,
        "with KV offloading: remove --disaggregation-decode-enable-offload-kvcache",
    ),
    Refusal(
        lambda s: s.enable_hierarchical_cache,
        "with a hierarchical cache: remove --enable-hierarchical-cache",
    ),
    Refusal(lambda s: s.enable_lmcache, "with LMCache: remove --enable-lmcache"),
    Refusal(
        lambda s: s.enable_unified_cache_external_linker,
        "with an external cache: remove --enable-unified-cache-external-linker",
    ),
    Refusal(lambda s: s.enable_flexkv, "with FlexKV: remove --enable-flexkv"),
    Refusal(lambda s: s.enable_hisparse, "with HiSparse: remove --enable-hisparse"),
    Refusal(
        lambda s: s.enable_unified_memory, "with unified memory: remove --enable-unified-memory"
    ),
    Refusal(
        lambda s: s.enable_page_major_kv_layout,
        "with page-major KV: remove --enable-page-major-kv-layout",
    ),
    Refusal(lambda s: s.enable_pdmux, "with PD multiplexing: remove --enable-pdmux"),
    Refusal(
        lambda s: s.enable_streaming_session,
        "with streaming sessions: remove --enable-streaming-session",
    ),
    Refusal(
        lambda s: s.enable_session_radix_cache,
        "with session caches: remove --enable-session-radix-cache",
    ),
    Refusal(lambda s: s.kv_canary not in (None, "none"), "with the KV canary: remove --kv-canary"),
    Refusal(
        lambda s: s.enable_return_routed_experts,
        "with routed experts returned: remove --enable-return-routed-experts",
    ),
    Refusal(
        lambda s: s.enable_return_indexer_topk,
        "with indexer output returned: remove --enable-return-indexer-topk",
    ),
    Refusal(
        lambda s: s.dllm_algorithm is not None, "with diffusion models: remove --dllm-algorithm"
    ),
    Refusal(lambda s: s.enable_torch_compile, "with torch.compile: remove --enable-torch-compile"),
    Refusal(
        lambda s: s.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
        "with a quantised KV cache: set --kv-cache-dtype auto",
    ),
    Refusal(
        lambda s: s.enable_two_batch_overlap,
        "with two-batch overlap: remove --enable-two-batch-overlap",
    ),
    Refusal(
        lambda s: not _attention_backends(s) <= set(ATTENTION_BACKENDS),
        f"with this attention backend: set --attention-backend to one of "
        f"{', '.join(ATTENTION_BACKENDS)}",
    ),
)

MODELS = (
    Refusal(lambda m: not m.is_generation, "with an embedding model"),
    Refusal(lambda m: m.attention_arch.name != "MHA", "with MLA or state-space models"),
    Refusal(
        lambda m: m.is_hybrid_swa or "sliding_attention" in _layer_types(m),
        "with sliding-window attention",
    ),
    Refusal(lambda m: m.attention_chunk_size is not None, "with chunked local attention"),
    Refusal(lambda m: m.model_is_mrope, "with multimodal rotary positions"),
    Refusal(lambda m: m.is_encoder_decoder, "with encoder-decoder models"),
)


def reason(server_args: ServerArgs, settings: Any) -> str | None:
    """The first reason a policy cannot run with these settings, as one sentence; or None."""
    from sglang.srt.arg_groups.overrides import model_config_of

    for refusal in SETTINGS:
        if refusal.applies(settings):
            return f"--kv-policy does not work {refusal.reason}, or set --kv-policy none."
    model = model_config_of(server_args)
    for refusal in MODELS:
        if refusal.applies(model):
            return (
                f"--kv-policy does not work {refusal.reason}: "
                f"serve {settings.model_path} with --kv-policy none."
            )
    return None
