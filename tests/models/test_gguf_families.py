"""GGUF files of every architecture that is read, against transformers on the same numbers."""

from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from transformers import (
    ApertusConfig,
    ArceeConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Jais2Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
)

from models.checking import PROMPT, TINY, Cases, assert_close, compute, make_ops, random_model
from models.gguf_checking import check_file, logits_of
from models.gguf_writing import write_gguf
from quire.models.alibi import alibi_slopes

Q8_0 = gguf.GGMLQuantizationType.Q8_0
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SHORT_CONVS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 6}
FACTORS = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 8 for i in range(12)],
    "long_factor": [2.0 + i / 4 for i in range(12)],
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
YARN_IN_SOME = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
GROWING = {**YARN, "original_max_position_embeddings": 6, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWING |= {"llama_4_scaling_beta": 0.7}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
CASES: Cases = {
    "llama": (LlamaConfig, {}),
    "llama-tied-biases": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "llama-with-experts": (MixtralConfig, {"num_local_experts": 5}),
    "granite": (GraniteConfig, FACTORS),
    "granitemoe": (GraniteMoeConfig, FACTORS | {"num_local_experts": 5}),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen2moe": (Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 80}),
    "qwen3moe": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True, "head_dim": 24}),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (Olmo3Config, {"num_hidden_layers": 5, "sliding_window": 6, "rope_parameters": YARN_IN_SOME}),
    "glm4": (Glm4Config, {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0}),
    "ernie": (Ernie4_5Config, {"head_dim": 24, "use_bias": False}),
    "exaone4": (Exaone4Config, {"num_hidden_layers": 5, "sliding_window": 5, "sliding_window_pattern": 4}),
    "glm4moe": (
        Glm4MoeConfig,
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
            "use_qk_norm": True,
            "head_dim": 24,
            "attention_bias": True,
            "num_hidden_layers": 3,
        },
    ),
    "seed-oss": (SeedOssConfig, {"head_dim": 24, "attention_bias": True, "attention_out_bias": False}),
    "olmoe": (OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3}),
    "phi3": (Phi3Config, {"sliding_window": 7}),
    "phi3-longrope": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "mistral3": (MistralConfig, {"head_dim": 24, "sliding_window": None}),
    "ministral3": (Ministral3Config, {"head_dim": 24, "rope_parameters": GROWING}),
    "arcee": (ArceeConfig, {}),
    "nemotron": (NemotronConfig, {"partial_rotary_factor": 0.5, "norm_eps": 1e-3}),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 24, "rope_parameters": ALPHA}),
    "dots1": (
        Dots1Config,
        {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "head_dim": 24,
        },
    ),
    "ernie-moe": (
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": False,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "rotary_dim": 12,
            "partial_rotary_factor": 0.5,
            "intermediate_size": 48,
        },
    ),
    "phimoe": (
        PhimoeConfig,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    ),
    "granite-4": (
        GraniteMoeHybridConfig,
        FACTORS
        | {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 112,
            "position_embedding_type": "rope",
        },
    ),
    "glm": (GlmConfig, {"head_dim": 24, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "jais2": (Jais2Config, {"layer_norm_eps": 1e-3}),
    "lfm2": (Lfm2Config, SHORT_CONVS | {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": (Lfm2MoeConfig, SHORT_CONVS | EXPERTS | {"num_dense_layers": 1}),
    "apertus": (ApertusConfig, {"rope_parameters": DEFAULT}),
    "solar-open": (SolarOpenConfig, EXPERTS | {"n_routed_experts": 6, "n_shared_experts": 1, "head_dim": 24}),
    "gemma": (GemmaConfig, {"head_dim": 24}),
    "gemma2": (Gemma2Config, GEMMA | {"attn_implementation": "eager", "attn_logit_softcapping": 5.0}),
    "gemma3": (Gemma3TextConfig, GEMMA | {"num_hidden_layers": 7, "rope_parameters": LINEAR}),
}


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    config, options = CASES[name]
    model = random_model(config(**TINY | options), seed=sum(map(ord, name)))
    check_file(model, tmp_path)


def test_quantized_experts_are_cut_out_of_their_stack(tmp_path: Path) -> None:
    model = random_model(MixtralConfig(**TINY | {"num_local_experts": 5, "intermediate_size": 96}), seed=1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:  # to numbers that Q8_0 can store
            stored = gguf.quants.quantize(parameter.detach().numpy(), Q8_0)
            parameter.data = torch.tensor(gguf.quants.dequantize(stored, Q8_0))
            assert "experts" in name
    model.save_pretrained(tmp_path)
    path, logits = write_gguf(tmp_path, tmp_path / "model.gguf", experts=Q8_0), logits_of(model)
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), logits)
    rounded = compute(make_ops("native"), path)(PROMPT, 0)  # which multiplies with 8-bit activations
    assert np.abs(rounded - logits).max() < 0.05 * np.abs(logits).max()


@pytest.mark.verifies("gguf", backend="torch", architecture="GlmForCausalLM")
@pytest.mark.parametrize("name", ["chatglm"])
def test_chatglm_has_q_k_and_v_in_one(name: str, tmp_path: Path) -> None:
    config, options = CASES["glm"]
    model = random_model(config(**TINY | options), seed=3)
    check_file(model, tmp_path, fuse_qkv=True)


@pytest.mark.verifies("gguf", backend="torch", architecture="MiniCPMForCausalLM")
@pytest.mark.parametrize("name", ["minicpm", "minicpm-first"])
def test_minicpm_is_granite_with_factors_of_its_own(name: str, tmp_path: Path) -> None:
    """Its first files leave them unsaid."""
    unsaid = name == "minicpm-first"
    first = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 128 / 256}
    factors = (first if unsaid else FACTORS) | {"attention_multiplier": 32**-0.5}
    model = random_model(GraniteConfig(**TINY | factors), seed=2)
    instead = dict.fromkeys(factors if unsaid else ["attention_multiplier"])
    check_file(model, tmp_path, called="minicpm", instead=instead)


@pytest.mark.verifies("gguf", backend="torch", architecture="BaichuanForCausalLM")
@pytest.mark.parametrize("name", ["baichuan-7b", "baichuan-13b"])
def test_baichuan_is_llama(name: str, tmp_path: Path) -> None:
    """13B, told by its 40 layers, with slopes instead of rotation."""
    still = name == "baichuan-13b"
    sizes = {"num_key_value_heads": 4, "num_hidden_layers": 40 if still else 2, "attn_implementation": "eager"}
    model = random_model(LlamaConfig(**TINY | sizes), seed=2)
    model.save_pretrained(tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", called="baichuan")
    mask = None
    if still:
        model.model.rotary_emb.inv_freq.zero_()
        places = torch.arange(len(PROMPT))
        falling = torch.tensor(alibi_slopes(4))[:, None, None] * (places[None, :] - places[:, None])
        mask = falling.masked_fill(places[None, :] > places[:, None], float("-inf"))[None]
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), logits_of(model, mask))


@pytest.mark.parametrize("called", ["internlm2", "exaone"])
def test_some_are_llama_under_another_name(called: str, tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**TINY), seed=2)
    check_file(model, tmp_path, called=called)
