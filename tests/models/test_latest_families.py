"""LongCat-Flash and Step 3.5 against transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import LongcatFlashConfig, Step3p7Config

from models.checking import BACKENDS, MAX_LEN, Cases, Theirs, check_against_transformers, checkpoints_of

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LONGCAT = {
    "num_hidden_layers": 4, "ffn_hidden_size": 112, "expert_ffn_hidden_size": 40, "moe_topk": 4,
    "n_routed_experts": 6, "zero_expert_num": 3, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 20, "num_key_value_heads": 4, "rope_parameters": DEFAULT,
    "routed_scaling_factor": 3.0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    "mlp_ratio": 2.0,
}  # fmt: skip
STEP = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": MAX_LEN, "initializer_range": 0.3,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 5, "num_sliding_attention_heads": 6,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "n_routed_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40, "share_expert_dim": 48, "moe_router_scaling_factor": 2.0, "pad_token_id": 0,
    "swiglu_limits": [None, None, 0.9, None], "swiglu_limits_shared": [0.5, None, None, 0.7],
    "rope_parameters": {
        "full_attention": DEFAULT | {"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": DEFAULT | {"partial_rotary_factor": 1.0},
    },
}  # fmt: skip
CASES: Cases = {
    "step": (Step3p7Config, {"text_config": STEP, "vision_config": VISION, "image_token_id": 95}),
    "longcat": (LongcatFlashConfig, LONGCAT),
    "longcat-many-zero": (
        LongcatFlashConfig,
        LONGCAT | {"num_hidden_layers": 2, "zero_expert_num": 12, "attention_bias": True, "tie_word_embeddings": True},
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


@pytest.mark.verifies("safetensors", architecture="Step3p5ForCausalLM")
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_as_published_without_the_part_for_images(
    checkpoints: Callable[[str], Theirs], backend: str, tmp_path: Path
) -> None:
    """Its keys count layers that predict further tokens, too, and list a theta for each layer."""
    theirs = checkpoints("step")
    kinds, experts, limits = STEP["layer_types"], STEP["n_routed_experts"], STEP["swiglu_limits"]
    values = {key: STEP[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    values |= {key: STEP[key] for key in ("num_attention_heads", "head_dim", "max_position_embeddings")}
    values |= {key: STEP[key] for key in ("sliding_window", "moe_intermediate_size", "share_expert_dim")}
    values |= {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_attention_groups": 2,
        "moe_num_experts": experts, "moe_top_k": 3, "moe_layers_enum": "2,3,4", "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 2.0, "norm_expert_weight": True, "zero_centered": True,
        "layer_types": [*kinds, "sliding_attention"], "rope_theta": [5000.0, 10000.0] * 2 + [10000.0],
        "partial_rotary_factors": [0.5, 1.0] * 2 + [1.0], "swiglu_limits": [*limits, 0.0],
        "swiglu_limits_shared": [*STEP["swiglu_limits_shared"], 0.0], "num_nextn_predict_layers": 1,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 24},
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    tensors = {name: data for name, data in load_file(theirs.path / "model.safetensors").items() if "vi" not in name}
    further = {"model.layers.4.eh_proj.weight": np.ones((4, 4), np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors | further, tmp_path / "model.safetensors")
    check_against_transformers(backend, replace(theirs, path=tmp_path))


@pytest.mark.verifies("gguf", architecture="Step3p5ForCausalLM")
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_in_a_gguf_file(checkpoints: Callable[[str], Theirs], backend: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    from models.gguf_latest_writing import write_step

    theirs = checkpoints("step")
    check_against_transformers(backend, replace(theirs, path=write_step(theirs.path, tmp_path / "model.gguf")))
