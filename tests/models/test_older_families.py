"""Families of 2023 and 2024: rows of older_families.py, DBRX, DeepSeek 1 and MiniCPM3. Those that transformers does not
have are compared with an equivalent one, whose tensors are renamed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    BitNetConfig,
    DbrxConfig,
    GlmConfig,
    LlamaConfig,
    MiniCPM3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    StableLmConfig,
)

from models.checking import (
    BACKENDS,
    MAX_LEN,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    check_against_transformers,
    checkpoints_of,
    make_ops,
    random_model,
)
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.older_families import OLDER_FAMILIES
from quire.models.registry import family
from quire.weights.config import CheckpointConfig
from quire.weights.dummy_checkpoint import DummyCheckpoint

DBRX = {
    "d_model": 64,
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "scale_emb": 5,
    "dim_model_base": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0] * 8,
}
CASES: Cases = {
    "bitnet": (BitNetConfig, {}),
    "dbrx": (
        DbrxConfig,
        DBRX
        | {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "dbrx-plain": (
        DbrxConfig,
        DBRX
        | {
            "attn_config": {"kv_n_heads": 4, "rope_theta": 5000.0, "clip_qkv": 100.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_normalize_expert_weights": None},
        },
    ),
    "minicpm3": (MiniCPM3Config, MLA),
    "minicpm3-longrope": (MiniCPM3Config, MLA | {"rope_parameters": LONGROPE, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 4}),
    "glm": (GlmConfig, {"head_dim": 32, "attention_bias": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "num_key_value_heads": 4}),
    "stablelm": (
        StableLmConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
}
QWEN2_MOE = {
    "qkv_bias": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 80,
    "mlp_only_layers": [0],
}
OWN = [name for name, (config, _) in CASES.items() if config in (BitNetConfig, DbrxConfig, MiniCPM3Config)]
checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def rewritten(
    theirs: Theirs,
    folder: Path,
    architecture: str,
    values: Mapping[str, Any],
    without: tuple[str, ...] = (),
    tensors: dict[str, np.ndarray] | None = None,
) -> Theirs:
    """The checkpoint under other keys, and under the tensor names of the family's row."""
    config = json.loads((theirs.path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **values}))
    tensors = load_file(theirs.path / "model.safetensors") if tensors is None else tensors
    row = OLDER_FAMILIES.get(architecture)
    renamed = {}
    for name, data in tensors.items():
        for own, llamas in reversed(row.renamed.items() if row else ()):
            name = name.replace(llamas, own)
        renamed[name] = np.ascontiguousarray(data)
    save_file(renamed, folder / "model.safetensors")
    return replace(theirs, path=folder)


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With q, k and v in one tensor."""
    kept = {name: data for name, data in tensors.items() if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj")}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            kept[f"{prefix}qkv_proj.{kind}"] = np.concatenate([tensors[f"{prefix}{x}_proj.{kind}"] for x in "qkv"])
    return kept


@pytest.mark.parametrize("name", ["qwen2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="QWenLMHeadModel")
def test_qwen_1_is_qwen_2_under_other_names(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    values = {
        "intermediate_size": 224,
        "seq_length": 64,
        "max_position_embeddings": 4096,
        "kv_channels": 32,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "use_dynamic_ntk": True,
        "no_bias": True,
    }
    without = ("hidden_act", "rms_norm_eps", "rope_parameters", "num_key_value_heads", "layer_types", "sliding_window")
    tensors = fused(load_file(theirs.path / "model.safetensors"))
    check_against_transformers(backend, rewritten(theirs, tmp_path, "QWenLMHeadModel", values, without, tensors))


CHATGLM = [
    pytest.param(name, marks=pytest.mark.verifies("safetensors", architecture=name))
    for name in ("ChatGLMModel", "ChatGLMForConditionalGeneration")
]


@pytest.mark.parametrize("name", ["glm"])
@pytest.mark.parametrize("architecture", CHATGLM)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chatglm_is_glm_under_other_names(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, architecture: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    values = {
        "num_layers": 2,
        "ffn_hidden_size": 112,
        "kv_channels": 32,
        "seq_length": 64,
        "padded_vocab_size": 96,
        "layernorm_epsilon": 1.5625e-07,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "add_qkv_bias": True,
        "rope_ratio": 1,
        "original_rope": True,
        "rmsnorm": True,
    }
    without = (
        *("num_hidden_layers", "intermediate_size", "head_dim", "max_position_embeddings", "vocab_size", "hidden_act"),
        *("rms_norm_eps", "num_key_value_heads", "attention_bias", "rope_parameters", "partial_rotary_factor"),
    )
    tensors = fused(load_file(theirs.path / "model.safetensors"))
    check_against_transformers(backend, rewritten(theirs, tmp_path, architecture, values, without, tensors))


@pytest.mark.parametrize("name", ["dbrx", "minicpm3", "bitnet"])
def test_weights_of_noise_have_the_names_that_are_asked_for(checkpoints: Callable[[str], Theirs], name: str) -> None:
    """`--load-format dummy`, of a family whose tensors are renamed, too."""
    checkpoint = DummyCheckpoint(checkpoints(name).path)
    module = family(checkpoint.config.architecture)
    assert module.load(make_ops("torch"), checkpoint, module.config(checkpoint.config), MAX_LEN).weight_bytes


def test_the_first_chatglm_is_refused() -> None:
    values = {"architectures": ["ChatGLMModel"], "position_encoding_2d": True}
    with pytest.raises(Unsupported, match="position_encoding_2d is True"):
        family("ChatGLMModel").config(CheckpointConfig(Path("config.json"), values))


@pytest.mark.parametrize("name", ["llama-biases"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="InternLMForCausalLM")
def test_internlm_1_is_llama_with_biases(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    without = ("attention_bias", "head_dim", "num_key_value_heads")
    theirs = rewritten(checkpoints(name), tmp_path, "InternLMForCausalLM", {"bias": True}, without)
    check_against_transformers(backend, theirs)


@pytest.mark.parametrize("name", ["stablelm"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="OrionForCausalLM")
def test_orion_is_llama_with_layer_norms(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    """So is StableLM whose heads are rotated whole."""
    values = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    theirs = rewritten(checkpoints(name), tmp_path, "OrionForCausalLM", values, ("layer_norm_eps", "rope_parameters"))
    check_against_transformers(backend, theirs)


@pytest.fixture(scope="module")
def deepseek_1(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """Qwen2-MoE with a gate of zeros, which halves what shared experts add."""
    model = random_model(Qwen2MoeConfig(**TINY | QWEN2_MOE), seed=3)
    torch.nn.init.zeros_(model.model.layers[1].mlp.shared_expert_gate.weight)
    theirs = ask_transformers(model, tmp_path_factory.mktemp("qwen2-moe"))
    tensors = {}
    for name, data in load_file(theirs.path / "model.safetensors").items():
        tensors[name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")] = data
    del tensors["model.layers.1.mlp.shared_expert_gate.weight"]
    tensors["model.layers.1.mlp.shared_experts.down_proj.weight"] /= 2
    values = {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "scoring_func": "softmax"}
    without = ("num_experts", "shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step")
    folder = tmp_path_factory.mktemp("deepseek-1")
    return rewritten(theirs, folder, "DeepseekForCausalLM", values, without, tensors)


@pytest.mark.parametrize("name", ["deepseek-1"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="DeepseekForCausalLM")
def test_deepseek_1_is_qwen_2_moe_without_the_gate_of_shared_experts(
    deepseek_1: Theirs, backend: str, name: str
) -> None:
    check_against_transformers(backend, deepseek_1)


@pytest.mark.parametrize(
    ("architecture", "values", "problem"),
    [
        ("QWenLMHeadModel", {"intermediate_size": 7}, "intermediate_size is 7, and gate and up share it"),
        ("GPTNeoForCausalLM", {"num_layers": 2, "attention_layers": ["global"]}, "lists 1 layers, and there are 2"),
        ("CodeGenForCausalLM", {"rotary_dim": 8, "n_head": 6}, "6 heads cannot be divided into 4 parts"),
    ],
)
def test_numbers_that_do_not_fit_together(architecture: str, values: dict[str, Any], problem: str) -> None:
    common = {"architectures": [architecture], "num_heads": 4, "hidden_size": 64, "vocab_size": 96}
    with pytest.raises(BadCheckpoint, match=problem):
        family(architecture).config(CheckpointConfig(Path("config.json"), common | values))
