"""Ling 3.0 against transformers, as its authors publish it, and from GGUF files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import BailingHybridConfig

from models.checking import (
    BACKENDS,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    check_against_transformers,
    checkpoints_of,
    random_model,
)
from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

KINDS = ["linear_attention", "full_attention", "linear_attention"]
LING: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": KINDS, "kv_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12,
    "v_head_dim": 28, "head_dim": 24, "num_key_value_heads": 4, "num_local_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "num_mtp_layers": 0,
    "initializer_range": 0.15,  # with more, transformers' own chunks are off by more than the tolerance
}  # fmt: skip
CASES: Cases = {
    "ling-3": (BailingHybridConfig, LING),
    "ling-3-unbounded": (
        BailingHybridConfig,
        LING
        | {"kda_safe_gate": False, "short_conv_kernel_size": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
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


def published(theirs: Theirs, folder: Path, **more: Any) -> Theirs:
    """With the keys that the authors' configuration has, and their name for the architecture."""
    values = json.loads((theirs.path / "config.json").read_text())
    values = {key: value for key, value in values.items() if key not in ("layer_types", "mlp_layer_types")}
    values |= {
        "architectures": ["BailingMoeV3ForCausalLM"], "layer_group_size": 2, "head_dim": 24, "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise", "num_experts": 6, "score_function": "sigmoid",
        "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 48, "use_bias": False, "kda_safe_gate": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values | more))
    (folder / "model.safetensors").symlink_to(theirs.path / "model.safetensors")
    return replace(theirs, path=folder)


LIMITS = {"expert_swiglu_limit_list": [0, 0, 0.4, 7.0], "share_expert_swiglu_limit_list": [0, 0, 0.3]}


@pytest.mark.verifies("safetensors", architecture="BailingHybridForCausalLM")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ling_as_published_clamps_activations_of_some_layers(backend: str, tmp_path: Path) -> None:
    """Layers behind the last whole group have attention; a limit of the layer that predicts further is not read."""
    options = LING | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    model = random_model(BailingHybridConfig(**TINY | options), seed=4)
    mlp: Any = model.model.layers[2].mlp
    mlp.experts.forward = clamped_experts(mlp.experts, 0.4)
    mlp.shared_experts.forward = clamped_mlp(mlp.shared_experts, 0.3)
    theirs = ask_transformers(model, tmp_path)
    (tmp_path / "published").mkdir()
    check_against_transformers(backend, published(theirs, tmp_path / "published", **LIMITS))


def clamped(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def clamped_mlp(mlp: Any, limit: float) -> Any:
    return lambda x: mlp.down_proj(clamped(mlp.gate_proj(x), mlp.up_proj(x), limit))


def clamped_experts(experts: Any, limit: float) -> Any:
    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                gate, up = (experts.gate_up_proj[expert] @ x[row]).chunk(2)
                out[row] += weight * (experts.down_proj[expert] @ clamped(gate, up, limit))
        return out

    return forward


@pytest.mark.verifies("gguf", architecture="BailingHybridForCausalLM")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ling_in_a_gguf_file(checkpoints: Callable[[str], Theirs], backend: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    from models.gguf_latest_writing import write_ling

    theirs = checkpoints("ling-3")
    check_against_transformers(backend, replace(theirs, path=write_ling(theirs.path, tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"no_kda_lora": False}, Unsupported, "no_kda_lora is False"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, Unsupported, "is 'element_wise'"),
        ({"kda_lower_bound": 0.5}, BadCheckpoint, "kda_lower_bound is 0.5"),
        ({"layer_types": None, "layer_group_size": 0}, BadCheckpoint, "layer_group_size is 0"),
        ({"expert_swiglu_limit_list": [0.1]}, BadCheckpoint, r"expert_swiglu_limit_list is \[0.1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    values: dict[str, Any], error: type[QuireError], message: str
) -> None:
    given = TINY | LING | {"architectures": ["BailingHybridForCausalLM"], "hidden_act": "silu"} | values
    with pytest.raises(error, match=message):
        family("BailingHybridForCausalLM").config(CheckpointConfig(Path("config.json"), given))
