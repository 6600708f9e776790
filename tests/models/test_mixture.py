"""Families with experts, Granite and OLMo 2, against transformers."""

from collections.abc import Callable

import pytest
from transformers import (
    GraniteConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from models.checking import BACKENDS, Cases, Theirs, check_against_transformers, checkpoints_of

FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
}
QWEN2_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
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
    "granite": (GraniteConfig, FACTORS),
    "granite-tied": (GraniteConfig, FACTORS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite-moe": (GraniteMoeConfig, FACTORS | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "olmo2": (Olmo2Config, {}),
    "olmo2-mha": (Olmo2Config, {"num_key_value_heads": 4, "attention_bias": True, "hidden_size": 96}),
}  # fmt: skip

checkpoints = checkpoints_of(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))
