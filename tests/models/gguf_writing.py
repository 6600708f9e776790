"""A checkpoint of transformers as llama.cpp's converter would write it, in F32.

Names of tensors are those of the `gguf` package; what the converter does to the numbers is written down here."""

import json
import re
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import gguf.quants
import numpy as np
from safetensors.numpy import load_file

from weights.gguf_files import finish, interleave

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "MistralForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "NemotronForCausalLM": gguf.MODEL_ARCH.NEMOTRON,
    "HunYuanDenseV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "Dots1ForCausalLM": gguf.MODEL_ARCH.DOTS1,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "PhimoeForCausalLM": gguf.MODEL_ARCH.PHIMOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GlmForCausalLM": gguf.MODEL_ARCH.CHATGLM,
    "Jais2ForCausalLM": gguf.MODEL_ARCH.JAIS2,
    "ApertusForCausalLM": gguf.MODEL_ARCH.APERTUS,
    "SolarOpenForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "GraniteMoeSharedForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE,
    "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "Llama4ForCausalLM": gguf.MODEL_ARCH.LLAMA4,
    "Gemma3nForCausalLM": gguf.MODEL_ARCH.GEMMA3N,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "MiMoV2FlashForCausalLM": gguf.MODEL_ARCH.MIMO2,
}
PAIRWISE = ("Llama", "Mixtral", "Granite", "SmolLM3", "Mistral", "Ministral3", "Arcee")  # families
SHIFTED = ("GemmaF", "Gemma2", "Gemma3F", "Nemotron")  # families whose norms are stored less 1
SIGMOID = ("glm4_moe", "solar_open", "dots1", "minimax_m2", "lfm2_moe")  # of scores, types of models
SPECIAL = {  # names that the converter translates itself
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mlp.expert_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
    "shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
    "shared_mlp.down_proj.weight": "ffn_down_shexp.weight",
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.(.*)\.experts\.(\d+)\.(\w+)\.weight")


def write_gguf(
    source: Path,
    path: Path,
    experts: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    called: str | None = None,
    instead: Mapping[str, Any] | None = None,
    fuse_qkv: bool = False,
) -> Path:
    """`experts`: how stacks of them are stored; `called`: the architecture, where it is not that of the checkpoint;
    `instead`: values of its configuration; `fuse_qkv`: as ChatGLM has them"""
    config = json.loads((source / "config.json").read_text()) | dict(instead or {})
    architecture = config["architectures"][0]
    arch = ARCHITECTURES[architecture]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, called or gguf.MODEL_ARCH_NAMES[arch])
    add_metadata(writer, config)
    rope = config["rope_parameters"]
    if "long_factor" in rope:
        writer.add_rope_scaling_attn_factors(
            np.sqrt(1 + np.log(config["max_position_embeddings"] / rope["original_max_position_embeddings"])
                    / np.log(rope["original_max_position_embeddings"]))
        )  # fmt: skip
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    pairwise = (
        architecture.startswith(PAIRWISE)
        and called not in ("exaone", "paddleocr")
        and architecture != "Llama4ForCausalLM"
    )
    tensors = load_file(source / "model.safetensors")
    if curves := {name: data.item() for name, data in tensors.items() if ".act_fn." in name}:  # Apertus
        for part, add in (
            ("alpha_p", writer.add_xielu_alpha_p),
            ("alpha_n", writer.add_xielu_alpha_n),
            ("beta", writer.add_xielu_beta),
            ("eps", writer.add_xielu_eps),
        ):
            add([curves[f"model.layers.{i}.mlp.act_fn.{part}"] for i in range(config["num_hidden_layers"])])
    if fuse_qkv:
        for kind in ("weight", "bias"):
            for stem in [f"model.layers.{i}.self_attn." for i in range(config["num_hidden_layers"])]:
                parts = [tensors.pop(f"{stem}{part}_proj.{kind}") for part in "qkv"]
                tensors[f"{stem}qkv_proj.{kind}"] = np.concatenate(parts)
    if architecture.startswith(("Gemma3n", "Gemma4")):
        tensors = as_gemma(tensors, config, writer)
    for name, data in stacked(
        {name: data for name, data in tensors.items() if name not in curves}, config["model_type"]
    ):
        if pairwise and ".q_proj." in name:
            data = interleave(data, config["num_attention_heads"])
        if pairwise and ".k_proj." in name:
            data = interleave(data, config["num_key_value_heads"])
        if architecture.startswith(SHIFTED) and name.endswith("norm.weight"):
            data = data + 1
        if name.endswith("shared_expert_gate.weight"):
            data = data.reshape(-1)  # as a quantized file has it
        if name.endswith(".conv.conv.weight"):
            data = data[:, 0]
        kind = experts if data.ndim == 3 else gguf.GGMLQuantizationType.F32
        if special := SPECIAL.get(name.rpartition("layers.")[2].partition(".")[2]):
            writer.add_tensor(f"blk.{name.split('.')[2]}.{special}", np.ascontiguousarray(data))
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    return finish(writer, path)


def as_gemma(tensors: dict[str, np.ndarray], config: dict[str, Any], writer: gguf.GGUFWriter) -> dict[str, np.ndarray]:
    """Streams in one tensor, tables of all tokens, and the layers that only Gemma 4 has."""
    tensors = dict(tensors)
    if config["model_type"] == "gemma4_text":
        rope = config["rope_parameters"]["full_attention"]
        pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        rotated = int(pairs * rope["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32))
    for stem in ("model.altup_projections", "model.altup_unembed_projections"):
        if f"{stem}.0.weight" in tensors:
            tensors[f"{stem}.weight"] = np.stack([tensors.pop(f"{stem}.{i}.weight") for i in range(3)])
    table = "model.embed_tokens_per_layer.weight"
    if table in tensors:
        missing = config["vocab_size"] - len(tensors[table])
        tensors[table] = np.concatenate([tensors[table], np.repeat(tensors[table][:1], missing, 0)])
    return tensors


def nextn_name(name: str) -> str | None:
    """GGUF's name of what only a layer that predicts further tokens has."""
    parts = r"eh_proj|embed_tokens|enorm|hnorm|shared_head\.head|shared_head\.norm"
    if (match := re.fullmatch(rf"model\.layers\.(\d+)\.({parts})\.weight", name)) is None:
        return None
    kind = gguf.MODEL_TENSOR[f"NEXTN_{match[2].replace('.', '_').upper()}"]
    return f"{gguf.TENSOR_NAMES[kind].format(bid=match[1])}.weight"


def stacked(tensors: dict[str, np.ndarray], model_type: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, those of experts one above the other."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, data in tensors.items():
        if match := EXPERT.fullmatch(name):
            layer, block, expert, part = match.groups()
            whole = f"layers.{layer}.feed_forward.experts.{part}.weight"
            whole = (
                whole
                if block in ("block_sparse_moe", "feed_forward")
                else f"model.layers.{layer}.{block}.experts.{part}.weight"
            )
            experts.setdefault(whole, {})[int(expert)] = data
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            stem = name.removeprefix("model.").replace("block_sparse_moe.input_linear", "feed_forward.experts.{}")
            for part, half in zip(("w1", "w3"), np.split(data, 2, axis=1), strict=True):
                yield stem.format(part), half
        elif name.endswith("shared_mlp.input_linear.weight"):  # Granite 4 without experts, or beside them
            stem = "shared_mlp" if model_type == "granitemoeshared" else "mlp"
            for part, half in zip(("gate", "up"), np.split(data, 2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{stem}.{part}_proj"), half
        elif name.endswith("shared_mlp.output_linear.weight"):
            stem = "shared_mlp" if model_type == "granitemoeshared" else "mlp"
            yield name.replace("shared_mlp.output_linear", f"{stem}.down_proj"), data
        elif model_type == "gemma4_text" and ".experts." in name:
            yield name, data
        elif model_type == "mistral4" and name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        elif model_type == "mistral4" and name.endswith("experts.down_proj"):
            yield f"{name}.weight", data
        elif model_type == "llama4_text" and name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(data.swapaxes(1, 2), 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        elif name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            outputs_last = data if name.endswith("bias") else data.swapaxes(1, 2)
            for part, offset in (("gate", 0), ("up", 1)):
                kind = "bias" if name.endswith("bias") else "weight"
                stem = name.removesuffix("_bias").removesuffix("gate_up_proj")
                yield f"{stem}{part}_proj.{kind}", outputs_last[:, offset::2]
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", data.swapaxes(1, 2)
        elif name.endswith(("experts.down_proj_bias", "self_attn.sinks")):
            yield name.replace("down_proj_bias", "down_proj.bias").replace("sinks", "sinks.weight"), data
        else:
            yield name, data
    for name, by_expert in experts.items():
        yield name, np.stack([by_expert[expert] for expert in sorted(by_expert)])


def newer_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Writes what families of 2025 and 2026 have of their own -> the configuration, of which the rest is written."""
    kind, config = config["model_type"], dict(config)
    windows = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    if kind in ("gemma3n_text", "gemma4_text", "mimo_v2_flash", "exaone_moe"):
        writer.add_sliding_window_pattern(windows)
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        config["moe_intermediate_size"] = config["intermediate_size"]
        config["intermediate_size"] = config["intermediate_size_mlp"]
    if kind in ("afmoe", "exaone_moe"):
        writer.add_expert_shared_count(config["num_shared_experts"])
        config["routed_scaling_factor"] = config.get("route_scale") or config["routed_scaling_factor"]
    if kind == "exaone_moe":
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
        config.pop("first_k_dense_replace", None)
    if kind == "hunyuan_v1_moe":
        writer.add_expert_used_count(config.pop("moe_topk")[0])
        config.pop("num_experts_per_tok", None)
    if kind in ("gemma3n_text", "gemma4_text"):
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if kind == "gemma3n_text":
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_altup_active_idx(0)
        shares = config["activation_sparsity_pattern"]
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -inf for share in shares])
        config["intermediate_size"] = config["intermediate_size"][0]
    if kind == "gemma4_text":
        writer.add_key_length_swa(config["head_dim"])
        writer.add_value_length_swa(config["head_dim"])
        whole = next(iter(config["per_layer_config"].values()))
        config["head_dim"] = whole["head_dim"]
        if "num_key_value_heads" in whole:
            few, many = whole["num_key_value_heads"], config["num_key_value_heads"]
            config["num_key_value_heads"] = [many if local else few for local in windows]
        if config["use_double_wide_mlp"]:
            alone, size = config["num_hidden_layers"] - config["num_kv_shared_layers"], config["intermediate_size"]
            config["intermediate_size"] = [size * (1 + (i >= alone)) for i in range(config["num_hidden_layers"])]
        config["num_experts_per_tok"] = config.get("top_k_experts")
        config.pop("final_logit_softcapping") if config.get("final_logit_softcapping") is None else None
    if kind == "mimo_v2_flash":
        few = config["num_key_value_heads"]
        config["num_key_value_heads"] = [2 * few if local else few for local in windows]
        writer.add_value_length(config["v_head_dim"])
        writer.add_key_length(config.pop("head_dim"))
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_leading_dense_block_count(1)
    return config


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    config = newer_metadata(writer, config)
    if config["model_type"] == "glm4_moe":  # with a layer behind the last, for guessing further tokens
        config = config | {"num_hidden_layers": config["num_hidden_layers"] + 1}
        writer.add_nextn_predict_layers(1)
        writer.add_tensor(f"blk.{config['num_hidden_layers'] - 1}.nextn.eh_proj.weight", np.zeros((2, 4), np.float32))
    if config["model_type"] in SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if config["model_type"].startswith("lfm2"):
        kinds = config["layer_types"]
        config = config | {"rms_norm_eps": config["norm_eps"]}
        config["num_key_value_heads"] = [config["num_key_value_heads"] * (kind != "conv") for kind in kinds]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config["model_type"] in ("nemotron", "jais2"):
        writer.add_layer_norm_eps(config["norm_eps" if config["model_type"] == "nemotron" else "layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if full["rope_type"] == "dynamic":  # HunYuan, whose stretch goes into the base
        width = config["head_dim"]
        full = full | {"rope_theta": full["rope_theta"] * full["alpha"] ** (width / (width - 2))}
    writer.add_rope_freq_base(full["rope_theta"])
    if "llama_4_scaling_beta" in full:
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if "beta_fast" in full:
        writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    if config["model_type"] in ("olmo3", "exaone4") and config["sliding_window"]:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    optional = {
        "head_dim": (writer.add_key_length, writer.add_value_length),
        "sliding_window": (writer.add_sliding_window,),
        "num_local_experts": (writer.add_expert_count,),
        "num_experts": (writer.add_expert_count,),
        "num_experts_per_tok": (writer.add_expert_used_count,),
        "moe_intermediate_size": (writer.add_expert_feed_forward_length,),
        "shared_expert_intermediate_size": (writer.add_expert_shared_feed_forward_length,),
        "n_routed_experts": (writer.add_expert_count,),
        "n_shared_experts": (writer.add_expert_shared_count,),
        "norm_topk_prob": (writer.add_expert_weights_norm,),
        "routed_scaling_factor": (writer.add_expert_weights_scale,),
        "first_k_dense_replace": (writer.add_leading_dense_block_count,),
        "n_group": (writer.add_expert_group_count,),
        "topk_group": (writer.add_expert_group_used_count,),
        "moe_num_experts": (writer.add_expert_count,),
        "moe_k": (writer.add_expert_used_count,),
        "moe_num_shared_experts": (writer.add_expert_shared_count,),
        "moe_layer_interval": (writer.add_interleave_moe_layer_step,),
        "moe_layer_start_index": (writer.add_leading_dense_block_count,),
        "num_dense_layers": (writer.add_leading_dense_block_count,),
        "shared_intermediate_size": (writer.add_expert_shared_feed_forward_length,),
        "attn_logit_softcapping": (writer.add_attn_logit_softcapping,),
        "final_logit_softcapping": (writer.add_final_logit_softcapping,),
        "attention_multiplier": (writer.add_attention_scale,),
        "embedding_multiplier": (writer.add_embedding_scale,),
        "residual_multiplier": (writer.add_residual_scale,),
        "logits_scaling": (writer.add_logit_scale,),
    }
    for key, adders in optional.items():
        for add in adders:
            if config.get(key) is not None:
                add(config[key])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
