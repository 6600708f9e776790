"""Gemma 1, 2 and 3 (text).

Llama with scaled embeddings, another activation, and norms stored less 1. From 2 on, what a layer adds is normed as
well, and most layers have a window; 2 caps scores and logits; 3 norms queries and keys, and turns them by another
angle in layers with a window."""

from dataclasses import dataclass
from math import sqrt

from quire.core.errors import BadCheckpoint
from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel, Vector, Wanted
from quire.models.rope import RopeSpec
from quire.models.text_part import text_part
from quire.ops.opset import Activation, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FIRST, SECOND, THIRD = "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"
WITH_IMAGES = "Gemma3ForConditionalGeneration"  # its text part is THIRD

UNSAID = {  # by configurations of Gemma 3
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    norms_after: bool  # of what attention and feed-forward add


def config(hf: CheckpointConfig) -> GemmaConfig:
    if hf.architecture == WITH_IMAGES:
        hf = hf.section("text_config").with_values({"architectures": [THIRD]})
    third = hf.architecture == THIRD
    if third:
        hf = hf.with_values({key: value for key, value in UNSAID.items() if key not in hf})
    for key in ("hidden_act", "hidden_activation"):  # the first releases said "gelu" and meant the approximation
        hf.expect(key, "gelu_pytorch_tanh", "gelu", None)
    hf.expect("use_bidirectional_attention", False, None)
    hf.expect("rope_local_scaling", None)
    if "layer_types" not in hf:
        hf = hf.with_values({"layer_types": _layer_types(hf)})
    numbers = llama.numbers(hf)
    rope, head_dim = numbers["rope"], numbers["head_dim"]
    local_theta = hf.float("rope_local_base_freq", 10_000.0)
    scored_as = head_dim if hf.architecture == FIRST else hf.float("query_pre_attn_scalar", head_dim)
    if scored_as <= 0:
        raise BadCheckpoint(f"query_pre_attn_scalar is {scored_as}")
    numbers |= {
        "embed_scale": sqrt(numbers["hidden"]),
        "score_scale": 1 / sqrt(scored_as),
        "score_cap": hf.float("attn_logit_softcapping", 0.0),
        "activation": Activation.GELU_TANH,
        "tied": hf.bool("tie_word_embeddings", True),
        "qk_norms": "heads" if third else "none",
        "norms_plus": 1.0,
    }
    return GemmaConfig(
        **numbers,
        norms_after=hf.architecture != FIRST,
        local_rope=RopeSpec("default", local_theta, head_dim, rope.max_position, {}) if third else None,
        logit_cap=hf.float("final_logit_softcapping", 0.0),
    )


def _layer_types(hf: CheckpointConfig) -> list[str]:
    """Every n-th layer sees all."""
    period = {FIRST: 1, SECOND: 2, THIRD: hf.int("sliding_window_pattern", 6)}[hf.architecture]
    if period < 1:
        raise BadCheckpoint(f"sliding_window_pattern is {period}")
    layers = range(1, hf.int("num_hidden_layers") + 1)
    return ["sliding_attention" if layer % period else "full_attention" for layer in layers]


def layer_names(c: GemmaConfig) -> Wanted:
    names = llama.layer_names(c)
    if not c.norms_after:
        return names
    norms = {
        "after1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "after2": "post_feedforward_layernorm",
    }
    return {**names, **{ours: Vector(name, c.hidden, plus=c.norms_plus) for ours, name in norms.items()}}


def load(ops: OpSet, checkpoint: Checkpoint, config: GemmaConfig, max_model_len: int) -> LoadedModel:
    return llama.load_as(ops, text_part(checkpoint), config, max_model_len, layer_names(config))
