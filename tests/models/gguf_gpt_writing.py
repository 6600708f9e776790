"""Checkpoints of the families with layer norms, as llama.cpp's converter writes them, in F32.

Names of tensors are those of the `gguf` package; keys, and what the converter does to rows, are written down here."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from weights.gguf_files import finish, interleave

ARCHITECTURES = {
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "GPTBigCodeForCausalLM": gguf.MODEL_ARCH.STARCODER,
    "GPTJForCausalLM": gguf.MODEL_ARCH.GPTJ,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX,
    "BloomForCausalLM": gguf.MODEL_ARCH.BLOOM,
    "FalconForCausalLM": gguf.MODEL_ARCH.FALCON,
    "MptForCausalLM": gguf.MODEL_ARCH.MPT,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
    "PhiForCausalLM": gguf.MODEL_ARCH.PHI2,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "OlmoForCausalLM": gguf.MODEL_ARCH.OLMO,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
}
GROUPED = ("Starcoder2", "StableLm", "Olmo", "Phi", "Cohere")  # families that say how many key heads there are
# What different configurations call the same number.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
INNER = ("ffn_hidden_size", "intermediate_size")
EPS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
# Those whose MLP has four times as many columns, and no word for it in the configuration.
FOUR_TIMES = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "MptForCausalLM", "BloomForCausalLM")

Tensors = Iterator[tuple[str, np.ndarray]]


def write_gguf(source: Path, path: Path, fuse_qkv: bool = False, instead: dict[str, float] | None = None) -> Path:
    """`fuse_qkv` as the first converter did for Phi-2; `instead`: metadata to be put in place of ours."""
    config = json.loads((source / "config.json").read_text())
    architecture = config["architectures"][0]
    arch = ARCHITECTURES[architecture]
    names = gguf.get_tensor_name_map(arch, first(config, LAYERS))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_sizes(writer, config)
    for key, value in (instead or {}).items():
        writer.kv_data[0].pop(key, None)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, data in CHANGES.get(architecture, unchanged)(load_file(source / "model.safetensors"), config, fuse_qkv):
        translated = names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        translated = translated or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, np.ascontiguousarray(data))
    return finish(writer, path)


def first(config: dict[str, Any], keys: tuple[str, ...], default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    architecture, hidden, heads = config["architectures"][0], first(config, HIDDEN), first(config, HEADS)
    writer.add_block_count(first(config, LAYERS))
    writer.add_context_length(first(config, LENGTH, 64))
    writer.add_embedding_length(hidden)
    inner = 4 * hidden if architecture in FOUR_TIMES else first(config, INNER)
    writer.add_feed_forward_length(config.get("n_inner") or inner)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(first(config, EPS, 1e-5))
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor")
    if part is not None or "rotary_dim" in config:
        writer.add_rope_dimension_count(config.get("rotary_dim") or int(part * (hidden // heads)))
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(architecture == "StableLmForCausalLM" or config["use_parallel_residual"])
    if architecture.startswith(GROUPED):
        writer.add_head_count_kv(config["num_key_value_heads"])
    if architecture == "FalconForCausalLM":
        writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)
    if architecture == "GPTBigCodeForCausalLM":
        writer.add_head_count_kv(1)
    if architecture.startswith("Cohere"):
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_logit_scale(config["logit_scale"])
    if architecture == "Cohere2ForCausalLM":
        writer.add_sliding_window(config["sliding_window"])
    attention = config.get("attn_config") or config
    if attention.get("clip_qkv") is not None:
        writer.add_clamp_kqv(attention["clip_qkv"])
    if "alibi_bias_max" in attention:
        writer.add_max_alibi_bias(attention["alibi_bias_max"])


def unchanged(tensors: dict[str, np.ndarray], config: dict[str, Any], fuse_qkv: bool) -> Tensors:
    yield from tensors.items()


def inputs_last(tensors: dict[str, np.ndarray], config: dict[str, Any], fuse_qkv: bool) -> Tensors:
    for name, data in tensors.items():
        yield name, data.T if data.ndim == 2 and (".c_" in name) else data


def groups_apart(tensors: dict[str, np.ndarray], config: dict[str, Any], fuse_qkv: bool) -> Tensors:
    """For each group: its queries, a key, a value. All queries come first now, then keys, then values."""
    heads = first(config, HEADS)
    groups = heads
    if config["architectures"] == ["FalconForCausalLM"]:
        groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    for name, data in tensors.items():
        if "query_key_value" in name:
            grouped = data.reshape(groups, heads // groups + 2, -1, *data.shape[1:])
            parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
            data = np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])
        yield name, data


def pairs_side_by_side(tensors: dict[str, np.ndarray], config: dict[str, Any], fuse_qkv: bool) -> Tensors:
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, data in tensors.items():
        heads = counts.get(name.split(".")[-2])
        yield name, interleave(data, heads) if heads else data


def norms_stacked(tensors: dict[str, np.ndarray], config: dict[str, Any], fuse_qkv: bool) -> Tensors:
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, data in tensors.items():
        stack, found, number = name.removesuffix(".weight").partition(".norms.")
        if found:
            stacks.setdefault(f"{stack}.weight", {})[int(number)] = data
        else:
            yield name, data
    for name, norms in stacks.items():
        yield name, np.stack([norms[number] for number in sorted(norms)])


def maybe_fused(tensors: dict[str, np.ndarray], config: dict[str, Any], fuse_qkv: bool) -> Tensors:
    for name, data in tensors.items():
        if fuse_qkv and ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{x}_proj")] for x in ("q", "k", "v")]
            yield name.replace("q_proj", "query_key_value"), np.concatenate(parts)
        elif not fuse_qkv or (".k_proj." not in name and ".v_proj." not in name):
            yield name, data


CHANGES: dict[str, Callable[[dict[str, np.ndarray], dict[str, Any], bool], Tensors]] = {
    "GPT2LMHeadModel": inputs_last,
    "GPTNeoXForCausalLM": groups_apart,
    "BloomForCausalLM": groups_apart,
    "FalconForCausalLM": groups_apart,
    "OlmoForCausalLM": pairs_side_by_side,
    "StableLmForCausalLM": norms_stacked,
    "PhiForCausalLM": maybe_fused,
}
