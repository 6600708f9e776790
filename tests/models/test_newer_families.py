"""Families of 2025 and 2026, against transformers: rows of llama_families.py and moe_families.py, and files of their
own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AfmoeConfig,
    AXK1Config,
    Cohere2MoeConfig,
    DeepseekV32Config,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    FlintConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    Llama4TextConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    Mistral4Config,
    VaultGemmaConfig,
)

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
BOTH_ROPES = {"full_attention": DEFAULT | {"rope_theta": 5000.0}, "sliding_attention": DEFAULT}
HALF_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
ONE_DENSE = {"mlp_layer_types": ["dense", "sparse"]}
MLA = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "num_key_value_heads": 4, "rope_parameters": DEFAULT,
}  # fmt: skip
INDEXED = MLA | {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "num_hidden_layers": 2}
GROWING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
}  # fmt: skip
LLAMA_4 = {
    "intermediate_size": 48, "intermediate_size_mlp": 80, "head_dim": 32, "attention_chunk_size": 8, "floor_scale": 6,
    "attn_scale": 0.3, "rope_parameters": DEFAULT, "num_local_experts": 5,
}  # fmt: skip
GEMMA_3N = {
    "num_hidden_layers": 4, "head_dim": 24, "hidden_size_per_layer_input": 12, "laurel_rank": 8,
    "num_kv_shared_layers": 2, "sliding_window": 5, "vocab_size_per_layer_input": 80, "rope_parameters": BOTH_ROPES,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
}  # fmt: skip
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GEMMA_4 = {
    "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 12,
    "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": DEFAULT},
    "vocab_size_per_layer_input": 96,
}  # fmt: skip
MIMO = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "sliding_window": 5, "routed_scaling_factor": 1.5,
    "layer_types": ["full_attention", "sliding_attention"], "n_group": 1, "topk_group": 1,
    "rope_parameters": {kind: rope | {"partial_rotary_factor": 0.334} for kind, rope in BOTH_ROPES.items()},
}  # fmt: skip
CASES: Cases = {
    "granite-swa": (
        GraniteSWAConfig,
        FACTORS | HALF_WINDOWS | {"num_hidden_layers": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
                                  "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0]},
    ),
    "hyperclova": (HyperCLOVAXConfig, FACTORS | {"logits_scaling": 0.3}),
    "vaultgemma": (VaultGemmaConfig, HALF_WINDOWS | {"head_dim": 24, "query_pre_attn_scalar": 20}),
    "granite-moe-shared": (GraniteMoeSharedConfig, FACTORS | LOCAL_EXPERTS | {"shared_intermediate_size": 40}),
    "granite-moe-swa": (
        GraniteMoeSWAConfig,
        FACTORS | LOCAL_EXPERTS | HALF_WINDOWS | {"shared_intermediate_size": 40, "layer_rope_theta": [500.0, 0]},
    ),
    "flex-olmo": (FlexOlmoConfig, {"num_experts": 6, "num_experts_per_tok": 3}),
    "hunyuan-moe": (HunYuanMoEV1Config, {"num_experts": 6, "moe_topk": [2, 2], "head_dim": 24}),
    "hy-v3": (HYV3Config, EXPERTS | ONE_DENSE | {"head_dim": 24, "router_scaling_factor": 1.5}),
    "exaone-moe": (
        ExaoneMoeConfig,
        EXPERTS | ONE_DENSE | HALF_WINDOWS | {"num_shared_experts": 2, "rope_parameters": DEFAULT},
    ),
    "afmoe": (
        AfmoeConfig,
        EXPERTS | HALF_WINDOWS | {"num_dense_layers": 1, "head_dim": 24, "mup_enabled": True, "route_scale": 1.5},
    ),
    "flint": (
        FlintConfig,
        EXPERTS | HALF_WINDOWS | {"head_dim": 24, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40},
    ),
    "mellum": (MellumConfig, EXPERTS | HALF_WINDOWS | {"head_dim": 24, "rope_parameters": BOTH_ROPES}),
    "deepseek-v32": (DeepseekV32Config, INDEXED | {"first_k_dense_replace": 1}),
    "glm-5": (GlmMoeDsaConfig, INDEXED | {"first_k_dense_replace": 1}),
    "ax-k1": (AXK1Config, MLA | {"mlp_layer_types": ["dense", "sparse"]}),
    "mistral-4": (Mistral4Config, MLA | {"n_group": 1, "rope_parameters": GROWING}),
    "llama-4": (Llama4TextConfig, LLAMA_4 | {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 1}),
    "llama-4-some-dense": (
        Llama4TextConfig,
        LLAMA_4 | {"no_rope_layers": [0, 1], "interleave_moe_layer_step": 2, "num_experts_per_tok": 2,
                   "use_qk_norm": False, "attn_temperature_tuning": False, "attention_chunk_size": 64},
    ),
    "gemma-3n": (Gemma3nTextConfig, GEMMA_3N),
    "gemma-4": (Gemma4TextConfig, GEMMA_4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma-4-experts": (
        Gemma4TextConfig,
        GEMMA_4 | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 6,
                   "top_k_experts": 2, "moe_intermediate_size": 40, "enable_moe_block": True, "attention_k_eq_v": True,
                   "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0},
    ),
    "mimo-v2": (MiMoV2FlashConfig, MIMO),
    "cohere2-moe": (
        Cohere2MoeConfig,
        HALF_WINDOWS | {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 1, "intermediate_size": 48,
                        "mlp_layer_types": ["dense", "sparse"], "prefix_dense_intermediate_size": 80},
    ),
    "cohere2-moe-sigmoid": (
        Cohere2MoeConfig,
        HALF_WINDOWS | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6,
                        "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
}  # fmt: skip

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def read(architecture: str, **values: Any) -> Any:
    common = {key: value for key, value in TINY.items() if value is not None} | {"hidden_act": "silu"}
    config = CheckpointConfig(Path("config.json"), common | {"architectures": [architecture]} | values)
    return family(architecture).config(config)


def test_what_nobody_wrote_code_for_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"layer_rope_theta has 10, 20 for sliding_attention"):
        kinds = ["sliding_attention"] * 2
        read("GraniteSWAForCausalLM", layer_types=kinds, sliding_window=4, layer_rope_theta=[10, 20])
    with pytest.raises(Unsupported, match=r"moe_topk is \[1, 2\]|num_experts_per_tok is \[1, 2\]"):
        read("HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=[1, 2])
    with pytest.raises(Unsupported, match=r"intermediate_size is \[48, 64\]"):
        read("Gemma3nForCausalLM", intermediate_size=[48, 64], hidden_act=None)
    with pytest.raises(BadCheckpoint, match="num_kv_shared_layers is 2, and there are 2 layers"):
        read("Gemma4ForCausalLM", num_kv_shared_layers=2, sliding_window=4, hidden_act=None)
