"""A hybrid of transformers with gated delta nets as llama.cpp's converter would write it, in F32."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.gguf_writing import add_metadata, nextn_name, stacked
from weights.gguf_files import finish

ARCHITECTURES = {
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
}


def write_delta_gguf(source: Path, path: Path) -> Path:
    """With a layer behind the last that predicts further tokens."""
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    layers, tiled = config["num_hidden_layers"], arch is not gguf.MODEL_ARCH.QWEN3NEXT
    names = gguf.get_tensor_name_map(arch, layers + 1)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_metadata(writer, {"intermediate_size": 0} | config | {"num_hidden_layers": layers + 1})
    writer.add_nextn_predict_layers(1)
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    tensors = {"mtp.fc.weight": np.zeros((2, 4), np.float32)} | load_file(source / "model.safetensors")
    tensors = {behind_the_last(name, layers): data for name, data in tensors.items()}
    for name, data in stacked(experts_apart(tensors)):
        for part, values in converted(name, data, config, tiled):
            translated = nextn_name(part) or names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert translated is not None, part
            writer.add_tensor(translated, np.ascontiguousarray(values, np.float32))
    return finish(writer, path)


def behind_the_last(name: str, layers: int) -> str:
    """The converter's name of a tensor: mtp.layers.0 is the layer behind the last."""
    outer = {"fc": "eh_proj", "norm": "shared_head.norm"}
    outer |= {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
    for ours, theirs in outer.items():
        name = name.replace(f"mtp.{ours}.", f"model.layers.{layers}.{theirs}.")
    return name


def experts_apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of Qwen3.5, whose checkpoints stack the experts."""
    apart = {}
    for name, data in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                apart[name.replace("gate_up_proj", f"{part}_proj.weight")] = half
        else:
            apart[f"{name}.weight" if name.endswith("experts.down_proj") else name] = data
    return apart


def converted(name: str, data: np.ndarray, config: dict[str, Any], tiled: bool) -> list[tuple[str, np.ndarray]]:
    key_heads, shared = (
        config["linear_num_key_heads"],
        config["linear_num_value_heads"] // config["linear_num_key_heads"],
    )
    keys, width = config["linear_key_head_dim"] * key_heads, config["linear_value_head_dim"]

    def in_turn(values: np.ndarray, width: int) -> np.ndarray:
        """Heads grouped by key head -> heads that take the key heads in turn."""
        if not tiled:
            return values
        return values.reshape(key_heads, shared, width, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    def with_v_in_turn(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[: 2 * keys], in_turn(values[2 * keys :], width)])

    if name.endswith("shared_expert_gate.weight"):
        return [(name, data.reshape(-1))]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return [(name, data + 1)]
    if name.endswith("in_proj_qkvz.weight"):
        sizes = [keys // key_heads, keys // key_heads, shared * width]
        parts = np.split(data.reshape(key_heads, -1, data.shape[1]), np.cumsum(sizes), axis=1)
        q, k, v, z = (part.reshape(-1, data.shape[1]) for part in parts)
        stem = name.removesuffix("qkvz.weight")
        return [(f"{stem}qkv.weight", np.concatenate([q, k, v])), (f"{stem}z.weight", z)]
    if name.endswith(".A_log"):
        return [(name, in_turn(-np.exp(data), 1))]
    if name.endswith(".dt_bias"):
        return [(name.replace(".dt_bias", ".dt_proj.bias"), in_turn(data, 1))]
    if name.endswith("linear_attn.conv1d.weight"):
        return [(name, with_v_in_turn(data[:, 0]))]
    if name.endswith("in_proj_qkv.weight"):
        return [(name, with_v_in_turn(data))]
    if name.endswith("in_proj_z.weight"):
        return [(name, in_turn(data, width))]
    if name.endswith(("in_proj_b.weight", "in_proj_a.weight")):
        return [(name, in_turn(data, 1))]
    if name.endswith("linear_attn.out_proj.weight"):
        return [(name, in_turn(data.T, width).T)]
    return [(name, data)]
