"""Llama and what differs from it in a few numbers, against transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import (
    Ernie4_5Config,
    Exaone4Config,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.models.llama_families import FAMILIES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [2.0 + i / 4 for i in range(16)],
    "original_max_position_embeddings": 8,  # both the prompt and the served length are longer
    "rope_theta": 10000.0,
}
PARTIAL_LONGROPE = LONGROPE | {
    "partial_rotary_factor": 0.75,
    "short_factor": LONGROPE["short_factor"][:12],
    "long_factor": LONGROPE["long_factor"][:12],
}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
MISTRAL_3 = {"model_type": "mistral", "sliding_window": None, "head_dim": 24}
YARN_IN_SOME = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
HALF = {"partial_rotary_factor": 0.5, "pad_token_id": 0}
CASES: Cases = {
    "llama": (LlamaConfig, {}),
    "heads-9-of-3": (LlamaConfig, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "heads-5-of-1": (LlamaConfig, {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "head-dim": (LlamaConfig, {"head_dim": 32}),
    "linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "dynamic": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "longrope": (LlamaConfig, {"rope_parameters": LONGROPE}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 7}),
    "mistral-nemo": (MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "mistral3-with-images": (
        Mistral3Config,
        {"text_config": TINY | MISTRAL_3, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    "mistral3-third": (
        Mistral3Config,
        {"text_config": TINY | MISTRAL_3 | {"model_type": "ministral3"}, "vision_config": VISION},
    ),
    "mistral3-tied": (Mistral3Config, {"text_config": TINY | MISTRAL_3, "vision_config": VISION}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen3-window": (
        Qwen3Config,
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "attention_bias": True,
        },
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3-listed": (
        SmolLM3Config,
        {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "ernie": (Ernie4_5Config, {"head_dim": 24, "tie_word_embeddings": True}),
    "ernie-biases": (Ernie4_5Config, {"use_bias": True, "head_dim": 32, "tie_word_embeddings": False}),
    "seed-oss": (SeedOssConfig, {"head_dim": 24, "attention_bias": True, "attention_out_bias": False}),
    "seed-oss-out-bias": (SeedOssConfig, {"head_dim": 32, "attention_bias": False, "attention_out_bias": True}),
    "olmo2": (Olmo2Config, {}),
    "olmo2-mha": (Olmo2Config, {"num_key_value_heads": 4, "attention_bias": True, "hidden_size": 96}),
    "olmo3": (Olmo3Config, {"num_hidden_layers": 5, "sliding_window": 6, "num_key_value_heads": 4}),
    "olmo3-yarn": (Olmo3Config, {"num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": YARN_IN_SOME}),
    "exaone4": (Exaone4Config, {"sliding_window": None, "head_dim": 24, "layer_types": ["full_attention"] * 2}),
    "exaone4-32b": (Exaone4Config, {"num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2}),
    "glm": (GlmConfig, HALF | {"head_dim": 32, "attention_bias": True}),
    "glm-mqa": (GlmConfig, HALF | {"head_dim": 24, "attention_bias": False, "num_key_value_heads": 1}),
    "glm4": (Glm4Config, HALF | {"head_dim": 32, "attention_bias": False}),
    "glm4-biases": (Glm4Config, HALF | {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "phi3": (Phi3Config, {}),
    "phi3-window": (Phi3Config, {"sliding_window": 6, "partial_rotary_factor": 0.5}),
    "phi4-mini": (Phi3Config, {"rope_parameters": PARTIAL_LONGROPE, "original_max_position_embeddings": 8}),
}

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


# -- families whose code transformers does not have: Llama under other names -------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["heads-9-of-3", "mha", "dynamic"])
@pytest.mark.verifies("safetensors", architecture="InternLM2ForCausalLM")
def test_internlm2_is_llama_with_q_k_and_v_in_groups(
    checkpoints: Callable[[str], Theirs], name: str, backend: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    config = json.loads((theirs.path / "config.json").read_text())
    tensors, renamed = load_file(theirs.path / "model.safetensors"), {}
    kv_heads, head_dim = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        groups = [part.reshape(kv_heads, -1, head_dim, config["hidden_size"]) for part in parts]
        fused = np.concatenate(groups, axis=1).reshape(-1, config["hidden_size"])
        renamed[f"model.layers.{layer}.attention.wqkv.weight"] = np.ascontiguousarray(fused)
    for tensor_name, data in tensors.items():
        for theirs_name, ours in FAMILIES["InternLM2ForCausalLM"].renamed.items():
            tensor_name = tensor_name.replace(ours, theirs_name)
        renamed[tensor_name] = data
    save_file(renamed, tmp_path / "model.safetensors")
    config |= {"architectures": ["InternLM2ForCausalLM"], "bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_against_transformers(backend, replace(theirs, path=tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["biases", "head-dim"])
@pytest.mark.verifies("safetensors", architecture="InternLM3ForCausalLM")
def test_internlm3_is_llama_with_other_words_for_biases(
    checkpoints: Callable[[str], Theirs], name: str, backend: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    config = json.loads((theirs.path / "config.json").read_text())
    biased = config.pop("attention_bias"), config.pop("mlp_bias")
    assert biased == (name == "biases",) * 2
    config |= {"architectures": ["InternLM3ForCausalLM"], "bias": biased[0], "qkv_bias": biased[0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((theirs.path / "model.safetensors").read_bytes())
    check_against_transformers(backend, replace(theirs, path=tmp_path))
