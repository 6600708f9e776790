"""Llama, and the families that differ from it in a few numbers.

Mistral has a window, Qwen2 biases and windows in some layers, Qwen3 norms of every query and key head, HunYuan the same
after they have turned, SmolLM3 layers that do not rotate, ERNIE 4.5 and Helium rotary pairs side by side, Ministral 3
queries that grow with their position. Other families take its parts: granite.py, moe.py, glm.py, olmo2.py, ..."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Literal

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.config import ModelConfig
from quire.models.loading import (
    Affine,
    LayerNorm,
    LoadedModel,
    Matrix,
    TensorPart,
    TokenTable,
    Vector,
    Wanted,
    load_weights,
)
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.models.row_orders import pairs_apart
from quire.models.text_part import text_part
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

MINISTRAL_3 = "Ministral3ForCausalLM"
HUNYUAN = "HunYuanDenseV1ForCausalLM"
HELIUM = "HeliumForCausalLM"
PAIRWISE = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", HELIUM)
ROPE_FACTORS = "rope_freqs"  # in GGUF files only
UNUSED = r".*\.rotary_emb\.inv_freq"  # older exports stored what follows from the configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    intermediate: int
    eps: float  # of the norms
    rope: RopeSpec
    rotated: tuple[bool, ...]  # for each layer: whether queries and keys turn with their position
    local_rope: RopeSpec | None = None  # in layers with a window; None: as in the others
    pairwise: bool = False  # rotary pairs are stored side by side
    score_scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    query_growth: float = 0.0  # with the position: see `growth` of OpSet.scale_by_position
    score_cap: float = 0.0  # see `softcap` of OpSet.paged_attention
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # see `softcap` of OpSet.logits
    activation: Activation = Activation.SILU
    tied: bool = False  # the head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norms: Literal["none", "heads", "rows"] = "none"  # of what
    norms_turned: bool = False  # queries and keys are normed after they have turned, and not before
    slopes: tuple[float, ...] = ()  # for each head: how fast its scores fall with the distance
    norms_plus: float = 0.0  # added to stored norm weights
    layer_norms: bool = False  # norms take the mean away, and have biases
    head_bias: bool = False


def config(hf: CheckpointConfig) -> LlamaConfig:
    if hf.architecture == "Mistral3ForConditionalGeneration":
        text = hf.section("text_config")
        third = text.expect("model_type", "mistral", "ministral3", None) == "ministral3"
        architecture = MINISTRAL_3 if third else "MistralForCausalLM"
        tied = hf.bool("tie_word_embeddings", False)
        hf = text.with_values({"architectures": [architecture], "tie_word_embeddings": tied})
    hf.expect("hidden_act", "silu")
    return LlamaConfig(**numbers(hf))


def numbers(hf: CheckpointConfig) -> dict[str, Any]:
    """The fields of LlamaConfig, for families that add their own."""
    hidden, layers, heads = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    head_dim = hf.int("head_dim", hidden // max(heads, 1))
    all_biases = hf.bool("use_bias", False)  # ERNIE 4.5
    if hf.architecture == "InternLM3ForCausalLM":
        all_biases = hf.bool("bias", False)
    attention_bias = hf.bool("attention_bias", all_biases)
    max_position = hf.int("max_position_embeddings")
    rope = read_rope(hf, head_dim, max_position)
    if hf.architecture == HUNYUAN:
        rope = _stretched(rope)
    return {
        "architecture": hf.architecture,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": hf.int("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate": hf.int("intermediate_size"),
        "vocab": hf.int("vocab_size"),
        "max_position": rope.default_length,
        "longest": rope.longest,
        "eps": hf.float("rms_norm_eps", 1e-6),
        "rope": rope,
        "windows": _windows(hf, layers),
        "rotated": _rotated(hf, layers),
        "pairwise": hf.architecture in PAIRWISE,
        "tied": hf.bool("tie_word_embeddings", False),
        "qkv_bias": hf.bool("qkv_bias", attention_bias or hf.architecture == "Qwen2ForCausalLM"),
        # Seed-OSS has a word of its own for it, and Helium never has one.
        "out_bias": hf.bool("attention_out_bias", attention_bias and hf.architecture != HELIUM),
        "mlp_bias": hf.bool("mlp_bias", all_biases),
        "qk_norms": "heads" if hf.architecture in ("Qwen3ForCausalLM", HUNYUAN) else "none",
        "norms_turned": hf.architecture == HUNYUAN,
        "query_growth": rope.number("llama_4_scaling_beta", 0.0) if hf.architecture == MINISTRAL_3 else 0.0,
    }


def _stretched(rope: RopeSpec) -> RopeSpec:
    """HunYuan says `dynamic`, and with an `alpha` means a fixed stretch."""
    if rope.type != "dynamic" or not rope.numbers.get("alpha"):
        return rope
    stretch = rope.number("alpha") ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return replace(rope, type="default", theta=rope.theta * stretch)


def _windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """Layers may be listed by kind. If not, Mistral and Phi-3 have a window in all layers, Qwen2 and 3 (if they say so)
    from layer max_window_layers on."""
    if "layer_types" in hf:
        return listed_windows(hf, layers)
    first = layers
    if hf.architecture in ("MistralForCausalLM", "MinistralForCausalLM", MINISTRAL_3, "Phi3ForCausalLM"):
        first = 0
    elif hf.architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and hf.bool("use_sliding_window", False):
        first = hf.int("max_window_layers", 28)
    elif hf.architecture == "SmolLM3ForCausalLM":
        hf.expect("use_sliding_window", False, None)
    window = hf.int("sliding_window", 0)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def listed_windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    kinds = hf.list("layer_types")
    if len(kinds) != layers:
        raise BadCheckpoint(f"layer_types lists {len(kinds)} layers, and there are {layers}")
    known = {"full_attention": 0, "sliding_attention": hf.int("sliding_window", 0)}
    if unknown := sorted({str(kind) for kind in kinds} - known.keys()):
        raise Unsupported(f"layer_types lists {', '.join(unknown)}", f"supported: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _rotated(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """All do, except in SmolLM3: it lists a 0 for a layer that does not, or says that every n-th one does not."""
    if hf.architecture != "SmolLM3ForCausalLM":
        return (True,) * layers
    interval = hf.int("no_rope_layer_interval", 4)
    listed = hf.get("no_rope_layers", [(layer + 1) % interval for layer in range(layers)])
    if len(listed) != layers:
        raise BadCheckpoint(f"no_rope_layers lists {len(listed)} layers, and there are {layers}")
    return tuple(bool(rotated) for rotated in listed)


def top_names(c: LlamaConfig) -> Wanted:
    return {
        "embed": TokenTable("model.embed_tokens", c.vocab, c.hidden),
        "norm": _norm(c, "model.norm"),
        "head": Matrix(
            {"model.embed_tokens" if c.tied else "lm_head": c.vocab}, c.hidden, c.head_bias, keep=Keep.EIGHT_BITS
        ),
    }


def _norm(c: LlamaConfig, name: str) -> Vector | LayerNorm:
    return LayerNorm(name, c.hidden) if c.layer_norms else Vector(name, c.hidden, plus=c.norms_plus)


def layer_names(c: LlamaConfig) -> Wanted:
    orders = [pairs_apart(n, c.head_dim, c.rope.rotary_dim) if c.pairwise else None for n in (c.heads, c.kv_heads)]
    q, k = (TensorPart(size, order) for size, order in zip((c.q_size, c.kv_size), orders, strict=True))
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": TensorPart(c.kv_size)}
    gate_up = {"mlp.gate_proj": c.intermediate, "mlp.up_proj": c.intermediate}
    normed = {"none": {}, "heads": {"q": c.head_dim, "k": c.head_dim}, "rows": {"q": c.q_size, "k": c.kv_size}}
    sized = normed[c.qk_norms].items()
    named = (
        {"q": "query_layernorm", "k": "key_layernorm"} if c.architecture == HUNYUAN else {"q": "q_norm", "k": "k_norm"}
    )
    qk_norms = {f"{x}_norm": Vector(f"self_attn.{named[x]}", size, plus=c.norms_plus) for x, size in sized}
    return {
        "norm1": _norm(c, "input_layernorm"),
        "qkv": Matrix(qkv, c.hidden, bias=c.qkv_bias),
        **qk_norms,
        "out": Matrix({"self_attn.o_proj": c.hidden}, c.q_size, bias=c.out_bias),
        "norm2": _norm(c, "post_attention_layernorm"),
        "gate_up": Matrix(gate_up, c.hidden, bias=c.mlp_bias),
        "down": Matrix({"mlp.down_proj": c.hidden}, c.intermediate, bias=c.mlp_bias),
    }


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """A norm that a family does not have is None."""

    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    norm1: Any = None  # of what attention reads
    norm2: Any = None  # of what the feed-forward layer reads
    after1: Any = None  # of what attention adds
    after2: Any = None  # of what the feed-forward layer adds
    q_norm: Any = None
    k_norm: Any = None
    sinks: Any = None  # see OpSet.paged_attention


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embed: Any
    layers: list[Any]  # of LlamaLayer, or a family's own
    norm: Any
    head: PackedWeight
    rope: Any  # rotary frequencies
    local_rope: Any = None  # of layers with a window, where they have their own
    slopes: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    return load_as(ops, text_part(checkpoint), config, max_model_len, layer_names(config))


def load_as(
    ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int, layer_names: Wanted
) -> LoadedModel:
    """For families with the same layers under other names."""
    return load_with(ops, checkpoint, config, max_model_len, forward, [layer_names] * config.layers)


def load_with(
    ops: OpSet,
    checkpoint: Checkpoint,
    config: LlamaConfig,
    max_model_len: int,
    forward: Callable[[Any, "LlamaWeights", OpSet, Any], Value],
    layer_names: Sequence[Wanted],  # for each layer
    layer_type: type["LlamaLayer"] | None = None,
    unused: Sequence[str] = (),  # patterns of names, besides those of all
) -> LoadedModel:
    """For families with another forward pass."""
    unused = [UNUSED, ROPE_FACTORS, *(["lm_head.weight"] if config.tied else []), *unused]
    named = {f"model.layers.{index}.": names for index, names in enumerate(layer_names)}
    top, layers = load_weights(ops, checkpoint, top_names(config), named, "|".join(unused))
    factors = dequantize(checkpoint.tensor(ROPE_FACTORS)).ravel() if ROPE_FACTORS in checkpoint.names() else None
    weights = LlamaWeights(
        **top,
        layers=[(layer_type or LlamaLayer)(**layer) for layer in layers],
        rope=ops.frequencies(*frequencies(config.rope, max_model_len, factors)),
        local_rope=ops.frequencies(*frequencies(local, max_model_len)) if (local := config.local_rope) else None,
        slopes=ops.vector(stored_floats("slopes", np.array(config.slopes))) if config.slopes else None,
    )
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def forward(
    c: LlamaConfig,
    w: LlamaWeights,
    ops: OpSet,
    batch: Any,
    feed_forward: "Callable[[Any, Any, OpSet, Value], Value] | None" = None,  # in place of `mlp`
) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    local = angles if w.local_rope is None else ops.rope_angles(batch.positions, w.local_rope)
    x = scaled(ops, ops.embedding(batch.ids, w.embed), c.embed_scale)
    for index, layer in enumerate(w.layers):
        turn = local if c.windows[index] else angles
        found = attention(c, layer, index, ops, normed(ops, x, layer.norm1, c.eps), turn, batch, w.slopes)
        x = ops.add(x, scaled(ops, normed(ops, found, layer.after1, c.eps), c.residual_scale))
        found = (feed_forward or mlp)(c, layer, ops, normed(ops, x, layer.norm2, c.eps))
        x = ops.add(x, scaled(ops, normed(ops, found, layer.after2, c.eps), c.residual_scale))
    x = scaled(ops, normed(ops, x, w.norm, c.eps), c.logit_scale)
    return ops.logits(x, w.head, batch, c.logit_cap)


def normed(ops: OpSet, x: Value, weight: Any, eps: float) -> Value:
    """By a norm that a layer has, of either kind, or has not."""
    if isinstance(weight, Affine):
        return ops.layer_norm(x, *weight, eps)
    return x if weight is None else ops.rms_norm(x, weight, eps)


def scaled(ops: OpSet, x: Value, factor: float) -> Value:
    return x if factor == 1 else ops.scale(x, factor)


def attention(
    c: LlamaConfig, layer: LlamaLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any = None
) -> Value:
    q, k, v = ops.split(ops.linear(x, layer.qkv), (c.q_size, c.kv_size, c.kv_size))
    if not c.norms_turned:
        q, k = normed(ops, q, layer.q_norm, c.eps), normed(ops, k, layer.k_norm, c.eps)
    if c.query_growth:
        q = ops.scale_by_position(q, batch.positions, c.query_growth, c.rope.original_max)
    if c.rotated[index]:
        q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
    if c.norms_turned:
        q, k = normed(ops, q, layer.q_norm, c.eps), normed(ops, k, layer.k_norm, c.eps)
    ops.write_kv(k, v, batch, index)
    scale = 1 / sqrt(c.head_dim) if c.score_scale is None else c.score_scale
    window, cap = c.windows[index], c.score_cap
    found = ops.paged_attention(q, batch, index, c.head_dim, scale, window, cap, slopes, layer.sinks)
    return ops.linear(found, layer.out)


def mlp(c: LlamaConfig, layer: LlamaLayer, ops: OpSet, x: Value) -> Value:
    return ops.linear(ops.activate_and_mul(ops.linear(x, layer.gate_up), c.activation), layer.down)
