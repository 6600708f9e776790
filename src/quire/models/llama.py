"""Llama, and the families that differ from it in features that llama_families.py lists: one row a family.

Config, tensors and forward pass ask for the features of the row, `LlamaConfig.family`. MoE families take the attention
from here (moe.py, gpt_oss.py); families with a feed-forward layer or tensors of their own take all but these
(apertus.py, baichuan.py)."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.alibi import alibi_slopes
from quire.models.bidirectional_families import BIDIRECTIONAL_FAMILIES
from quire.models.config import ModelConfig
from quire.models.constant_weights import Ones
from quire.models.gating import mul_activated
from quire.models.layer_patterns import listed_windows
from quire.models.llama_families import FAMILIES, LlamaFamily, translate
from quire.models.loading import (
    Affine,
    EmbeddingTable,
    LayerNorm,
    Linear,
    LinearPart,
    LoadedModel,
    TensorSpec,
    TensorSpecs,
    Vector,
    load_weights,
)
from quire.models.older_families import OLDER_FAMILIES
from quire.models.qkv_order import deinterleaved_rope, parted_kv, swapped_rope, ungrouped_qkv
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

LLAMA = LlamaFamily()
FUSED_QKV = "self_attn.qkv_proj"
APART = ("mlp.gate_proj", "mlp.up_proj")
MAX_LOOPS = 64
ROPE_FACTORS = "rope_freqs"  # in GGUF files only
# A buffer in older exports, and layers that predict further tokens.
UNUSED = r".*\.rotary_emb\.inv_freq|(model\.)?mtp(_layers)?\..*"


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are scaled by their position: see OpSet.scale_by_position."""

    growth: float
    length: int
    offset: int = 0
    only_without_rope: bool = False  # in layers that have none


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    family: LlamaFamily = LLAMA
    intermediate: int
    eps: float  # of the norms
    rope: RopeSpec
    rotated: tuple[bool, ...]  # for each layer: whether queries and keys have rope
    local_rope: RopeSpec | None = None  # in layers with a window; None: as in the others
    score_scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    query_growth: QueryGrowth | None = None
    chunked: bool = False  # a window is a chunk: a token sees the tokens of its own chunk up to itself
    score_cap: float = 0.0  # see `softcap` of OpSet.paged_attention
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and feed-forward layers, before they are added
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # see `softcap` of OpSet.logits
    activation: Activation = Activation.SILU
    tied: bool = False  # the head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norms: Literal["none", "heads", "rows"] = "none"  # of every head, or of the whole of q and k
    clip_qkv: float = 0.0  # q, k and v are clipped to -clip_qkv .. clip_qkv; 0: they are not
    slopes: tuple[float, ...] = ()  # ALiBi, for each head
    loops: int = 1  # how often the layers run, each time with keys and values of their own: `layers` counts all runs
    loop_norm: bool = False  # the last norm stands between two runs, too


def config(hf: CheckpointConfig) -> LlamaConfig:
    family = {**FAMILIES, **OLDER_FAMILIES, **BIDIRECTIONAL_FAMILIES}[hf.architecture]
    fields = config_fields(translate(hf, family), family)
    if fields["bidirectional"] and fields.get("score_cap"):
        raise Unsupported(
            f"{hf.source}: scores of an encoder have a softcap", "it is supported where attention is causal"
        )
    return LlamaConfig(**fields)


def config_fields(hf: CheckpointConfig, family: LlamaFamily = LLAMA) -> dict[str, Any]:
    """The fields of LlamaConfig, to which other model files add their own. `hf` has Llama's keys."""
    hidden, layers, heads = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    head_dim = hf.int("head_dim", hidden // max(heads, 1))
    all_biases = hf.bool(family.bias_key, False)
    attention_bias = hf.bool("attention_bias", all_biases)
    rope = read_rope(hf, head_dim, hf.int("max_position_embeddings"))
    rope = _fixed_ntk(rope) if family.rope_alpha else rope
    windows = (listed_windows if "layer_types" in hf else family.windows)(hf, layers)
    bidirectional = family.bidirectional or bool(family.bidirectional_key and hf.bool(family.bidirectional_key, False))
    return {
        "architecture": hf.architecture,
        "family": family,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": hf.int("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate": hf.int("intermediate_size"),
        "vocab": hf.int("vocab_size"),
        "max_position": rope.default_length,
        "max_length": rope.max_length,
        "eps": hf.float("rms_norm_eps", 1e-6),
        "rope": rope,
        "local_rope": _local_rope(hf, rope, head_dim) if family.local_rope else None,
        "windows": tuple(map(_window_of_one_side, windows)) if bidirectional else windows,
        "bidirectional": bidirectional,
        "rotated": (False,) * layers if family.alibi else family.rotated(hf, windows),
        "query_growth": query_growth(rope) if family.query_scaling else None,
        "activation": family.activations[hf.expect("hidden_act", *family.activations)],
        "tied": hf.bool("tie_word_embeddings", False),
        "qkv_bias": hf.bool("qkv_bias", attention_bias or family.qkv_bias),
        "out_bias": hf.bool("attention_out_bias", attention_bias and family.out_bias),
        "mlp_bias": hf.bool("mlp_bias", all_biases),
        "head_bias": family.head_bias and hf.bool("lm_head_bias", False),
        "qk_norms": family.qk_norms if _has_qk_norms(hf, family) else "none",
        "slopes": alibi_slopes(heads) if family.alibi else (),
        **(family.scales(hf) if family.scales else {}),
        **(_loop_fields(hf, family, windows) if family.loops_key else {}),
    }


def _loop_fields(hf: CheckpointConfig, family: LlamaFamily, windows: tuple[int, ...]) -> dict[str, Any]:
    loops = hf.int(family.loops_key or "", 1)
    if not 1 <= loops <= MAX_LOOPS:
        raise BadCheckpoint(f"{hf.source}: {family.loops_key} is {loops}, not 1 to {MAX_LOOPS}")
    return {
        "loops": loops,
        "loop_norm": not hf.bool("skip_loop_final_norm", False),
        "layers": loops * len(windows),
        "windows": windows * loops,
        "rotated": family.rotated(hf, windows) * loops,
    }


def _fixed_ntk(rope: RopeSpec) -> RopeSpec:
    """A `dynamic` scaling with an `alpha` is a fixed NTK factor in HunYuan."""
    if rope.type != "dynamic" or not rope.params.get("alpha"):
        return rope
    factor = rope.param("alpha") ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return replace(rope, type="default", theta=rope.theta * factor)


def query_growth(rope: RopeSpec) -> QueryGrowth | None:
    growth = rope.param("llama_4_scaling_beta", 0.0)
    return QueryGrowth(growth, rope.original_max) if growth else None


def _local_rope(hf: CheckpointConfig, rope: RopeSpec, head_dim: int) -> RopeSpec:
    theta = hf.float("rope_local_base_freq", rope.theta)
    rotary_dim = int(head_dim * hf.float("rope_local_partial_rotary_factor", 1.0))
    return RopeSpec("default", theta, rotary_dim, rope.max_position, {})


def _window_of_one_side(window: int) -> int:
    """A window that counts both sides, as the ops count it: the token itself and those of one side."""
    return window // 2 + 1 if window else 0


def _has_qk_norms(hf: CheckpointConfig, family: LlamaFamily) -> bool:
    return family.qk_norms_key is None or hf.bool(family.qk_norms_key)


def top_specs(c: LlamaConfig) -> TensorSpecs:
    head = "model.embed_tokens" if c.tied else "lm_head"
    return {
        "embed": EmbeddingTable("model.embed_tokens", c.vocab, c.hidden),
        "norm": _norm(c, "model.norm"),
        "head": Linear({head: c.vocab}, c.hidden, c.head_bias, keep=Keep.EIGHT_BITS),
    }


def layer_specs(c: LlamaConfig, stored: Container[str] = ()) -> TensorSpecs:
    """`stored`: the tensor names of the checkpoint, which say whether q, k and v are fused."""
    f = c.family
    return {
        **{ours: _norm(c, name, f.norm_offsets.get(ours)) for ours, name in f.norms.items()},
        "qkv": _qkv(c, stored),
        **_qk_norms(c),
        **_sub_norms(c),
        **({"sinks": Vector("self_attn", c.heads, f.sinks)} if f.sinks else {}),
        **({"gate": Linear({f.gate: c.q_size}, c.hidden)} if f.gate else {}),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size, bias=c.out_bias),
        "gate_up": Linear(_gate_up(c, stored), c.hidden, bias=c.mlp_bias),
        "down": Linear({f.down: c.hidden}, c.intermediate, bias=c.mlp_bias or f.down_bias),
    }


def _norm(c: LlamaConfig, name: str, offset: float | None = None) -> TensorSpec:
    if not c.family.stored_norms:
        return Ones(c.hidden)
    if c.family.layer_norm:
        return LayerNorm(name, c.hidden, bias=c.family.norm_bias)
    return Vector(name, c.hidden, offset=c.family.norm_offset if offset is None else offset)


def _qkv(c: LlamaConfig, stored: Container[str]) -> Linear:
    if c.family.fused_qkv or f"model.layers.0.{FUSED_QKV}.weight" in stored:
        part = LinearPart(c.q_size + 2 * c.kv_size, _fused_order(c))
        return Linear({FUSED_QKV: part}, c.hidden, bias=c.qkv_bias)
    orders = [_rope_order(c, heads) for heads in (c.heads, c.kv_heads)]
    q, k = (LinearPart(size, order) for size, order in zip((c.q_size, c.kv_size), orders, strict=True))
    if c.family.kv and f"model.layers.0.{c.family.kv}.weight" in stored:
        order = parted_kv(c.kv_heads, c.head_dim) if c.family.kv_by_head else None
        return Linear({"self_attn.q_proj": q, c.family.kv: LinearPart(2 * c.kv_size, order)}, c.hidden, bias=c.qkv_bias)
    parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": LinearPart(c.kv_size)}
    return Linear(parts, c.hidden, bias=c.qkv_bias)


def _rope_order(c: LlamaConfig, heads: int) -> NDArray[np.int32] | None:
    if c.family.rope_reversed:
        return swapped_rope(heads, c.head_dim)
    return deinterleaved_rope(heads, c.head_dim, c.rope.rotary_dim) if c.family.rope_interleaved else None


def _fused_order(c: LlamaConfig) -> NDArray[np.int32] | None:
    if c.family.grouped_qkv:
        return ungrouped_qkv(c.kv_heads, c.heads, c.head_dim)
    qk = _rope_order(c, c.heads + c.kv_heads)
    return None if qk is None else np.concatenate([qk, len(qk) + np.arange(c.kv_size, dtype=np.int32)])


def _qk_norms(c: LlamaConfig) -> TensorSpecs:
    sizes = {"none": (), "heads": (c.head_dim, c.head_dim), "rows": (c.q_size, c.kv_size)}[c.qk_norms]
    if not c.family.stored_norms:
        return {ours: Ones(size) for ours, size in zip(("q_norm", "k_norm"), sizes, strict=False)}
    named = zip(("q_norm", "k_norm"), (c.family.q_norm, c.family.k_norm), sizes, strict=False)
    order = _rope_order(c, 1) if c.qk_norms == "heads" else None
    return {ours: Vector(name, size, offset=c.family.norm_offset, order=order) for ours, name, size in named}


def _sub_norms(c: LlamaConfig) -> TensorSpecs:
    sizes = {"out_norm": c.q_size, "down_norm": c.intermediate}
    return {ours: Vector(name, sizes[ours]) for ours, name in c.family.sub_norms.items()}


def _gate_up(c: LlamaConfig, stored: Container[str]) -> dict[str, int]:
    outputs = 2 * c.intermediate if c.family.gated else c.intermediate
    apart = c.family.gated and f"model.layers.0.{APART[0]}.weight" in stored  # as GGUF's converter may store them
    names = APART if apart else c.family.gate_up
    return dict.fromkeys(names, outputs // len(names))


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """A weight that a family does not have is None."""

    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    attn_norm: Any = None  # of the input of attention
    mlp_norm: Any = None  # of the input of the feed-forward layer
    post_attn_norm: Any = None  # of the output of attention, before it is added
    post_mlp_norm: Any = None  # of the output of the feed-forward layer, before it is added
    q_norm: Any = None
    k_norm: Any = None
    out_norm: Any = None  # of the input of the output projection
    down_norm: Any = None  # of the input of the down projection
    sinks: Any = None  # see OpSet.paged_attention
    gate: PackedWeight | None = None  # of the output of attention


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embed: Any
    layers: list[Any]  # of LlamaLayer, or a family's own
    norm: Any
    head: PackedWeight
    rope: Any  # rotary frequencies
    local_rope: Any = None  # of layers with a window, where they have their own
    slopes: Any = None  # ALiBi


FeedForward = Callable[[Any, Any, OpSet, Value], Value]  # (config, layer, ops, x)
Mixer = Callable[[Any, Any, int, OpSet, Value, Value, Any, Any], Value]  # as `attention`: mixes tokens of a sequence
Block = Callable[[Any, Any, int, OpSet, Value, Value, Any, Any], Value]  # as `mixed`: hidden states of a layer or half


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    if config.family.renamed:
        checkpoint = RenamedCheckpoint.by_substring(checkpoint, config.family.renamed)
    layers = [layer_specs(config, set(checkpoint.names()))] * (config.layers // config.loops)
    mixer = full_attention if config.bidirectional else None
    return load_layers(ops, checkpoint, config, max_model_len, layers, mixer=mixer)


def load_layers(
    ops: OpSet,
    checkpoint: Checkpoint,
    config: LlamaConfig,
    max_model_len: int,
    layers: Sequence[TensorSpecs],  # for each layer that is stored
    layer_type: type[LlamaLayer] = LlamaLayer,
    feed_forward: FeedForward | None = None,  # in place of `mlp`
    unused: Sequence[str] = (),  # patterns of tensor names that are not read, besides those of all families
    mixer: Mixer | None = None,  # in place of `attention`
    block: Block | None = None,  # a whole layer, in place of `mixed` and `fed_forward`
) -> LoadedModel:
    """For families whose layers have other tensors."""
    tied = ["lm_head.weight"] if config.tied else []
    unused = [UNUSED, ROPE_FACTORS, *tied, *config.family.unused, *unused]
    by_prefix = {f"model.layers.{index}.": specs for index, specs in enumerate(layers)}
    top, loaded = load_weights(ops, checkpoint, top_specs(config), by_prefix, "|".join(unused))
    weights = LlamaWeights(
        **top,
        layers=[layer_type(**layer) for layer in loaded] * config.loops,
        rope=ops.frequencies(*frequencies(config.rope, max_model_len, _own_factors(config, checkpoint))),
        local_rope=ops.frequencies(*frequencies(local, max_model_len)) if (local := config.local_rope) else None,
        slopes=ops.vector(stored_floats("slopes", np.array(config.slopes))) if config.slopes else None,
    )
    halves = (partial(mixed, mixer=mixer or attention), partial(fed_forward, feed_forward=feed_forward or mlp))
    blocks: Sequence[Block] = halves if block is None else (block,)
    return LoadedModel(config, partial(forward, config, weights, blocks), [top, *loaded])


def _own_factors(c: LlamaConfig, checkpoint: Checkpoint) -> NDArray[np.float32] | None:
    factors = rope_factors(checkpoint)
    return factors[: c.rope.rotary_dim // 2] if factors is not None and c.family.spare_rope_factors else factors


def rope_factors(checkpoint: Checkpoint) -> NDArray[np.float32] | None:
    return dequantize(checkpoint.tensor(ROPE_FACTORS)).ravel() if ROPE_FACTORS in checkpoint.names() else None


def forward(c: LlamaConfig, w: LlamaWeights, blocks: Sequence[Block], ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    local = angles if w.local_rope is None else ops.rope_angles(batch.positions, w.local_rope)
    x = scaled(ops, ops.embedding(batch.ids, w.embed), c.embed_scale)
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        for block in blocks:  # what goes into one lives until it ends
            x = block(c, layer, index, ops, x, local if c.windows[index] else angles, batch, w.slopes)
        if c.loop_norm and (index + 1) % (c.layers // c.loops) == 0 and index + 1 < c.layers:
            x = normed(ops, x, w.norm, c.eps)
    ops.tap(x, c.layers)
    x = normed(ops, x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(scaled(ops, x, c.logit_scale), w.head, batch, c.logit_cap)


def mixed(
    c: LlamaConfig,
    layer: Any,
    index: int,
    ops: OpSet,
    x: Value,
    angles: Value,
    batch: Any,
    slopes: Any,
    mixer: Mixer,
) -> Value:
    h = mixer(c, layer, index, ops, normed(ops, x, layer.attn_norm, c.eps), angles, batch, slopes)
    return ops.add(x, scaled(ops, normed(ops, h, layer.post_attn_norm, c.eps), c.residual_scale))


def fed_forward(
    c: LlamaConfig,
    layer: Any,
    index: int,
    ops: OpSet,
    x: Value,
    angles: Value,
    batch: Any,
    slopes: Any,
    feed_forward: FeedForward,
) -> Value:
    h = feed_forward(c, layer, ops, normed(ops, x, layer.mlp_norm, c.eps))
    return ops.add(x, scaled(ops, normed(ops, h, layer.post_mlp_norm, c.eps), c.residual_scale))


def normed(ops: OpSet, x: Value, weight: Any, eps: float) -> Value:
    """Layer norm, RMS norm or, where the layer has no weight for it, no norm."""
    if isinstance(weight, Affine):
        return ops.layer_norm(x, *weight, eps)
    return x if weight is None else ops.rms_norm(x, weight, eps)


def scaled(ops: OpSet, x: Value, factor: float) -> Value:
    return x if factor == 1 else ops.scale(x, factor)


def attention(
    c: LlamaConfig, layer: LlamaLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any = None
) -> Value:
    q, k, v = queries_keys_values(c, layer, index, ops, x, angles, batch)
    number = c.index_of_kind(index)
    ops.write_kv(k, v, batch, number)
    window, cap = -c.windows[index] if c.chunked else c.windows[index], c.score_cap
    attended = ops.paged_attention(q, batch, number, c.head_dim, _scale(c), window, cap, slopes, layer.sinks)
    if layer.gate is not None:
        attended = mul_activated(ops, attended, ops.linear(x, layer.gate), c.family.gate_activation)
    return ops.linear(normed(ops, attended, layer.out_norm, c.eps), layer.out)


def full_attention(
    c: LlamaConfig, layer: LlamaLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any = None
) -> Value:
    """A mixer in place of `attention`: tokens see those after them, too, and nothing is cached."""
    q, k, v = queries_keys_values(c, layer, index, ops, x, angles, batch)
    attended = ops.attention(q, k, v, batch, c.head_dim, _scale(c), window=c.windows[index])
    return ops.linear(normed(ops, attended, layer.out_norm, c.eps), layer.out)


def _scale(c: LlamaConfig) -> float:
    return 1 / sqrt(c.head_dim) if c.score_scale is None else c.score_scale


def queries_keys_values(
    c: LlamaConfig, layer: LlamaLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any
) -> tuple[Value, Value, Value]:
    qkv = ops.linear(x, layer.qkv)
    q, k, v = ops.split(ops.clamp(qkv, c.clip_qkv) if c.clip_qkv else qkv, (c.q_size, c.kv_size, c.kv_size))
    if not c.family.qk_norms_after_rope:
        q, k = normed(ops, q, layer.q_norm, c.eps), normed(ops, k, layer.k_norm, c.eps)
    if (g := c.query_growth) and not (g.only_without_rope and c.rotated[index]):
        q = ops.scale_by_position(q, batch.positions, g.growth, g.length, g.offset)
    if c.rotated[index]:
        q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
    if c.family.qk_norms_after_rope:
        q, k = normed(ops, q, layer.q_norm, c.eps), normed(ops, k, layer.k_norm, c.eps)
    return q, k, v


def mlp(c: LlamaConfig, layer: LlamaLayer, ops: OpSet, x: Value) -> Value:
    act = ops.activate_and_mul if c.family.gated else ops.activate
    inner = act(ops.linear(x, layer.gate_up), c.activation)
    return ops.linear(normed(ops, inner, layer.down_norm, c.eps), layer.down)
