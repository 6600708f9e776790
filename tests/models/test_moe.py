"""Families with experts, and Granite, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from transformers import (
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from models.checking import (
    BACKENDS,
    TINY,
    Cases,
    Theirs,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
)
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import moe
from quire.weights.config import CheckpointConfig

FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
}
QWEN2_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GLM_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
}  # fmt: skip
MSCALES = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.3, "long_mscale": 1.6,
    "original_max_position_embeddings": 64, "short_factor": [1.0 + i / 8 for i in range(16)], "long_factor": [2.0] * 16,
}  # fmt: skip
PHI = {"num_local_experts": 4, "num_experts_per_tok": 2}
DOTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "routed_scaling_factor": 1.5}
CASES: Cases = {
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (MixtralConfig, {"num_local_experts": 4, "sliding_window": 6, "num_key_value_heads": 1}),
    "qwen2-moe": (Qwen2MoeConfig, QWEN2_MOE | {"shared_expert_intermediate_size": 80}),
    "qwen2-moe-some-dense": (
        Qwen2MoeConfig,
        QWEN2_MOE
        | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True,
           "shared_expert_intermediate_size": 32, "qkv_bias": False},
    ),
    "qwen3-moe": (Qwen3MoeConfig, QWEN2_MOE | {"norm_topk_prob": True, "head_dim": 24}),
    "qwen3-moe-window": (Qwen3MoeConfig, QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 5}),
    "olmoe": (OlmoeConfig, {"num_experts": 7, "num_experts_per_tok": 4}),
    "olmoe-mha": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 4}),
    "glm4-moe": (
        Glm4MoeConfig,
        GLM_MOE | {"num_hidden_layers": 3, "use_qk_norm": True, "head_dim": 24, "attention_bias": True},
    ),
    "glm4-moe-groups": (
        Glm4MoeConfig,
        GLM_MOE | {"n_group": 4, "topk_group": 2, "head_dim": 32, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "dots1": (Dots1Config, DOTS | {"n_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1}),
    "dots1-biases": (
        Dots1Config,
        DOTS | {"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "solar-open-tied": (
        SolarOpenConfig,
        DOTS | {"n_shared_experts": 1, "head_dim": 32, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "minimax-m2-tied": (
        MiniMaxM2Config,
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32, "head_dim": 32, "rotary_dim": 32,
         "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "solar-open": (SolarOpenConfig, DOTS | {"n_shared_experts": 2, "head_dim": 24, "attention_bias": True}),
    "minimax-m2": (
        MiniMaxM2Config,
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48,
         "head_dim": 24, "rotary_dim": 12, "partial_rotary_factor": 0.5},
    ),
    "ernie-moe": (
        Ernie4_5_MoeConfig,
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "num_hidden_layers": 4,
         "moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "ernie-moe-tied": (
        Ernie4_5_MoeConfig,
        {"moe_num_experts": 4, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 0,
         "moe_layer_start_index": 0, "moe_layer_end_index": 0},
    ),
    "phimoe": (PhimoeConfig, PHI | {"num_local_experts": 5, "router_jitter_noise": 0.2, "rope_parameters": MSCALES}),
    "phimoe-window": (
        PhimoeConfig,
        PHI | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 6, "router_jitter_noise": 0.3},
    ),
    "granite": (GraniteConfig, FACTORS),
    "granite-tied": (GraniteConfig, FACTORS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite-moe-tied": (
        GraniteMoeConfig,
        FACTORS | {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "granite-moe": (GraniteMoeConfig, FACTORS | {"num_local_experts": 6, "num_experts_per_tok": 3}),
}  # fmt: skip

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def read(architecture: str, **values: Any) -> moe.MoeConfig:
    common = {key: value for key, value in TINY.items() if value is not None}
    common |= {"architectures": [architecture], "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 2}
    return moe.config(CheckpointConfig(Path("config.json"), common | values))


def test_older_configurations() -> None:
    qwen = read("Qwen3MoeForCausalLM", moe_intermediate_size=48, sliding_window=4096, use_sliding_window=False)
    assert (qwen.num_experts, qwen.expert_size, qwen.windows, qwen.sparse) == (8, 48, (0, 0), (True, True))
    mixtral = read("MixtralForCausalLM", num_experts=None, num_local_experts=4, sliding_window=4096)
    assert (mixtral.num_experts, mixtral.windows, mixtral.routing.renormalize) == (4, (4096, 4096), True)


def test_what_nobody_wrote_code_for_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"clip_qkv is 8\.0"):
        read("OlmoeForCausalLM", clip_qkv=8.0)
    with pytest.raises(Unsupported, match="use_sliding_window is True"):
        read("Qwen2MoeForCausalLM", use_sliding_window=True, sliding_window=8)
    with pytest.raises(BadCheckpoint, match="decoder_sparse_step is 0"):
        read("Qwen2MoeForCausalLM", decoder_sparse_step=0)
    with pytest.raises(BadCheckpoint, match="num_experts_per_tok is 9, and there are 8 experts"):
        read("OlmoeForCausalLM", num_experts_per_tok=9)


def test_missing_experts_are_listed(checkpoints: Callable[[str], Theirs], tmp_path: Path) -> None:
    whole = checkpoints("mixtral").path
    tensors = load_file(whole / "model.safetensors")
    missing = [f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight" for expert in (2, 4)]
    save_file({name: data for name, data in tensors.items() if name not in missing}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    with pytest.raises(BadCheckpoint, match=f"2 are missing: {missing[0]}, {missing[1]}"):
        compute(make_ops("torch"), tmp_path)
