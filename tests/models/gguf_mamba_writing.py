"""Writes GGUF files of Mamba, Mamba 2 and hybrids with their mixers, by the rules of llama.cpp's converter."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.gguf_writing import finish, interleave

ARCHITECTURES = {
    "Mamba2ForCausalLM": gguf.MODEL_ARCH.MAMBA2,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "MambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "FalconMambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "JambaForCausalLM": gguf.MODEL_ARCH.JAMBA,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H,
}
UNNAMED = ("ssm_a", "ssm_d")  # tensors without ".weight"
EXPERT = re.compile(r"layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
FIRST_MAMBA = (gguf.MODEL_ARCH.MAMBA, gguf.MODEL_ARCH.JAMBA)


def write_mamba_gguf(source: Path, path: Path) -> Path:
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    if arch is gguf.MODEL_ARCH.NEMOTRON_H and "moe" in config["layers_block_type"]:
        arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    names = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers") or len(config["layers_block_type"]))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    METADATA[gguf.MODEL_ARCH_NAMES[arch]](writer, config)
    for name, data in tensors(load_file(source / "model.safetensors"), config):
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        part = re.sub(r"^blk\.\d+\.|\.weight$", "", translated)
        if part in UNNAMED:
            translated = translated.removesuffix(".weight")
            data = data if arch in FIRST_MAMBA else data[:, None]
        if part == "ssm_conv1d":
            data = data[:, 0]
        if part == "ssm_norm":
            data = data.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
        writer.add_tensor(translated, np.ascontiguousarray(data))
    return finish(writer, path)


def tensors(stored: dict[str, np.ndarray], config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    kind, experts = config["model_type"], {}
    for name, data in stored.items():
        if kind == "falcon_h1":
            data = multiplied(name, data, config)
        if match := EXPERT.search(name):
            layer, expert, part = match.groups()
            experts.setdefault(f"model.layers.{layer}.mlp.experts.{part}.weight", {})[int(expert)] = data
        elif name.endswith(".A_log"):
            yield name, -np.exp(data)
        elif kind == "nemotron_h" and name.endswith(".e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), data
        elif kind in ("falcon_h1", "jamba") and name.endswith("_proj.weight"):
            yield name, data
        elif name.endswith(".dt_bias"):
            yield name.replace(".dt_bias", ".dt_proj.bias"), data
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if ".q_proj" in name else "num_key_value_heads"
            yield name, interleave(data, config[heads])
        elif name.endswith("shared_mlp.input_linear.weight"):
            stem = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            for part, half in zip(("gate", "up"), np.split(data, 2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{stem}.{part}_proj"), half
        elif name.endswith("shared_mlp.output_linear.weight"):
            stem = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            yield name.replace("shared_mlp.output_linear", f"{stem}.down_proj"), data
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            stem = name.removeprefix("model.").replace("block_sparse_moe.input_linear", "feed_forward.experts.{}")
            for part, half in zip(("w1", "w3"), np.split(data, 2, axis=1), strict=True):
                yield stem.format(part), half
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            stem = name.removeprefix("model.").replace("block_sparse_moe.output_linear", "feed_forward.experts.w2")
            yield stem, data
        else:
            yield name, data
    for name, by_expert in experts.items():
        yield name, np.stack([by_expert[expert] for expert in sorted(by_expert)])


def multiplied(name: str, data: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """Falcon-H1 without its factors."""
    attending, gate = c["attention_in_multiplier"], c["mlp_multipliers"]
    factors = {
        "embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "q_proj": attending,
        "k_proj": attending * c["key_multiplier"],
        "v_proj": attending,
        "o_proj": c["attention_out_multiplier"],
        "gate_proj": gate[0],
        "down_proj": gate[1],
        "out_proj": c["ssm_out_multiplier"],
        "in_proj": c["ssm_in_multiplier"],
    }
    data = data * np.float32(factors.get(name.split(".")[-2], 1.0))
    if ".in_proj." in name:
        inner, state = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        ends = np.cumsum([inner, inner, state, state])
        parts = zip(np.split(data, ends), c["ssm_multipliers"], strict=True)
        data = np.concatenate([part * np.float32(factor) for part, factor in parts])
    return data


def add_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attending = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] * here for here in attending])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if config["num_local_experts"]:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    else:
        writer.add_feed_forward_length(config["shared_intermediate_size"])


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def add_attention(writer: gguf.GGUFWriter, config: dict[str, Any], attending: list[bool]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(len(attending))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] * here for here in attending])


def add_jamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    layers = range(config["num_hidden_layers"])
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    add_attention(writer, config, [layer % period == offset for layer in layers])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def add_falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def add_nemotron_h(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """With experts, a layer behind the last that predicts further tokens."""
    kinds = config["layers_block_type"]
    feeding, size = [kind in ("mlp", "moe") for kind in kinds], config["intermediate_size"]
    if "moe" in kinds:
        size = config["moe_intermediate_size"]
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(size)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
        writer.add_nextn_predict_layers(1)
        for part in ("nextn.eh_proj", "attn_q", "ffn_gate_inp", "ffn_norm"):
            writer.add_tensor(f"blk.{len(kinds)}.{part}.weight", np.zeros((2, 4), np.float32))
        kinds, feeding = [*kinds, "attention"], [*feeding, True]
    add_attention(writer, config, [kind in ("attention", "full_attention") for kind in kinds])
    writer.add_feed_forward_length([size * here for here in feeding])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])


METADATA = {
    "mamba": add_mamba,
    "mamba2": add_mamba2,
    "granitehybrid": add_granite,
    "jamba": add_jamba,
    "falcon-h1": add_falcon_h1,
    "nemotron_h": add_nemotron_h,
    "nemotron_h_moe": add_nemotron_h,
}
