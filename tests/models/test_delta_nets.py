"""Hybrids with linear attention, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    KimiLinearConfig,
    MiniMaxConfig,
    OlmoHybridConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from models.checking import (
    BACKENDS,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
    random_model,
)
from models.gguf_delta_writing import write_delta_gguf
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

KINDS = ["linear_attention", "full_attention", "linear_attention"]
CALM = {"initializer_range": 0.15}  # with more, transformers' own chunks are off by more than the tolerance
HYBRID = {"num_hidden_layers": 3, "layer_types": KINDS, "head_dim": 24}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
ODD = {
    "hidden_size": 60,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
KIMI = {
    "num_hidden_layers": 3,
    "layer_types": KINDS,
    "kv_lora_rank": 32,  # a power of two, as on GPUs
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "linear_num_heads": 3,
    "linear_head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_key_value_heads": 4,
}
MINIMAX = {
    "num_hidden_layers": 3,
    "layer_types": KINDS,
    "num_local_experts": 5,
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.75,
    "linear_attn_alpha_factor": 1.25,
    "linear_attn_beta_factor": 0.5,
    "mlp_alpha_factor": 2.0,
    "mlp_beta_factor": 0.6,
    "block_size": 8,
}
CASES: Cases = {
    "qwen3-next": (Qwen3NextConfig, HYBRID | DELTA | EXPERTS),
    "qwen3-next-odd": (
        Qwen3NextConfig,
        HYBRID
        | ODD
        | EXPERTS
        | {"attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True}
        | CALM,
    ),
    "qwen3-next-by-interval": (
        Qwen3NextConfig,
        DELTA | EXPERTS | {"num_hidden_layers": 5, "head_dim": 32, "decoder_sparse_step": 2},
    ),
    "qwen3.5": (Qwen3_5TextConfig, HYBRID | DELTA),
    "qwen3.5-odd": (Qwen3_5TextConfig, HYBRID | ODD | {"tie_word_embeddings": True}),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, HYBRID | DELTA | EXPERTS),
    "kimi-linear": (KimiLinearConfig, KIMI | {"first_k_dense_replace": 1} | CALM),
    "kimi-linear-groups": (
        KimiLinearConfig,
        KIMI
        | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "linear_conv_kernel_dim": 2, "q_lora_rank": 36}
        | {"mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2}
        | CALM,
    ),
    "olmo-hybrid": (OlmoHybridConfig, {"num_hidden_layers": 3, "layer_types": KINDS}),
    "olmo-hybrid-odd": (
        OlmoHybridConfig,
        ODD
        | {"num_hidden_layers": 3, "layer_types": KINDS, "linear_allow_neg_eigval": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "minimax": (MiniMaxConfig, MINIMAX),
    "minimax-odd": (
        MiniMaxConfig,
        MINIMAX | {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10},
    ),
}

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}


def with_images(name: str, made_with: type, config: type, options: dict[str, Any]) -> Any:
    mark = pytest.mark.verifies("safetensors", architecture=made_with.__name__)
    return pytest.param(name, made_with, config(text_config=TINY | options, vision_config=VISION), marks=mark)


@pytest.mark.parametrize(
    ("name", "made_with", "config"),
    [
        with_images("qwen3.5-with-images", Qwen3_5ForConditionalGeneration, Qwen3_5Config, HYBRID | DELTA),
        with_images(
            "qwen3.5-moe-with-images",
            Qwen3_5MoeForConditionalGeneration,
            Qwen3_5MoeConfig,
            HYBRID | DELTA | EXPERTS | CALM,
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_models_that_see_images_load_as_language_models(
    backend: str, name: str, made_with: Any, config: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    check_against_transformers(backend, ask_transformers(made_with(config).eval(), tmp_path))


GGUF_CASES = {"qwen3-next": Qwen3NextConfig, "qwen3.5": Qwen3_5TextConfig, "qwen3.5-moe": Qwen3_5MoeTextConfig}


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    options = {"num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 24} | DELTA | CALM
    experts = {} if name == "qwen3.5" else EXPERTS
    model = random_model(GGUF_CASES[name](**TINY | options | experts | {"linear_num_value_heads": 6}), seed=5)
    theirs = ask_transformers(model, tmp_path)
    path = write_delta_gguf(tmp_path, tmp_path / "model.gguf")
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


def test_published_configurations_of_minimax_name_keys_otherwise() -> None:
    values = {
        "attn_type_list": [0, 1],
        "layernorm_full_attention_alpha": 3.5,
        "layernorm_linear_attention_beta": 0.5,
        "layernorm_mlp_alpha": 2.0,
        "rotary_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config: Any = _config("MiniMaxM1ForCausalLM", values)
    assert config.kinds == ("linear_attention", "full_attention")
    assert (config.mixer_scales, config.mlp_scales) == (((1.0, 0.5), (3.5, 1.0)), (2.0, 1.0))
    assert (config.rope.rotary_dim, config.states.num_layers, config.states.shape) == (16, 1, (4, 32, 32))


def test_published_configurations_of_kimi_linear_count_layers_from_one() -> None:
    section = {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 2}
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 8}
    values = {"linear_attn_config": section, **latent, **experts, "moe_renormalize": True, "first_k_dense_replace": 1}
    config: Any = _config("KimiLinearForCausalLM", values)
    assert config.kinds == ("linear_attention", "full_attention")
    assert (config.num_experts, config.routing.top_k, config.shared_size, config.num_dense) == (4, 2, 8, 1)
    assert (config.states.shape, config.states.conv_channels, config.states.conv_taps) == ((3, 8, 8), 72, 2)


@pytest.mark.parametrize(
    ("architecture", "values", "error", "message"),
    [
        ("Qwen3_5ForCausalLM", {"layer_types": ["mamba", "full_attention"]}, Unsupported, "layer_types lists mamba"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention"]}, BadCheckpoint, "lists 1 layers, and there are 2"),
        ("Qwen3_5ForCausalLM", {"layer_types": KINDS[:1] * 2}, Unsupported, "no layer has attention"),
        ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": 17}, Unsupported, "linear_conv_kernel_dim is 17"),
        ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 5}, BadCheckpoint, "32 heads of 128 columns, and 5 key heads"),
        ("Qwen3_5ForCausalLM", {"full_attention_interval": 0}, BadCheckpoint, "full_attention_interval is 0"),
        ("MiniMaxForCausalLM", {"attn_type_list": [2, 1]}, BadCheckpoint, "attn_type_list has 2"),
        ("MiniMaxForCausalLM", {"postnorm": False}, Unsupported, "postnorm is False"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    defaults = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
    if "full_attention_interval" in values or "attn_type_list" in values:
        del defaults["layer_types"]
    with pytest.raises(error, match=message):
        _config(architecture, defaults | values)


def _config(architecture: str, values: dict[str, Any]) -> Any:
    tiny = TINY | {"architectures": [architecture], "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return family(architecture).config(CheckpointConfig(Path("config.json"), {**tiny, **values}))
