"""Architectures of 2026 as llama.cpp's converter writes them, in F32, and Kimi Linear."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.gguf_writing import stacked
from weights.gguf_files import finish, interleave

CALLED = {"mellum": "mellum", "hy_v3": "hy_v3", "cohere2_moe": "cohere2moe"}
NAMES = {  # of a layer
    "input_layernorm": "attn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.g_proj": "attn_gate",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
}
LING_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_latest(source: Path, path: Path) -> Path:
    """With a layer behind the last that predicts further tokens, where the family has any."""
    c = json.loads((source / "config.json").read_text())
    kind, layers = c["model_type"], c["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, CALLED[kind])
    further = 0 if kind == "mellum" else 1
    if further:
        writer.add_nextn_predict_layers(1)
        for part in ("nextn.eh_proj", "attn_q", "ffn_gate_inp"):
            writer.add_tensor(f"blk.{layers}.{part}.weight", np.zeros((2, 4), np.float32))
    add_sizes(writer, c, layers + further)
    {"mellum": add_mellum, "hy_v3": add_hy_v3, "cohere2_moe": add_cohere}[kind](writer, c)
    for name, data in stacked(load_file(source / "model.safetensors"), kind):
        writer.add_tensor(translated(name), np.ascontiguousarray(data))
    return finish(writer, path)


def translated(name: str) -> str:
    if name.endswith(("mlp.expert_bias", "mlp.experts.e_score_correction_bias")):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    assert match is not None, name
    return f"blk.{match[1]}.{NAMES[match[2]]}.{kind}"


def add_sizes(writer: gguf.GGUFWriter, c: dict[str, Any], layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c.get("prefix_dense_intermediate_size") or c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    rope = c["rope_parameters"]
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    writer.add_key_length(width)
    writer.add_value_length(width)
    if c.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if "num_experts_per_tok" not in c:
        return
    writer.add_expert_count(c.get("num_experts") or c["num_local_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c.get("moe_intermediate_size") or c["intermediate_size"])


def add_windows(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    writer.add_sliding_window(c["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])


def write_step(source: Path, path: Path) -> Path:
    c = json.loads((source / "config.json").read_text())["text_config"]
    writer = gguf.GGUFWriter(path, "step35")
    add_sizes(writer, c | {"num_local_experts": c["n_routed_experts"]}, c["num_hidden_layers"])
    add_windows(writer, c)
    local = [kind == "sliding_attention" for kind in c["layer_types"]]
    writer.add_head_count([c["num_sliding_attention_heads" if swa else "num_attention_heads"] for swa in local])
    writer.add_head_count_kv([c["num_key_value_heads"]] * len(local))
    writer.add_expert_shared_feed_forward_length(c["share_expert_dim"])
    writer.add_expert_weights_scale(c["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
    writer.add_swiglu_clamp_exp([float(limit or 0) for limit in c["swiglu_limits"]])
    writer.add_swiglu_clamp_shexp([float(limit or 0) for limit in c["swiglu_limits_shared"]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STEP35, c["num_hidden_layers"])
    for name, data in load_file(source / "model.safetensors").items():
        if name.startswith(("vision_model.", "vit_large_projector.")):
            continue
        called = name + ".bias" if name.endswith(".moe.router_bias") else name
        translated = names.get_name(called, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, data + np.float32(1) if name.endswith("norm.weight") else data)
    return finish(writer, path)


def write_laguna(source: Path, path: Path) -> Path:
    c = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "laguna")
    add_sizes(writer, c, c["num_hidden_layers"])
    rope, width = c["rope_parameters"], c["head_dim"]
    writer.add_head_count(c["num_attention_heads_per_layer"])
    if "sliding_attention" in c["layer_types"]:
        add_windows(writer, c)
    for key, kind in (("dimension_count", "full_attention"), ("dimension_count_swa", "sliding_attention")):
        writer.add_uint32(f"laguna.rope.{key}", int(width * rope[kind].get("partial_rotary_factor", 1.0)))
    writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c["moe_routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
    for name, data in stacked(load_file(source / "model.safetensors"), "laguna"):
        writer.add_tensor(translated(name), np.ascontiguousarray(data))
    return finish(writer, path)


def write_granite_swa(source: Path, path: Path) -> Path:
    c = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "granite_swa")
    add_sizes(writer, c, c["num_hidden_layers"])
    add_windows(writer, c)
    thetas = c["layer_rope_theta"]
    writer.add_rope_freq_base(max(thetas))
    writer.add_array("granite_swa.attention.rope_pattern", [theta > 0 for theta in thetas])
    writer.add_attention_scale(c["attention_multiplier"])
    writer.add_embedding_scale(c["embedding_multiplier"])
    writer.add_residual_scale(c["residual_multiplier"])
    writer.add_logit_scale(c["logits_scaling"])
    if "shared_intermediate_size" in c:
        writer.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    own = {
        "self_attn.sinks": "attn_sinks", "shared_mlp.input_linear": "ffn_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp", "block_sparse_moe.router": "ffn_gate_inp",
        "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
        "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    }  # fmt: skip
    for name, data in load_file(source / "model.safetensors").items():
        for part, heads in (("q_proj", c["num_attention_heads"]), ("k_proj", c["num_key_value_heads"])):
            data = interleave(data, heads) if f".{part}." in name else data
        _, _, rest = name.removesuffix(".weight").partition(".layers.")
        layer, _, part = rest.partition(".")
        called = f"blk.{layer}.{own[part]}.weight" if part in own else translated(name)
        writer.add_tensor(called, np.ascontiguousarray(data))
    return finish(writer, path)


def write_minimax_m3(source: Path, path: Path) -> Path:
    c = json.loads((source / "config.json").read_text())["text_config"]
    writer = gguf.GGUFWriter(path, "minimax-m3")
    add_sizes(writer, c | {"prefix_dense_intermediate_size": c["dense_intermediate_size"]}, c["num_hidden_layers"])
    writer.add_rope_dimension_count(c["rotary_dim"])
    writer.add_expert_shared_count(c["shared_intermediate_size"] // c["intermediate_size"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
    writer.add_uint32("minimax-m3.attention.indexer.block_size", c["index_block_size"])
    writer.add_uint32("minimax-m3.attention.indexer.top_k", c["index_topk_blocks"])
    text = {
        name.removeprefix("language_model."): data
        for name, data in load_file(source / "model.safetensors").items()
        if name.startswith("language_model.")
    }
    for name, data in stacked(text):
        part = name.removesuffix(".weight")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.index_(\w+)", part):
            called = f"blk.{match[1]}.indexer.{match[2]}.weight"
        elif match := re.fullmatch(r"layers\.(\d+)\.feed_forward\.experts\.(\w+)", part):
            called = f"blk.{match[1]}.ffn_{PARTS[match[2]]}_exps.weight"
        else:
            name = name.replace("block_sparse_moe.e_score", "mlp.experts.e_score")
            called = translated(name.replace("block_sparse_moe.", "mlp."))
        writer.add_tensor(called, np.ascontiguousarray(data + np.float32(1) if part.endswith("norm") else data))
    return finish(writer, path)


def write_nanbeige(source: Path, path: Path) -> Path:
    c = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "nanbeige")
    add_sizes(writer, c, c["num_hidden_layers"])
    writer.add_uint32("nanbeige.num_loops", c["num_loops"])
    writer.add_bool("nanbeige.skip_loop_final_norm", False)
    for name, data in load_file(source / "model.safetensors").items():
        for part, heads in (("q_proj", c["num_attention_heads"]), ("k_proj", c["num_key_value_heads"])):
            data = interleave(data, heads) if f".{part}." in name else data
        writer.add_tensor(translated(name), np.ascontiguousarray(data))
    return finish(writer, path)


def add_mellum(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    add_windows(writer, c)


def add_hy_v3(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    writer.add_expert_shared_feed_forward_length(c["moe_intermediate_size"] * c["num_shared_experts"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c["router_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_cohere(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    add_windows(writer, c)
    if not c.get("rms_norm_eps"):
        writer.add_layer_norm_eps(c["layer_norm_eps"])
    writer.add_logit_scale(c["logit_scale"])
    writer.add_rope_dimension_count(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
    writer.add_expert_weights_norm(c["norm_topk_prob"])
    softmax = c["expert_selection_fn"] == "softmax"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID)
    if c["num_shared_experts"]:
        writer.add_expert_shared_count(c["num_shared_experts"])


def write_kimi(source: Path, path: Path) -> Path:
    c, arch = json.loads((source / "config.json").read_text()), gguf.MODEL_ARCH.KIMI_LINEAR
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_latent_sizes(writer, c)
    names = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    for name, data in stacked(as_published(load_file(source / "model.safetensors"), c), "kimi_linear"):
        for part, numbers in split_latent(name, data, c).items():
            writer.add_tensor(kimi_name(names, part), np.ascontiguousarray(numbers))
    return finish(writer, path)


def write_ling(source: Path, path: Path) -> Path:
    """With a layer behind the last that predicts further tokens."""
    c = json.loads((source / "config.json").read_text())
    layers = c["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, "bailingmoe3")
    add_latent_sizes(writer, c, further=1)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor(f"blk.{layers}.nextn.eh_proj.weight", np.zeros((2, 4), np.float32))
    writer.add_tensor(f"blk.{layers}.layer_output_norm.weight", np.zeros(4, np.float32))
    writer.add_bool("bailingmoe3.kda.safe_gate", True)
    writer.add_float32("bailingmoe3.kda.gate_lower_bound", c["kda_lower_bound"])
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    writer.add_expert_shared_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_group_count(c["num_expert_group"])
    writer.add_expert_group_used_count(c["topk_group"])
    writer.add_expert_weights_norm(c["moe_renormalize"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, layers)
    for name, data in stacked(as_published(load_file(source / "model.safetensors"), c), "bailing_hybrid"):
        for part, numbers in split_latent(name, data, c).items():
            writer.add_tensor(ling_name(names, part, c["layer_types"]), np.ascontiguousarray(numbers))
    return finish(writer, path)


def ling_name(names: gguf.TensorNameMap, name: str, kinds: list[str]) -> str:
    """Some names mean another tensor where a layer has a state."""
    if not name.endswith((".f_proj.weight", ".g_proj.weight")):
        return kimi_name(names, name)
    layer, part = int(name.split(".")[2]), name.split(".")[-2]
    own = "attn_gate" if kinds[layer] == "full_attention" else f"ssm_{part[0]}_a"
    return f"blk.{layer}.{own}.weight"


def split_latent(name: str, data: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """kv_b_proj as two tensors, that of the keys transposed head by head."""
    if not name.endswith("kv_b_proj.weight"):
        return {name: data}
    heads, still, latent = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
    k, v = np.split(data.reshape(heads, -1, latent), [still], axis=1)
    return {name.replace("kv_b_proj", "k_b_proj"): k.swapaxes(1, 2), name.replace("kv_b_proj", "v_b_proj"): v}


def add_latent_sizes(writer: gguf.GGUFWriter, c: dict[str, Any], further: int = 0) -> None:
    latent, still, rope, value = (
        c[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    writer.add_block_count(c["num_hidden_layers"] + further)
    writer.add_context_length(c["model_max_length"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv([int(kind == "full_attention") for kind in c["layer_types"]] + [1] * further)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(c["linear_head_dim"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rope)
    writer.add_key_length(latent + rope)
    writer.add_key_length_mla(still + rope)
    writer.add_value_length_mla(value)
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_token"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_shared_count(c["num_shared_experts"])
    writer.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(c["routed_scaling_factor"])


def kimi_name(names: gguf.TensorNameMap, name: str) -> str:
    name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert translated is not None, name
    return translated


def as_published(tensors: dict[str, np.ndarray], c: dict[str, Any]) -> dict[str, np.ndarray]:
    """With convolutions of their own for q, k and v, of four axes, and -exp(A_log), or exp(A_log) in Ling."""
    published, ling = {}, c["model_type"] == "bailing_hybrid"
    for name, data in tensors.items():
        name = name.replace(".self_attn.forget_gate.", ".self_attn.")
        for theirs, ours in LING_NAMES.items() if ling else ():
            name = name.replace(theirs, ours)
        name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
        if name.endswith("self_attn.conv1d.weight"):
            for part, rows in zip("qkv", np.split(data, 3), strict=True):
                published[name.replace("conv1d", f"{part}_conv1d")] = rows.reshape(1, len(rows), 1, -1)
        elif name.endswith("_conv1d.weight"):
            published[name] = data.reshape(1, len(data), 1, -1)
        elif name.endswith("A_log"):
            published[name] = np.exp(data.reshape(-1, 1)) if ling else -np.exp(data.reshape(1, 1, -1, 1))
        else:
            published[name] = data
    return published
