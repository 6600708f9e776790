"""GGUF's names and keys -> Hugging Face's, one row an architecture, so that model files know one set of names.

A row has the Hugging Face architecture, the config keys with their GGUF keys, and the tensors. To read another GGUF
architecture, add its row to ARCHITECTURES. A dot in a config key leads into a nested object."""

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from quire.core.errors import Unsupported
from quire.weights.config import CheckpointConfig
from quire.weights.gguf import derived_config
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
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
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    GATED_LAYER,
    GEMMA_KEYS,
    GLM_KEYS,
    GRANITE_KEYS,
    HEAD_NORMS,
    INTERLEAVED_QK,
    MIXTRAL_EXPERTS,
    NEXTN,
    OUTER_TENSORS,
    PRE_AND_POST_NORMS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
)
from quire.weights.gguf.t5_names import T5_ARCHITECTURES

# Tensors that are lists in `rope_scaling` of Hugging Face.
LONGROPE_TENSORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}

# The rows of yes and no of the head.
QWEN3_RERANKER = GGUFVariant({"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "yes", "1": "no"}})
QWEN2 = GGUFArchitecture(
    name="Qwen2ForCausalLM",
    keys=DECODER_KEYS,
    constants={"model_type": "qwen2", "hidden_act": "silu"},
    tensors=OUTER_TENSORS,
    layer_tensors=GATED_LAYER,
)
QWEN3 = GGUFArchitecture(
    name="Qwen3ForCausalLM",
    keys=DECODER_KEYS,
    constants={"model_type": "qwen3", "hidden_act": "silu"},
    tensors={**OUTER_TENSORS, "cls.output.weight": "score.weight"},
    layer_tensors={**GATED_LAYER, **HEAD_NORMS},
    biases={"attention_bias": "attn_q"},
    variants={"cls.output": QWEN3_RERANKER},
)
QWEN3_MOE = GGUFArchitecture(
    name="Qwen3MoeForCausalLM",
    keys={**DECODER_KEYS, **EXPERT_KEYS},
    constants={"model_type": "qwen3_moe", "hidden_act": "silu", "norm_topk_prob": True},
    tensors=OUTER_TENSORS,
    layer_tensors={**GATED_LAYER, **HEAD_NORMS, **EXPERTS},
    biases={"attention_bias": "attn_q"},
)

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(  # and Mistral, SmolLM
        name="LlamaForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "llama", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    ),
    "llama with experts": GGUFArchitecture(
        name="MixtralForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS},
        constants={"model_type": "mixtral", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **MIXTRAL_EXPERTS},
        interleaved=INTERLEAVED_QK,
    ),
    "qwen2": QWEN2,
    "qwen2vl": QWEN2,  # its text
    "qwen3": QWEN3,
    "qwen3vl": QWEN3,  # its text
    "qwen2moe": GGUFArchitecture(
        name="Qwen2MoeForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS},
        constants={"model_type": "qwen2_moe", "hidden_act": "silu", "norm_topk_prob": False},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **EXPERTS, **SHARED_EXPERT},
    ),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,  # its text
    "olmo2": GGUFArchitecture(
        name="Olmo2ForCausalLM",
        keys={**DECODER_KEYS, "sliding_window_pattern": "attention.sliding_window_pattern"},
        constants={"hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **PRE_AND_POST_NORMS},
        biases={"attention_bias": "attn_q"},
        derive=derived_config.olmo,
    ),
    "glm4moe": GGUFArchitecture(  # and Solar Open
        name="Glm4MoeForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS, **GLM_KEYS},
        constants={"model_type": "glm4_moe", "hidden_act": "silu", "first_k_dense_replace": 0},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **GATED_LAYER,
            **HEAD_NORMS,
            **EXPERTS,
            **SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **{f"nextn.{part}": f"nextn.{part}" for part in NEXTN},
        },
        biases={"attention_bias": "attn_q"},
        expects={"expert_gating_func": 2},  # the sigmoid
        derive=derived_config.glm,
        variants={"attn_q_norm": GGUFVariant(constants={"use_qk_norm": True})},
    ),
    "exaone4": GGUFArchitecture(
        name="Exaone4ForCausalLM",
        keys={**DECODER_KEYS, "sliding_window_pattern": "attention.sliding_window_pattern"},
        constants={"model_type": "exaone4", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **PRE_AND_POST_NORMS},
        derive=derived_config.exaone,
    ),
    "internlm2": GGUFArchitecture(  # the converter splits q, k and v
        name="LlamaForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "llama", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q"},
    ),
    "glm4": GGUFArchitecture(
        name="Glm4ForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "glm4", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **GATED_LAYER,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        biases={"attention_bias": "attn_q"},
    ),
    "ernie4_5": GGUFArchitecture(
        name="Ernie4_5ForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "ernie4_5", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        biases={"use_bias": "attn_q"},
    ),
    "seed_oss": GGUFArchitecture(
        name="SeedOssForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "seed_oss", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, "post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"},
    ),
    "olmoe": GGUFArchitecture(
        name="OlmoeForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS},
        constants={"model_type": "olmoe", "hidden_act": "silu", "norm_topk_prob": False},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **EXPERTS},
        expects={"attention.clamp_kqv": None},
    ),
    "gpt-oss": GGUFArchitecture(
        name="GptOssForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS},
        constants={"model_type": "gpt_oss", "hidden_act": "silu", "attention_bias": True},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **GATED_LAYER,
            **EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        derive=derived_config.gpt_oss,
    ),
    "granite": GGUFArchitecture(
        name="GraniteForCausalLM",
        keys=GRANITE_KEYS,
        constants={"model_type": "granite", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        expects={"rope.scaling.finetuned": True},  # false stands for layers that do not rotate
    ),
    "granitemoe": GGUFArchitecture(
        name="GraniteMoeForCausalLM",
        keys={**GRANITE_KEYS, **EXPERT_KEYS},
        constants={"model_type": "granitemoe", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **GATED_LAYER,
            **MIXTRAL_EXPERTS,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q"},
        expects={"rope.scaling.finetuned": True},
        variants={"ffn_gate_shexp": GGUFVariant({"architectures": ["GraniteMoeSharedForCausalLM"]})},
    ),
    "smollm3": GGUFArchitecture(
        name="SmolLM3ForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "smollm3", "hidden_act": "silu", "no_rope_layer_interval": 4},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        interleaved=INTERLEAVED_QK,
    ),
    "phi3": GGUFArchitecture(
        name="Phi3ForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "phi3", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gemma": GGUFArchitecture(
        name="GemmaForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        norm_offset=1.0,
    ),
    "gemma2": GGUFArchitecture(
        name="Gemma2ForCausalLM",
        keys=GEMMA_KEYS,
        constants={"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **PRE_AND_POST_NORMS},
        norm_offset=1.0,
        derive=derived_config.gemma,
    ),
    "gemma3": GGUFArchitecture(
        name="Gemma3ForCausalLM",
        keys=GEMMA_KEYS,
        constants={"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **PRE_AND_POST_NORMS},
        norm_offset=1.0,
        derive=derived_config.gemma,
    ),
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
        f"{row.sides[side] if side else row.layers}.{layer}.{translated}"
        + ("" if f".{translated}".endswith(_WHOLE_NAMES) else kind),
        row.interleaved.get(part),
        row.norm_offsets.get(part, row.norm_offset)
        if part.endswith("_norm") and part != "ssm_norm" and kind == ".weight"
        else 0.0,
        part == "ffn_gate_inp_shexp" or translated in row.one_row,
    )


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
