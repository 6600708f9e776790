"""What GGUF calls things, in Hugging Face's words: one row an architecture, so that a model file sees one view.

A row names the Hugging Face architecture, the config keys with their GGUF twins, and the tensors. To read another GGUF
architecture, add its row to ARCHITECTURES."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

from quire.core.errors import Unsupported
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # Hugging Face's
    keys: Mapping[str, str]  # config key -> GGUF key, which the file prefixes with its own architecture
    constants: Mapping[str, Any]  # config keys that GGUF leaves unsaid
    tensors: Mapping[str, str]  # GGUF name -> Hugging Face name
    layer_tensors: Mapping[str, str]  # GGUF name in "blk.3.NAME.weight" -> the one in "model.layers.3.NAME.weight"
    # Layer tensors whose rows the converter interleaved within each head, so that rotary pairs lie side by side:
    # GGUF name -> the config key that counts the heads.
    interleaved: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)  # config key -> layer tensor whose bias makes it true


DECODER_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}

# "rope_freqs" is not in Hugging Face's checkpoints: [rotary_dim / 2] divisors of the rotary frequencies, into which the
# converter has baked Llama 3's rope_scaling. Where a file has it, config has no rope_scaling.
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs",
}

GATED_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(  # Mistral and SmolLM, too
        name="LlamaForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "llama", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    ),
    "qwen2": Architecture(
        name="Qwen2ForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "qwen2", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
    ),
}

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class TensorName:
    name: str  # Hugging Face's
    heads_key: str | None = None  # where rows are interleaved: the config key that counts the heads


def find_architecture(metadata: CheckpointConfig) -> Architecture:
    name = metadata.str("general.architecture")
    if name not in ARCHITECTURES:
        raise Unsupported(
            f"{metadata.source} is of the architecture {name!r}", f"supported in GGUF: {', '.join(ARCHITECTURES)}"
        )
    if experts := metadata.int(f"{name}.expert_count", default=0):
        raise Unsupported(
            f"{metadata.source}: {name}.expert_count is {experts}", "mixtures of experts are not read yet"
        )
    if (parts := metadata.int("split.count", default=1)) > 1:
        raise Unsupported(
            f"{metadata.source} is one of {parts} parts of a split file", "join them with `gguf-split --merge`"
        )
    return ARCHITECTURES[name]


def translate_name(row: Architecture, name: str) -> TensorName | None:
    """None for a name that the row does not have."""
    if name in row.tensors:
        return TensorName(row.tensors[name])
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in row.layer_tensors:
        return None
    layer, part, kind = match.groups()
    return TensorName(f"model.layers.{layer}.{row.layer_tensors[part]}.{kind}", row.interleaved.get(part))


def translate_config(row: Architecture, metadata: CheckpointConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that the file's metadata amounts to. `tensors` are asked only whether they have a name."""
    prefix = metadata.str("general.architecture")
    values: dict[str, Any] = {"architectures": [row.name], **row.constants}
    for key, twin in row.keys.items():
        if (value := metadata.get(f"{prefix}.{twin}")) is not None:
            values[key] = value
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    _add_head_dims(values, metadata, prefix)
    if scaling := _rope_scaling(metadata, prefix):
        values["rope_scaling"] = scaling
    for key, part in row.biases.items():
        values[key] = f"blk.0.{part}.bias" in tensors
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    values["eos_token_id"] = end_ids(metadata)
    return values


def end_ids(metadata: CheckpointConfig) -> list[int]:
    """Tokens that the metadata says end a text, a turn or a message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(metadata.int(key) for key in keys if key in metadata))


def _add_head_dims(values: dict[str, Any], metadata: CheckpointConfig, prefix: str) -> None:
    """Heads may differ from hidden_size / heads, and the rotation may cover a part of them."""
    heads = metadata.int(f"{prefix}.attention.head_count")
    head_dim = metadata.int(
        f"{prefix}.attention.key_length", metadata.int(f"{prefix}.embedding_length") // max(heads, 1)
    )
    values["head_dim"] = head_dim
    value_dim = metadata.int(f"{prefix}.attention.value_length", default=head_dim)
    if value_dim != head_dim:
        raise Unsupported(f"{metadata.source}: the heads have keys of {head_dim} and values of {value_dim} numbers")
    rotary_dim = metadata.int(f"{prefix}.rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        values["partial_rotary_factor"] = rotary_dim / max(head_dim, 1)


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
        magnitude = number("yarn_attn_factor") or number("attn_factor")
        if magnitude is not None and scaling["factor"] is not None:
            # GGUF's multiplies the magnitude that follows from the factor; Hugging Face's replaces it.
            scaling["attention_factor"] = magnitude * (1.0 + 0.1 * log(max(scaling["factor"], 1.0)))
    return {key: value for key, value in scaling.items() if value is not None}
