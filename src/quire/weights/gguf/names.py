"""GGUF's names and keys -> Hugging Face's, one row an architecture, so that model files know one set of names.

A row has the Hugging Face architecture, the config keys with their GGUF keys, and the tensors. To read another GGUF
architecture, add its row to one of the files that ARCHITECTURES is made of. A dot in a config key leads into a nested
object."""

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

from quire.core.errors import Unsupported
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.common_names import COMMON_ARCHITECTURES
from quire.weights.gguf.deepseek_names import DEEPSEEK_ARCHITECTURES
from quire.weights.gguf.delta_names import DELTA_ARCHITECTURES
from quire.weights.gguf.encoder_names import ENCODER_ARCHITECTURES
from quire.weights.gguf.gpt_names import GPT_ARCHITECTURES
from quire.weights.gguf.latest_names import LATEST_ARCHITECTURES
from quire.weights.gguf.llama_like_names import LLAMA_LIKE_ARCHITECTURES
from quire.weights.gguf.mamba_names import MAMBA_ARCHITECTURES
from quire.weights.gguf.missing import MISSING_GGUF
from quire.weights.gguf.newer_names import NEWER_ARCHITECTURES
from quire.weights.gguf.older_names import OLDER_ARCHITECTURES
from quire.weights.gguf.rwkv_names import RWKV_ARCHITECTURES
from quire.weights.gguf.t5_names import T5_ARCHITECTURES

# Tensors that are lists in `rope_scaling` of Hugging Face.
LONGROPE_TENSORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    **COMMON_ARCHITECTURES,
    **LLAMA_LIKE_ARCHITECTURES,
    **NEWER_ARCHITECTURES,
    **LATEST_ARCHITECTURES,
    **GPT_ARCHITECTURES,
    **DEEPSEEK_ARCHITECTURES,
    **OLDER_ARCHITECTURES,
    **DELTA_ARCHITECTURES,
    **MAMBA_ARCHITECTURES,
    **RWKV_ARCHITECTURES,
    **ENCODER_ARCHITECTURES,
    **T5_ARCHITECTURES,
}

_LAYER_TENSOR = re.compile(r"(?:(enc|dec)\.)?blk\.(\d+)\.([\w.]+?)(\.weight|\.bias)?")
_SCALE = re.compile(r"blk\.(\d+)\.([\w.]+\.scale)")
# Ends of Hugging Face's names that have no ".weight" after them.
_WHOLE_NAMES = (
    *("_bias", ".sinks", ".correct_output_scale", ".layer_scalar"),
    *(".experts.gate_up_proj", ".experts.down_proj"),
    *(".weight", ".bias", ".x_x", ".x_k", ".k_k", ".k_a", ".r_k"),
)


@dataclass(frozen=True, slots=True)
class TensorName:
    name: str  # Hugging Face's, with {} for the number of an expert
    heads_key: str | None = None  # where rows are interleaved by head: the config key that counts the heads
    offset: float = 0.0  # that the converter added
    one_row: bool = False  # of shape [1, size], which some writers store as [size]
    expert: int | None = None  # its index in a stack of all experts


def find_architecture(metadata: CheckpointConfig) -> GGUFArchitecture:
    name = metadata.str("general.architecture")
    experts = metadata.int(f"{name}.expert_count", default=0)
    row = (ARCHITECTURES.get(f"{name} with experts") if experts else None) or ARCHITECTURES.get(name)
    if row is None:
        what = f", which is not read; what is missing: {MISSING_GGUF[name]}" if name in MISSING_GGUF else ""
        raise Unsupported(
            f"{metadata.source} is of the architecture {name!r}{what}", f"supported in GGUF: {', '.join(ARCHITECTURES)}"
        )
    if experts and "num_local_experts" not in row.keys:
        raise Unsupported(f"{metadata.source}: {name}.expert_count is {experts}", f"{name} is read without experts")
    for key, value in row.expects.items():
        metadata.expect(f"{name}.{key}", value, None)
    if row.mtp_tensors:
        further = metadata.int(f"{name}.nextn_predict_layers", default=0)
        row = replace(row, num_layers=metadata.int(f"{name}.block_count") - further)
    return row


def translate_name(row: GGUFArchitecture, name: str) -> TensorName | None:
    """None for a name that the row does not have."""
    if name in row.tensors:
        return TensorName(row.tensors[name], offset=row.norm_offset if name == "output_norm.weight" else 0.0)
    if (scale := _SCALE.fullmatch(name)) and scale[2] in row.layer_tensors:
        return TensorName(f"{row.layers}.{scale[1]}.{row.layer_tensors[scale[2]]}")
    if (match := _LAYER_TENSOR.fullmatch(name)) is None:
        return None
    side, layer, part = match[1], match[2], match[3] if match[1] is None else f"{match[1]}.{match[3]}"
    if part not in row.layer_tensors or (side and side not in row.sides):
        return None
    kind = match[4] or (".weight" if part.endswith("_norm") else "")  # which files of Falcon-H1 and PLaMo 3 leave out
    translated = row.layer_tensors[part]
    return TensorName(
        _layer_tensor(row, side, int(layer), part) + ("" if f".{translated}".endswith(_WHOLE_NAMES) else kind),
        row.interleaved.get(part),
        row.norm_offsets.get(part, row.norm_offset)
        if part.endswith("norm") and part != "ssm_norm" and kind == ".weight"
        else 0.0,
        part == "ffn_gate_inp_shexp" or translated in row.one_row,
    )


def _layer_tensor(row: GGUFArchitecture, side: str | None, layer: int, part: str) -> str:
    if row.mtp_tensors and row.num_layers is not None and layer >= row.num_layers:
        return row.mtp_tensors.get(part, f"mtp.layers.{layer - row.num_layers}.{row.layer_tensors[part]}")
    return f"{row.sides[side] if side else row.layers}.{layer}.{row.layer_tensors[part]}"


def translate_config(row: GGUFArchitecture, metadata: CheckpointConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the file's metadata. `tensors`: by name."""
    prefix = metadata.str("general.architecture")
    values: dict[str, Any] = {"architectures": [row.name], "sliding_window": None}  # no key means no window
    given = {key: metadata.get(f"{prefix}.{gguf_key}", metadata.get(gguf_key)) for key, gguf_key in row.keys.items()}
    for key, value in (*row.constants.items(), *given.items()):
        if value is not None:
            outer, _, inner = key.rpartition(".")
            (values.setdefault(outer, {}) if outer else values)[inner] = value
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    _add_head_dims(values, metadata, prefix)
    if scaling := _rope_scaling(metadata, prefix):
        values["rope_scaling"] = scaling
    parts = {re.sub(r"^blk\.\d+\.", "", name) for name in tensors} if row.biases else set()
    values |= {key: f"{part}.bias" in parts for key, part in row.biases.items()}
    for key, part in row.layers_with.items():
        values[key] = [layer for layer in range(metadata.int(f"{prefix}.block_count")) if _has(tensors, layer, part)]
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    values["eos_token_id"] = end_ids(metadata)
    return values | dict(row.derive(CheckpointConfig(metadata.source, values)) if row.derive else {})


def _has(tensors: Mapping[str, Any], layer: int, part: str) -> bool:
    side = part[:4] if part.startswith(("enc.", "dec.")) else ""
    return f"{side}blk.{layer}.{part.removeprefix(side)}.weight" in tensors


def end_ids(metadata: CheckpointConfig) -> list[int]:
    """The end tokens of the metadata: of a text, a turn or a message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(metadata.int(key) for key in keys if key in metadata))


def _add_head_dims(values: dict[str, Any], metadata: CheckpointConfig, prefix: str) -> None:
    """head_dim, which may differ from hidden_size / heads, and rotary_dim."""
    if f"{prefix}.attention.kv_lora_rank" in metadata:
        return  # MLA: deepseek_names.py derives the sizes
    heads = metadata.get(f"{prefix}.attention.head_count")
    heads = max(heads, default=0) if isinstance(heads, array) else metadata.int(f"{prefix}.attention.head_count")
    head_dim = metadata.int(
        f"{prefix}.attention.key_length", metadata.int(f"{prefix}.embedding_length") // max(heads, 1)
    )
    values["head_dim"] = head_dim
    value_dim = metadata.int(f"{prefix}.attention.value_length", default=head_dim)
    if value_dim != head_dim and "v_head_dim" not in values:
        raise Unsupported(f"{metadata.source}: the heads have keys of {head_dim} and values of {value_dim} columns")
    values["rotary_dim"] = metadata.int(f"{prefix}.rope.dimension_count", default=head_dim)


def _rope_scaling(metadata: CheckpointConfig, prefix: str) -> dict[str, Any] | None:
    def number(name: str) -> float | None:
        key = f"{prefix}.rope.scaling.{name}"
        return metadata.float(key) if key in metadata else None

    kind = metadata.str(f"{prefix}.rope.scaling.type", default="none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": number("factor")}
    scaling["original_max_position_embeddings"] = metadata.get(f"{prefix}.rope.scaling.original_context_length")
    if kind == "yarn":
        scaling["beta_fast"] = number("yarn_beta_fast")
        scaling["beta_slow"] = number("yarn_beta_slow")
        attention_factor = number("yarn_attn_factor") or number("attn_factor")
        if attention_factor is not None and scaling["factor"] is not None:
            # GGUF's factor multiplies YaRN's own attention factor; Hugging Face's replaces it.
            scaling["attention_factor"] = attention_factor * (1.0 + 0.1 * log(max(scaling["factor"], 1.0)))
    return {key: value for key, value in scaling.items() if value is not None}


def longrope(metadata: CheckpointConfig, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """The `rope_scaling` of a file that has factors for each frequency as tensors."""
    architecture = metadata.str("general.architecture")
    prefix = f"{architecture}.rope.scaling."
    original = metadata.get(f"{prefix}original_context_length", metadata.get(f"{architecture}.context_length"))
    scaling = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": metadata.get(f"{prefix}attn_factor"),
        **factors,
    }
    return {key: value for key, value in scaling.items() if value is not None}
