"""Rows of names.py for Mamba 2 and hybrids with its mixers.

The converter stores -exp(A_log) as `ssm_a`, and A and D as columns. Norms of a mixer's output have a row a group."""

from array import array
from collections.abc import Mapping
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.shared_names import (
    EXPERT_KEYS,
    GATED_LAYER,
    GRANITE_KEYS,
    INTERLEAVED_QK,
    MIXTRAL_EXPERTS,
    OUTER_TENSORS,
)

MAMBA2_TENSORS = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
SHARED_MLP = {f"ffn_{part}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")}


def mixer_tensors(name: str) -> dict[str, str]:
    """`name`: of the mixer in a layer of Hugging Face."""
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt", "a": "A", "d": "D", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{part}": f"{name}.{theirs}" for part, theirs in parts.items()}


def mamba2(config: CheckpointConfig) -> dict[str, Any]:
    inner = config.int("inner_size")
    return {
        "head_dim": inner // max(config.int("num_heads"), 1),
        "expand": inner // max(config.int("hidden_size"), 1),
    }


def granite_hybrid(config: CheckpointConfig) -> dict[str, Any]:
    """The number of key heads is listed for each layer: without any, it has a mixer."""
    heads = config.get("num_key_value_heads")
    listed = list(heads) if isinstance(heads, array) else [heads] * config.int("num_hidden_layers")
    return {
        "layer_types": ["attention" if count else "mamba" for count in listed],
        "num_key_value_heads": max(listed, default=0),
        "position_embedding_type": "rope" if config.bool("is_rotated", True) else None,
        "shared_intermediate_size": config.int("shared_expert_intermediate_size", config.int("intermediate_size")),
    }


MAMBA_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "mamba2": GGUFArchitecture(
        name="Mamba2ForCausalLM",
        keys={
            "num_hidden_layers": "block_count",
            "hidden_size": "embedding_length",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "conv_kernel": "ssm.conv_kernel",
            "state_size": "ssm.state_size",
            "num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "inner_size": "ssm.inner_size",
        },
        constants={"model_type": "mamba2", "hidden_act": "silu", "converted": True},
        tensors=MAMBA2_TENSORS,
        layer_tensors={"attn_norm": "norm", **mixer_tensors("mixer")},
        biases={"use_conv_bias": "ssm_conv1d", "use_bias": "ssm_in"},
        derive=mamba2,
        layers="backbone.layers",
    ),
    "granitehybrid": GGUFArchitecture(
        name="GraniteMoeHybridForCausalLM",
        keys={
            **GRANITE_KEYS,
            **EXPERT_KEYS,
            "is_rotated": "rope.scaling.finetuned",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_ssm": "ssm.inner_size",
        },
        constants={"model_type": "granitemoehybrid", "hidden_act": "silu", "converted": True},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **GATED_LAYER,
            **SHARED_MLP,
            **{f"{part}_shexp": name for part, name in SHARED_MLP.items()},
            **MIXTRAL_EXPERTS,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **mixer_tensors("mamba"),
        },
        interleaved=INTERLEAVED_QK,
        derive=granite_hybrid,
    ),
}
