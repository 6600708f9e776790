"""GGUF files of families of 2025 and 2026, against transformers on the same numbers."""

from pathlib import Path

import pytest
from transformers import (
    AfmoeConfig,
    ExaoneMoeConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    Mistral4Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from models.checking import TINY, Cases, random_model
from models.gguf_checking import check_file
from models.gguf_deepseek_writing import write_deepseek_gguf as write_mla
from models.test_newer_families import (
    DEFAULT,
    EXPERTS,
    FACTORS,
    GEMMA_3N,
    GEMMA_4,
    GROWING,
    HALF_WINDOWS,
    INDEXED,
    LLAMA_4,
    MIMO,
    MLA,
)

NO_ROPE = {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4, "attention_chunk_size": 64}
CASES: Cases = {
    "granite-moe-shared": (
        GraniteMoeSharedConfig,
        FACTORS | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40},
    ),
    "hunyuan-moe": (HunYuanMoEV1Config, {"num_experts": 6, "moe_topk": [2, 2], "head_dim": 24}),
    "exaone-moe": (
        ExaoneMoeConfig,
        EXPERTS | HALF_WINDOWS | {"mlp_layer_types": ["dense", "sparse"], "rope_parameters": DEFAULT},
    ),
    "afmoe": (
        AfmoeConfig,
        EXPERTS | {"num_dense_layers": 1, "head_dim": 24, "mup_enabled": True, "route_scale": 1.5,
                   "num_hidden_layers": 4, "sliding_window": 5},
    ),
    "llama4": (Llama4TextConfig, LLAMA_4 | NO_ROPE | {"floor_scale": 8192, "attn_scale": 0.1}),
    "gemma3n": (Gemma3nTextConfig, GEMMA_3N | {"laurel_rank": 64}),
    "gemma4": (Gemma4TextConfig, GEMMA_4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4-experts": (
        Gemma4TextConfig,
        GEMMA_4 | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 6,
                   "top_k_experts": 2, "moe_intermediate_size": 40, "enable_moe_block": True, "attention_k_eq_v": True,
                   "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0},
    ),
    "mimo2": (MiMoV2FlashConfig, MIMO | {"attention_value_scale": 1.0}),
}  # fmt: skip


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    config, options = CASES[name]
    model = random_model(config(**TINY | options), seed=sum(map(ord, name)))
    check_file(model, tmp_path)


MLA_CASES: Cases = {
    "glm-dsa": (GlmMoeDsaConfig, INDEXED | {"first_k_dense_replace": 1}),
    "glm-dsa-sparse": (GlmMoeDsaConfig, INDEXED | {"first_k_dense_replace": 1, "index_topk": 7, "index_n_heads": 8}),
    "mistral4": (Mistral4Config, MLA | {"n_group": 1, "rope_parameters": GROWING}),
}


@pytest.mark.parametrize("name", MLA_CASES)
def test_files_with_latents(name: str, tmp_path: Path) -> None:
    config, options = MLA_CASES[name]
    model = random_model(config(**TINY | options), seed=3)
    check_file(model, tmp_path, write_mla, apart=True)


SAME = {
    "qwen2vl": (Qwen2Config, {}),
    "qwen3vl": (Qwen3Config, {"head_dim": 24}),
    "qwen3vlmoe": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True, "head_dim": 24}),
    "deci": (LlamaConfig, {}),
}


@pytest.mark.parametrize("called", SAME)
def test_some_are_another_under_their_own_name(called: str, tmp_path: Path) -> None:
    config, options = SAME[called]
    model = random_model(config(**TINY | options), seed=2)
    check_file(model, tmp_path, called=called)
