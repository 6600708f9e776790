"""LFM2, also with experts, and LFM3, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config, Lfm2MoeConfig, Lfm3Config

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import lfm2
from quire.weights.config import CheckpointConfig

HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 16,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "routed_scaling_factor": 1.5}
LFM3 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
    "sliding_window": 6,
}
LFM3_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}
CASES: Cases = {
    "lfm2": (Lfm2Config, HYBRID),
    "lfm2-biases": (Lfm2Config, HYBRID | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}),
    "lfm2-long-convolutions": (Lfm2Config, HYBRID | {"conv_L_cache": 7, "num_key_value_heads": 4}),
    "lfm2-one-tap": (
        Lfm2Config,
        HYBRID | {"conv_L_cache": 1, "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1},
    ),
    "lfm2-by-index": (Lfm2Config, {"num_hidden_layers": 3, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": (Lfm2MoeConfig, HYBRID | EXPERTS | {"num_dense_layers": 1}),
    "lfm2-moe-plain-scores": (
        Lfm2MoeConfig,
        HYBRID
        | EXPERTS
        | {"num_dense_layers": 2, "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True},
    ),
    "lfm3": (Lfm3Config, LFM3 | {"rope_parameters": LFM3_ROPES, "head_dim": 24}),
    "lfm3-plain": (
        Lfm3Config,
        LFM3
        | {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True, "conv_bias": True}
        | {"conv_L_cache": 3, "tie_word_embeddings": False, "head_dim": 16},
    ),
    "lfm2-attention-only": (Lfm2Config, {"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 8}),
}

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def test_older_configurations_name_keys_otherwise() -> None:
    values = {"block_ff_dim": 96, "tie_embedding": False, "full_attn_idxs": [1], "block_multiple_of": 16}
    config = lfm2.config(_config(values | {"intermediate_size": None, "tie_word_embeddings": None}))
    assert (config.intermediate, config.tied, config.kinds) == (64, False, ("conv", "full_attention"))
    assert (config.kv_layers, config.conv and config.conv.num_layers) == (1, 1)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"layer_types": ["conv", "mamba"]}, Unsupported, "layer_types lists mamba"),
        ({"layer_types": ["conv", "conv"]}, Unsupported, "no layer has attention"),
        ({"layer_types": ["conv"]}, BadCheckpoint, "lists 1 layers, and there are 2"),
        ({"conv_L_cache": 17}, Unsupported, "conv_L_cache is 17"),
        ({"block_multiple_of": 0}, BadCheckpoint, "block_multiple_of is 0"),
        ({"hidden_size": 0, "head_dim": 16, "full_attn_idxs": [1]}, BadCheckpoint, "hidden as 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lfm2.config(_config(values))


def _config(values: dict[str, Any]) -> CheckpointConfig:
    tiny = TINY | {"architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5}
    return CheckpointConfig(Path("config.json"), {**tiny, **values})
