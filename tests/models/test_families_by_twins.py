"""Families that transformers does not have, against an equivalent one: its checkpoint, rewritten under their names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MixtralConfig,
    Qwen2Config,
)

from models.checking import (
    BACKENDS,
    Cases,
    Theirs,
    ask_transformers,
    check_against_transformers,
    checkpoints_of,
    rewritten,
)
from models.test_newer_families import MIMO
from quire.models.baichuan import NormalizedHead
from quire.models.moe_families import BAILING
from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True, "head_dim": 24}
GLM = EXPERTS | {
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5, "use_qk_norm": True, "num_mtp_layers": 0, "partial_rotary_factor": 0.5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SARVAM = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "num_key_value_heads": 4, "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 48, "routed_scaling_factor": 2.5,
    "rope_parameters": YARN,
}  # fmt: skip
CASES: Cases = {
    "mimo-v2": (MiMoV2FlashConfig, MIMO),
    "deepseek-v3": (DeepseekV3Config, SARVAM),
    "llama": (LlamaConfig, {"intermediate_size": 512, "num_key_value_heads": 2}),
    "llama-biases": (LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None}),
    "glm4-moe": (Glm4MoeConfig, GLM),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 3.0, "attention_multiplier": 32**-0.5, "logits_scaling": 4.0},
    ),
}
MIXTRAL_NAMES = {
    "block_sparse_moe": "mlp",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}
checkpoints = checkpoints_of(CASES)
Checkpoints = Callable[[str], Theirs]


@pytest.mark.parametrize("name", ["granite"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="TeleFLMForCausalLM")
def test_teleflm_is_granite_with_two_scales(checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path) -> None:
    theirs = checkpoints(name)
    values = {"architectures": ["TeleFLMForCausalLM"], "input_mult": 3.0, "output_mult": 0.5, "mup_scale_factor": 2.0}
    without = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    tensors = load_file(theirs.path / "model.safetensors")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, without))


@pytest.mark.parametrize("name", ["llama-biases"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="PanguEmbeddedForCausalLM")
def test_pangu_embedded_is_llama_with_biases(checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path) -> None:
    theirs = checkpoints(name)
    values = {"architectures": ["PanguEmbeddedForCausalLM"], "bias": True}
    tensors = load_file(theirs.path / "model.safetensors")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, ("attention_bias",)))


@pytest.mark.parametrize("name", ["qwen2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="MiMoForCausalLM")
def test_mimo_is_qwen2_with_layers_that_are_not_read(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    tensors = load_file(theirs.path / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = np.zeros((4, 4), np.float32)
    values = {"architectures": ["MiMoForCausalLM"]}
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, ()))


def fused_in_parts(tensors: dict[str, np.ndarray], parts: int) -> dict[str, np.ndarray]:
    """q, k and v in one tensor: in each part a share of each."""
    fused = {}
    for name, data in tensors.items():
        if ".self_attn.q_proj." in name:
            qkv = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            shares = zip(*(np.split(whole, parts) for whole in qkv), strict=True)
            fused[name.replace("q_proj", "qkv_proj")] = np.concatenate([rows for share in shares for rows in share])
        elif not any(f".{part}_proj." in name for part in "kv"):
            fused[name] = data
    return fused


@pytest.mark.parametrize("name", ["mimo-v2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="MiMoV2ForCausalLM")
def test_mimo_2_5_is_mimo_2_flash_with_q_k_and_v_in_one(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    """And with encoders of images and audio, which are not read."""
    theirs = checkpoints(name)
    tensors = fused_in_parts(load_file(theirs.path / "model.safetensors"), parts=2)
    tensors["visual.patch_embed.proj.weight"] = np.zeros((4, 4), np.float32)
    values = {"architectures": ["MiMoV2ForCausalLM"], "attention_projection_layout": "fused_qkv"}
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, ()))


def bailing(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under Bailing's names, with q, k and v in one tensor."""
    renamed = {}
    for name, data in tensors.items():
        if name.endswith("self_attn.q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, data = name.replace("q_proj", "qkv_proj"), np.concatenate(parts)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        for theirs, ours in BAILING.renamed.items():
            name = name.replace(ours, theirs)
        renamed[name.replace("e_score_correction_bias", "expert_bias")] = data
    return renamed


@pytest.mark.parametrize("name", ["mixtral"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="BailingMoeForCausalLM")
def test_bailing_is_mixtral_under_other_names(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    theirs, tensors = checkpoints(name), {}
    for tensor_name, data in load_file(theirs.path / "model.safetensors").items():
        for old, new in MIXTRAL_NAMES.items():
            tensor_name = tensor_name.replace(old, new)
        tensors[tensor_name] = data
    values = {"architectures": ["BailingMoeForCausalLM"], "num_experts": 6, "norm_topk_prob": True}
    ours = rewritten(theirs, tmp_path, values, bailing(tensors), ("num_local_experts",))
    check_against_transformers(backend, ours)


def test_bailing_norms_the_columns_of_its_head(checkpoints: Checkpoints) -> None:
    head = NormalizedHead(open_checkpoint(checkpoints("mixtral").path), axis=0).tensor("lm_head.weight")
    np.testing.assert_allclose(np.linalg.norm(dequantize(head), axis=0), 1, rtol=1e-5)


def bailing_2(architecture: str) -> Any:
    return pytest.param(architecture, marks=pytest.mark.verifies("safetensors", architecture=architecture))


@pytest.mark.parametrize(
    "architecture",
    [bailing_2(name) for name in ("BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM", "Param2MoEForCausalLM")],
)
@pytest.mark.parametrize("name", ["glm4-moe"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bailing_2_is_glm_4_5_under_other_names(
    checkpoints: Checkpoints, backend: str, name: str, architecture: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    tensors = bailing(load_file(theirs.path / "model.safetensors"))
    values = {
        "architectures": [architecture],
        "num_experts": 8,
        "num_shared_experts": 2,
        "score_function": "sigmoid",
    }
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, ("n_routed_experts",)))


@pytest.mark.parametrize("name", ["deepseek-v3"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="SarvamMLAForCausalLM")
def test_sarvam_105b_is_deepseek_v3_with_groups_of_eight(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    """Its configuration has neither the groups nor the number of dense layers, and names counts otherwise."""
    theirs = checkpoints(name)
    yarn = YARN | {"type": "deepseek_yarn"}
    values = {"architectures": ["SarvamMLAForCausalLM"], "num_experts": 32, "num_shared_experts": 1, "head_dim": 40}
    values |= {"rope_parameters": None, "rope_theta": yarn.pop("rope_theta"), "rope_scaling": yarn}
    values["rope_scaling"].pop("rope_type")
    without = ("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace")
    tensors = load_file(theirs.path / "model.safetensors")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, without))


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="DeciLMForCausalLM")
def test_decilm_is_llama_that_lacks_some_of_its_layers(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    """Llama in which what is lacking adds nothing: attention of layer 0, half of the sizes of layer 1, and its second
    key head, which is a copy of the first."""
    theirs = checkpoints(name)
    tensors = load_file(theirs.path / "model.safetensors")
    first, second = (f"model.layers.{layer}." for layer in range(2))
    tensors[f"{first}self_attn.o_proj.weight"][:] = 0
    tensors[f"{second}mlp.down_proj.weight"][:, 256:] = 0
    for part in "kv":
        heads = tensors[f"{second}self_attn.{part}_proj.weight"].reshape(2, -1, 128)
        heads[1] = heads[0]
    for folder in ("whole", "again", "deci"):
        (tmp_path / folder).mkdir()
    whole = rewritten(theirs, tmp_path / "whole", {}, tensors, ())
    expected = ask_transformers(AutoModelForCausalLM.from_pretrained(whole.path), tmp_path / "again")
    lacking = (f"{first}self_attn.", f"{first}input_layernorm.")
    small = {name: data for name, data in tensors.items() if not name.startswith(lacking)}
    for part, axis in (("gate", 0), ("up", 0), ("down", 1)):
        name = f"{second}mlp.{part}_proj.weight"
        small[name] = np.take(small[name], range(256), axis=axis)
    for part in "kv":
        name = f"{second}self_attn.{part}_proj.weight"
        small[name] = small[name][: len(small[name]) // 2]
    blocks = [
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 6.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
    ]
    values = {"architectures": ["DeciLMForCausalLM"], "block_configs": blocks}
    without = ("num_key_value_heads", "intermediate_size")
    check_against_transformers(backend, rewritten(expected, tmp_path / "deci", values, small, without))
