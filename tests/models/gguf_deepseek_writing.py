"""A DeepSeek of transformers as llama.cpp's converter would write it."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.gguf_writing import nextn_name, stacked
from weights.gguf_files import finish


def write_deepseek_gguf(source: Path, path: Path, apart: bool) -> Path:
    """As llama.cpp's converter writes it since April 2025 (`apart`), or before."""
    c = json.loads((source / "config.json").read_text())
    if c["architectures"] == ["YoutuForCausalLM"]:  # has no experts, and the converter says so
        c |= {"n_routed_experts": None, "n_shared_experts": 0, "first_k_dense_replace": c["num_hidden_layers"]}
        c |= {"moe_intermediate_size": c["intermediate_size"]}
        c |= dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"))
    latent, still, turning, value = (
        c[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    others = {"GlmMoeDsaForCausalLM": gguf.MODEL_ARCH.GLM_DSA, "Mistral4ForCausalLM": gguf.MODEL_ARCH.MISTRAL4}
    arch = others.get(c["architectures"][0], gguf.MODEL_ARCH.DEEPSEEK2)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    if "index_topk" in c:
        writer.add_indexer_top_k(c["index_topk"])
        writer.add_indexer_head_count(c["index_n_heads"])
        writer.add_indexer_key_length(c["index_head_dim"])
    if beta := c["rope_parameters"].get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
    for add, key in (
        (writer.add_block_count, "num_hidden_layers"),
        (writer.add_context_length, "max_position_embeddings"),
        (writer.add_embedding_length, "hidden_size"),
        (writer.add_feed_forward_length, "intermediate_size"),
        (writer.add_head_count, "num_attention_heads"),
        (writer.add_layer_norm_rms_eps, "rms_norm_eps"),
        (writer.add_q_lora_rank, "q_lora_rank"),
        (writer.add_kv_lora_rank, "kv_lora_rank"),
        (writer.add_rope_dimension_count, "qk_rope_head_dim"),
        (writer.add_leading_dense_block_count, "first_k_dense_replace"),
        (writer.add_expert_count, "n_routed_experts"),
        (writer.add_expert_used_count, "num_experts_per_tok"),
        (writer.add_expert_feed_forward_length, "moe_intermediate_size"),
        (writer.add_expert_shared_count, "n_shared_experts"),
        (writer.add_expert_weights_scale, "routed_scaling_factor"),
        (writer.add_expert_weights_norm, "norm_topk_prob"),
        (writer.add_expert_group_count, "n_group"),
        (writer.add_expert_group_used_count, "topk_group"),
    ):
        if c.get(key) is not None:
            add(c[key])
    rope = c["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    tensors, layers = load_file(source / "model.safetensors"), c["num_hidden_layers"]
    if "mlp_layer_types" in c:  # GLM-4.7-Flash, with a layer behind the last, for guessing further tokens
        tensors[f"model.layers.{layers}.eh_proj.weight"] = np.zeros((2, 4), np.float32)
        writer.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
    if f"model.layers.{layers}.eh_proj.weight" in tensors:
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
    if c["architectures"] == ["DeepseekV3ForCausalLM"]:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_head_count_kv(1 if apart else c["num_attention_heads"])
    writer.add_key_length(latent + turning if apart else still + turning)
    writer.add_value_length(latent if apart else value)
    if apart:
        writer.add_key_length_mla(still + turning)
        writer.add_value_length_mla(value)
    names = gguf.get_tensor_name_map(arch, layers + 1)
    for name, data in stacked(tensors, c["model_type"]):
        parts = {name.replace("e_score_correction_bias", "e_score_correction.bias"): data}
        if apart and "kv_b_proj" in name:
            k, v = np.split(data.reshape(-1, still + value, latent), [still], axis=1)
            parts = {name.replace("kv_b_proj", "k_b_proj"): k.swapaxes(1, 2), name.replace("kv_b_proj", "v_b_proj"): v}
        for part, numbers in parts.items():
            translated = nextn_name(part) or names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert translated is not None, part
            writer.add_tensor(translated, np.ascontiguousarray(numbers))
    return finish(writer, path)
