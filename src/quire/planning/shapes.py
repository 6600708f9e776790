"""Well-known models by their sizes, as their config.json gives them, so that a plan needs no download."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire.core.errors import UnknownModel
from quire.weights.config import CheckpointConfig


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    named = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, **more}
    return _llama(hidden, inner, layers, heads, kv_heads, 151936, 40960, **named)


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _qwen3(
        hidden, 3 * hidden, layers, heads, kv_heads,
        architectures=["Qwen3MoeForCausalLM"], num_experts=128, num_experts_per_tok=8, moe_intermediate_size=inner,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def _mixtral(hidden: int, inner: int, layers: int, heads: int, context: int, vocab: int) -> dict[str, Any]:
    named = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    return _llama(hidden, inner, layers, heads, 8, vocab, context, **named)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _llama(
        2880, 2880, layers, 64, 8, 201088, 131072,
        architectures=["GptOssForCausalLM"], head_dim=64, num_local_experts=experts, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * (layers // 2), swiglu_limit=7.0,
        attention_bias=True,
    )  # fmt: skip


_DEEPSEEK_V3 = _llama(
    7168, 18432, 61, 128, 128, 129280, 163840,
    architectures=["DeepseekV3ForCausalLM"], moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, moe_layer_freq=1, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
)  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, 8192, tie_word_embeddings=True),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256, 131072),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256, 131072),
    "mistral-7b": _llama(  # v0.3, without the window of v0.1
        4096, 14336, 32, 32, 8, 32768, 32768, architectures=["MistralForCausalLM"], sliding_window=None
    ),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32768, 32000),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 65536, 32768),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32, 4),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64, 4),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _DEEPSEEK_V3,
}


# `quantization_config` of those that are not published in floats.
_EXPERTS_IN_MXFP4 = {"quant_method": "mxfp4"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _EXPERTS_IN_MXFP4,
    "gpt-oss-120b": _EXPERTS_IN_MXFP4,
    "deepseek-v3": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def published_config(name: str) -> CheckpointConfig:
    """With `quantization_config`, where the model is published quantized."""
    config, quantization = shape_config(name), QUANTIZED.get(name.lower())
    return config.with_values({"quantization_config": quantization}) if quantization else config


def shape_config(name: str) -> CheckpointConfig:
    if (values := SHAPES.get(name.lower())) is None:
        near = get_close_matches(name.lower(), SHAPES, 3, 0.4)
        hint = f"near it: {', '.join(near)}" if near else f"choose from {', '.join(SHAPES)}"
        raise UnknownModel(f"no shape is called `{name}`", hint, param="shape")
    return CheckpointConfig(Path(f"{name}/config.json"), values)
