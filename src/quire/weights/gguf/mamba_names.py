"""Rows of names.py for Mamba, Mamba 2 and hybrids with their mixers.

The converter stores -exp(A_log) as `ssm_a`. Of Mamba 2 it stores A and D as columns, and norms of a mixer's output with
a row a group. It multiplies weights of Falcon-H1 by the factors of its configuration."""

from array import array
from collections.abc import Mapping
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
from quire.weights.gguf.derived_config import layer_count
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    GLM_KEYS,
    GRANITE_KEYS,
    INTERLEAVED_QK,
    MIXTRAL_EXPERTS,
    NEXTN_TENSORS,
    like_llama,
)

MAMBA_KEYS = {  # of Mamba 1 and 2
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
}
MAMBA_TENSORS = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
MAMBA_MIXER = {  # of Mamba 1
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
HYBRID_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_ssm": "ssm.inner_size",
}
FEED_FORWARD = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
FEED_FORWARD_LAYER = {**FEED_FORWARD, "ffn_norm": "pre_ff_layernorm"}
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


def mamba(config: CheckpointConfig) -> dict[str, Any]:
    """Falcon-Mamba, which norms dt, b and c, has the architecture name of Mamba."""
    return {"architectures": ["FalconMambaForCausalLM"]} if config.bool("norms_parameters", False) else {}


def jamba(config: CheckpointConfig) -> dict[str, Any]:
    inner, heads = config.int("inner_size"), config.get("num_key_value_heads")
    return {
        "mamba_expand": inner // max(config.int("hidden_size"), 1),
        "num_key_value_heads": max(heads, default=0) if isinstance(heads, array) else heads,
    }


def nemotron_h(config: CheckpointConfig) -> dict[str, Any]:
    """Nemotron H's keys. The tensors of a layer tell of which kind it is."""
    lists = {"mamba": "mamba_layers", "attention": "attention_layers", "moe": "expert_layers"}
    kinds = {layer: kind for kind, key in lists.items() for layer in config.list(key)}
    layers = layer_count(config)
    heads, size = config.get("num_key_value_heads"), config.get("intermediate_size")
    inner = config.int("inner_size")
    return {
        "num_hidden_layers": layers,
        "layers_block_type": [kinds.get(layer, "mlp") for layer in range(layers)],
        "num_key_value_heads": max(heads, default=0) if isinstance(heads, array) else heads,
        "intermediate_size": max(size, default=0) if isinstance(size, array) else size,
        "mamba_head_dim": inner // max(config.int("mamba_num_heads"), 1),
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


NEMOTRON_H = GGUFArchitecture(
    name="NemotronHForCausalLM",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        **GLM_KEYS,
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "mamba_num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
        "inner_size": "ssm.inner_size",
    },
    constants={"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "converted": True},
    tensors=MAMBA_TENSORS,
    layer_tensors={
        "attn_norm": "norm",
        **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        **mixer_tensors("mixer"),
        "ffn_norm": "ffn_norm",
        **NEXTN_TENSORS,
    },
    biases={"use_conv_bias": "ssm_conv1d", "mamba_proj_bias": "ssm_in"},
    layers_with={"mamba_layers": "ssm_in", "attention_layers": "attn_q", "expert_layers": "ffn_gate_inp"},
    derive=nemotron_h,
    layers="backbone.layers",
)

MAMBA_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "mamba": GGUFArchitecture(
        name="MambaForCausalLM",
        keys={
            **MAMBA_KEYS,
            "time_step_rank": "ssm.time_step_rank",
            "intermediate_size": "ssm.inner_size",
            "norms_parameters": "ssm.dt_b_c_rms",
        },
        constants={"model_type": "mamba", "hidden_act": "silu", "converted": True},
        tensors=MAMBA_TENSORS,
        layer_tensors={"attn_norm": "norm", **{part: f"mixer.{name}" for part, name in MAMBA_MIXER.items()}},
        biases={"use_conv_bias": "ssm_conv1d", "use_bias": "ssm_in"},
        derive=mamba,
        layers="backbone.layers",
    ),
    "jamba": like_llama(
        "JambaForCausalLM",
        "jamba",
        keys={
            **EXPERT_KEYS,
            "num_experts": "expert_count",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
            "inner_size": "ssm.inner_size",
        },
        constants={"converted": True},
        layer_tensors={
            **FEED_FORWARD_LAYER,
            "ffn_gate_inp": "feed_forward.router",
            **{f"{part}_exps": name.replace(".", ".experts.{}.") for part, name in FEED_FORWARD.items()},
            **{part: f"mamba.{name}" for part, name in MAMBA_MIXER.items()},
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
        },
        biases={"mamba_conv_bias": "ssm_conv1d", "mamba_proj_bias": "ssm_in"},
        layers_with={"attn_layers": "attn_q", "expert_layers": "ffn_gate_inp"},
        derive=jamba,
    ),
    "falcon-h1": like_llama(
        "FalconH1ForCausalLM",
        "falcon_h1",
        keys=HYBRID_KEYS,
        constants={"converted": True, "mamba_norm_before_gate": False},
        layer_tensors={**FEED_FORWARD_LAYER, **mixer_tensors("mamba")},
        biases={
            "attention_bias": "attn_q",
            "mlp_bias": "ffn_up",
            "mamba_conv_bias": "ssm_conv1d",
            "mamba_proj_bias": "ssm_in",
            "projectors_bias": "ssm_out",
        },
        variants={"ssm_norm": GGUFVariant({"mamba_rms_norm": True})},
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "mamba2": GGUFArchitecture(
        name="Mamba2ForCausalLM",
        keys={
            **MAMBA_KEYS,
            "num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "inner_size": "ssm.inner_size",
        },
        constants={"model_type": "mamba2", "hidden_act": "silu", "converted": True},
        tensors=MAMBA_TENSORS,
        layer_tensors={"attn_norm": "norm", **mixer_tensors("mixer")},
        biases={"use_conv_bias": "ssm_conv1d", "use_bias": "ssm_in"},
        derive=mamba2,
        layers="backbone.layers",
    ),
    "granitehybrid": like_llama(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        keys={**GRANITE_KEYS, **EXPERT_KEYS, **HYBRID_KEYS, "is_rotated": "rope.scaling.finetuned"},
        constants={"converted": True},
        layer_tensors={
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
