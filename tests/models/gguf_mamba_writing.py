"""Writes GGUF files of Mamba 2 and Granite 4 H, by the rules of llama.cpp's converter."""

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
}
COLUMNS = ("ssm_a", "ssm_d")


def write_mamba_gguf(source: Path, path: Path) -> Path:
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    (add_mamba2 if arch is gguf.MODEL_ARCH.MAMBA2 else add_granite)(writer, config)
    for name, data in tensors(load_file(source / "model.safetensors"), config):
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        part = re.sub(r"^blk\.\d+\.|\.weight$", "", translated)
        if part in COLUMNS:
            translated, data = translated.removesuffix(".weight"), data[:, None]
        if part == "ssm_conv1d":
            data = data[:, 0]
        if part == "ssm_norm":
            data = data.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
        writer.add_tensor(translated, np.ascontiguousarray(data))
    return finish(writer, path)


def tensors(stored: dict[str, np.ndarray], config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, data in stored.items():
        if name.endswith(".A_log"):
            yield name, -np.exp(data)
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
