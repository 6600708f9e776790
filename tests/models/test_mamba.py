"""Mamba, Mamba 2 and the hybrids that have their mixers, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    Zamba2Config,
)

from models.checking import (
    BACKENDS,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
)
from models.gguf_mamba_writing import write_mamba_gguf
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

MAMBA2 = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 8}
HYBRID = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
ODD = {  # heads of 20 columns, states of 12
    "hidden_size": 60,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
GRANITE = {
    "shared_intermediate_size": 72,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
FALCON_FACTORS = {
    "mamba_d_ssm": 120,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9],
    "mlp_multipliers": [0.7, 1.4],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.1,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 4,
    "chunk_size": 8,
    "head_dim": 24,
}
ZAMBA = {
    "num_hidden_layers": 4,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "chunk_size": 8,
    "num_key_value_heads": 4,
    "adapter_rank": 8,
    "initializer_range": 0.1,  # wider ones make logits of small differences of large numbers
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}
JAMBA = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
CASES: Cases = {
    "mamba2": (Mamba2Config, MAMBA2),
    "mamba2-odd": (
        Mamba2Config,
        MAMBA2
        | {"hidden_size": 60, "num_heads": 6, "head_dim": 20, "n_groups": 1, "state_size": 12, "conv_kernel": 3}
        | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "bamba": (BambaConfig, HYBRID | {"attn_layer_indices": [1]}),
    "bamba-odd": (BambaConfig, ODD | {"attn_layer_indices": [0], "mamba_d_conv": 2}),
    "granite-4-h": (GraniteMoeHybridConfig, HYBRID | GRANITE | {"num_local_experts": 0}),
    "granite-4-h-experts": (
        GraniteMoeHybridConfig,
        ODD | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "granite-4-h-experts-converted": (  # whose mixers have biases as llama.cpp knows them
        GraniteMoeHybridConfig,
        HYBRID | GRANITE | {"num_local_experts": 4, "mamba_n_groups": 2, "position_embedding_type": "rope"},
    ),
    "falcon-h1": (FalconH1Config, HYBRID | {"mamba_d_ssm": 96, "mamba_n_heads": 6}),
    "falcon-h1-factors": (FalconH1Config, ODD | FALCON_FACTORS | {"projectors_bias": True}),
    "falcon-h1-factors-converted": (FalconH1Config, ODD | FALCON_FACTORS | {"mamba_proj_bias": False}),
    "falcon-h1-norm-first": (
        FalconH1Config,
        HYBRID | {"mamba_d_ssm": None, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "nemotron-h": (NemotronHConfig, NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"]}),
    "nemotron-h-biases": (
        NemotronHConfig,
        NEMOTRON | {"layers_block_type": ["attention", "mamba"], "use_bias": True, "mamba_proj_bias": True},
    ),
    "nemotron-h-experts": (
        NemotronHConfig,
        NEMOTRON
        | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5},
    ),
    "nemotron-h-latent-experts": (
        NemotronHConfig,
        NEMOTRON
        | {"layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "moe_latent_size": 48},
    ),
    "zamba2": (Zamba2Config, ZAMBA),
    "zamba2-two-blocks": (
        Zamba2Config,
        ZAMBA
        | {"num_mem_blocks": 2, "use_mem_rope": True, "use_shared_attention_adapter": True, "mamba_ngroups": 2}
        | {"layers_block_type": ["hybrid", "hybrid", "linear_attention", "hybrid"], "add_bias_linear": True},
    ),
    "jamba": (JambaConfig, JAMBA | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts_per_tok": 2}),
    "jamba-dense": (
        JambaConfig,
        JAMBA
        | {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "mamba_d_state": 7}
        | {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": 9},
    ),
    "mamba": (MambaConfig, {"intermediate_size": 256}),
    "mamba-odd": (
        MambaConfig,
        {"hidden_size": 60, "intermediate_size": 120, "state_size": 7, "conv_kernel": 3, "time_step_rank": 5}
        | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
    ),
    "falcon-mamba": (FalconMambaConfig, {"intermediate_size": 256, "mixer_rms_eps": 1e-4}),
    "falcon-mamba-odd": (FalconMambaConfig, {"hidden_size": 60, "intermediate_size": 120, "use_bias": True}),
}

CONVERTED = [
    *("mamba2", "granite-4-h", "granite-4-h-experts-converted", "mamba", "falcon-mamba", "jamba", "jamba-dense"),
    *("falcon-h1", "falcon-h1-factors-converted", "nemotron-h", "nemotron-h-experts", "nemotron-h-latent-experts"),
]

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


@pytest.mark.verifies("gguf")
@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf_files_give_the_same_logits(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    path = write_mamba_gguf(theirs.path, tmp_path / "model.gguf")
    assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.parametrize(
    ("architecture", "values", "error", "message"),
    [
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "conv"]}, Unsupported, "layer_types lists conv"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"]}, Unsupported, "lists 1 layers, and there are 2"),
        ("BambaForCausalLM", {"mamba_n_heads": 7}, BadCheckpoint, "7 heads of Mamba of 36 columns are not 256"),
        ("BambaForCausalLM", {"mamba_n_groups": 3}, BadCheckpoint, "cannot share 3 groups evenly"),
        ("BambaForCausalLM", {"mamba_d_conv": 17}, Unsupported, "convolutions over 17 tokens"),
        ("BambaForCausalLM", {"mamba_d_state": 1 << 20}, BadCheckpoint, "numbers are more than"),
        ("BambaForCausalLM", {"time_step_limit": [1.0, 0.5]}, BadCheckpoint, "time_step_limit is"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba", "conv"]}, Unsupported, "layers of the kind conv"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"}, BadCheckpoint, "hybrid_override_pattern has X"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, BadCheckpoint, "ssm_multipliers has 1 numbers, and not 5"),
        ("JambaForCausalLM", {"attn_layer_period": 0}, BadCheckpoint, "attn_layer_period is 0"),
        ("MambaForCausalLM", {"state_size": 0}, BadCheckpoint, "gives columns of Mamba as 0"),
        ("Mamba2ForCausalLM", {"num_heads": 5}, BadCheckpoint, "5 heads of 32 columns are not 2 x 128 columns"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    common = {"architectures": [architecture], "hidden_act": "silu", "mlp_hidden_act": "relu2"}
    jamba = {"attn_layer_offset": 0, "attn_layer_period": 2, "expert_layer_offset": 0, "expert_layer_period": 2}
    tiny = TINY | HYBRID | MAMBA2 | NEMOTRON | jamba | common | {"mamba_d_ssm": 256, "head_dim": 32}
    with pytest.raises(error, match=message):
        family(architecture).config(CheckpointConfig(Path("config.json"), {**tiny, **values}))


def test_layers_of_nemotron_h_may_be_letters() -> None:
    values = TINY | NEMOTRON | {"architectures": ["NemotronHForCausalLM"], "mlp_hidden_act": "relu2"}
    values |= {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3}
    config = family("NemotronHForCausalLM").config(CheckpointConfig(Path("config.json"), values))
    assert config.kinds == ("mamba", "mlp", "full_attention") and config.kv_layers == 1
    assert config.states is not None and config.states.num_layers == 1
