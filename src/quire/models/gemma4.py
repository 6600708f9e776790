"""Gemma 4: layers with a window and layers without have heads of different widths, the last layers read the keys and
values of others, every layer may have an input of its own (per_layer_inputs.py) and, in the largest, experts beside its
feed-forward layer.

The cache has the wider heads in all layers (uneven_heads.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, per_layer_inputs
from quire.models.constant_weights import Ones
from quire.models.gemma_layers import kinds, kv_sources, scalar, unused_keys
from quire.models.layer_patterns import listed_windows, window_except_every
from quire.models.llama import LlamaConfig, normed
from quire.models.llama_families import GEMMA_NORMS, LlamaFamily, root_of_hidden, translate
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpec, TensorSpecs, Vector, load_weights
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.models.uneven_heads import narrowed, widened
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EXPERT_NORMS = {
    "expert_norm": "pre_feedforward_layernorm_2",
    "post_expert_norm": "post_feedforward_layernorm_2",
    "post_dense_norm": "post_feedforward_layernorm_1",
}


def scales(hf: CheckpointConfig) -> dict[str, float]:
    return {
        "embed_scale": root_of_hidden(hf),
        "score_scale": 1.0,
        "logit_cap": hf.float("final_logit_softcapping", 0.0),
    }


FAMILY = LlamaFamily(
    defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    expects={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "use_bidirectional_attention": ("vision", None),
        "rope_local_scaling": (None,),
    },
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    scales=scales,
    windows=window_except_every(6),
    default_window=512,
    local_rope=True,
    qk_norms="heads",
    norms=GEMMA_NORMS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(LlamaConfig):
    """`head_dim` and `kv_heads` are those of the cache."""

    widths: tuple[int, ...]  # of the heads of each layer
    key_heads: tuple[int, ...]  # of each layer
    sources: tuple[int, ...]  # the layer whose keys and values each layer reads
    keys_are_values: bool  # in layers without a window, before their norms
    wide: tuple[bool, ...]  # for each layer: whether its feed-forward layer is twice as wide
    input_size: int  # of the input of each layer; 0: they have none
    input_rows: int  # of the table of these inputs
    num_experts: int  # 0: there are none
    expert_size: int
    routing: Routing


def config(hf: CheckpointConfig) -> Gemma4Config:
    hf = translate(hf, FAMILY)
    base = llama.config_fields(hf.with_values({"rope_scaling": None, "partial_rotary_factor": None}), FAMILY)
    layers = base["layers"]
    windows = _windows(hf, layers)
    local, whole = hf.int("head_dim", 256), _of_whole(hf, windows, "head_dim", "global_head_dim", 512)
    keys_are_values = hf.bool("attention_k_eq_v", False)
    local_keys = whole_keys = base["kv_heads"]
    if keys_are_values:
        whole_keys = _of_whole(hf, windows, "num_key_value_heads", "num_global_key_value_heads", local_keys)
    key_heads = tuple(local_keys if window else whole_keys for window in windows)
    if max(key_heads) % min(key_heads):
        raise Unsupported(f"layers have {local_keys} and {whole_keys} key heads", "one must be a multiple of the other")
    sources = kv_sources(hf, windows)
    is_shared = [source != layer for layer, source in enumerate(sources)]
    num_experts = hf.int("num_experts") if hf.bool("enable_moe_block", False) else 0
    top_k = hf.int("top_k_experts", 1) if num_experts else 1
    if num_experts and not 1 <= top_k <= num_experts:
        raise BadCheckpoint(f"top_k_experts is {top_k}, and there are {num_experts} experts")
    rope = read_rope(hf, whole, hf.int("max_position_embeddings"))
    return Gemma4Config(
        **base
        | {
            "windows": windows,
            "rotated": (True,) * layers,
            "head_dim": max(local, whole),
            "kv_heads": max(key_heads),
            "kinds": kinds(sources),
            "rope": rope,
            "local_rope": _local_rope(hf, rope, local),
            "max_position": rope.default_length,
            "max_length": rope.max_length,
        },
        widths=tuple(local if window else whole for window in windows),
        key_heads=key_heads,
        sources=sources,
        keys_are_values=keys_are_values,
        wide=tuple(shared and hf.bool("use_double_wide_mlp", False) for shared in is_shared),
        input_size=hf.int("hidden_size_per_layer_input", 0),
        input_rows=hf.int("vocab_size_per_layer_input", base["vocab"]),
        num_experts=num_experts,
        expert_size=hf.int("moe_intermediate_size", 0),
        routing=Routing(top_k, renormalize=True),
    )


def _of_whole(hf: CheckpointConfig, windows: tuple[int, ...], key: str, name: str, default: int) -> int:
    """For layers without a window: the value of `name` or, as transformers 5 writes it, of `per_layer_config`."""
    by_layer = hf.section("per_layer_config").section(str(windows.index(0)))
    return by_layer.int(key, hf.int(name, default))


def _windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    windows = (listed_windows if "layer_types" in hf else FAMILY.windows)(hf, layers)
    return (*windows[:-1], 0)  # the last layer never has one


def _local_rope(hf: CheckpointConfig, rope: RopeSpec, width: int) -> RopeSpec:
    return RopeSpec("default", hf.float("rope_local_base_freq", 10_000.0), width, rope.max_position, {})


@dataclass(frozen=True, slots=True)
class Scalar:
    """A tensor of one number."""

    name: str

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (1,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> float:
        return scalar(dequantize(tensors[0]))


@dataclass(frozen=True, slots=True)
class RouterNorm:
    """The norm of a router's input: its weight `router.scale`, divided by the root of its size."""

    size: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "router.scale", (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.vector(stored_floats("router.scale", dequantize(tensors[0]).ravel() * np.float32(self.size**-0.5)))


@dataclass(frozen=True, slots=True)
class ScaledDownExperts:
    """The down projections of all experts, each times its `router.per_expert_scale`, in floats."""

    num_experts: int
    num_outputs: int
    num_inputs: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "experts.down_proj", (self.num_experts, self.num_outputs, self.num_inputs)
        yield "router.per_expert_scale", (self.num_experts,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedExperts:
        stacked, scale = tensors
        factors = dequantize(scale).ravel()
        experts = [dequantize(stacked.part(expert, 1)).reshape(self.num_outputs, -1) for expert in range(len(factors))]
        scaled = [stored_floats("experts.down_proj", rows * factors[i]) for i, rows in enumerate(experts)]
        return ops.pack_experts([[expert] for expert in scaled])


def top_specs(c: Gemma4Config) -> TensorSpecs:
    inputs = per_layer_inputs.top_specs(c.hidden, c.layers, c.input_size, c.vocab, c.input_rows) if c.input_size else {}
    return {**llama.top_specs(c), **inputs}


def layer_specs(c: Gemma4Config, layer: int) -> TensorSpecs:
    width, keys, size = c.widths[layer], c.key_heads[layer], c.intermediate * (2 if c.wide[layer] else 1)
    whole = llama.layer_specs(replace(c, head_dim=width, kv_heads=keys, intermediate=size))
    qkv = {"self_attn.q_proj": c.heads * width}
    specs: dict[str, TensorSpec] = {**whole, "scale": Scalar("layer_scalar")}
    if c.sources[layer] == layer:
        qkv["self_attn.k_proj"] = keys * width
        if not _keys_are_values(c, layer):
            qkv["self_attn.v_proj"] = keys * width
        specs["v_norm"] = Ones(width)
    else:
        del specs["k_norm"]
    specs["qkv"] = Linear(qkv, c.hidden, bias=c.qkv_bias)
    if c.input_size:
        specs |= per_layer_inputs.layer_specs(c.hidden, c.input_size)
    return {**specs, **_expert_specs(c)} if c.num_experts else specs


def _keys_are_values(c: Gemma4Config, layer: int) -> bool:
    return c.keys_are_values and not c.windows[layer]


def _expert_specs(c: Gemma4Config) -> TensorSpecs:
    return {
        **{ours: Vector(name, c.hidden) for ours, name in EXPERT_NORMS.items()},
        "router_norm": RouterNorm(c.hidden),
        "router": Linear({"router.proj": c.num_experts}, c.hidden, keep=Keep.ALL),
        "experts_gate_up": ExpertLinear({"experts.gate_up_proj": 2 * c.expert_size}, c.hidden, c.num_experts),
        "experts_down": ScaledDownExperts(c.num_experts, c.hidden, c.expert_size),
    }


@dataclass(frozen=True, slots=True)
class Gemma4Layer(llama.LlamaLayer):
    """`qkv` has no values where they are the keys, and only queries where the layer reads those of another."""

    v_norm: Any = None
    scale: float = 1.0  # of the output
    input_gate: PackedWeight | None = None
    input_projection: PackedWeight | None = None
    input_norm: Any = None
    router_norm: Any = None
    router: PackedWeight | None = None
    experts_gate_up: PackedExperts | None = None
    experts_down: PackedExperts | None = None
    expert_norm: Any = None
    post_expert_norm: Any = None
    post_dense_norm: Any = None


@dataclass(frozen=True, slots=True)
class Gemma4Weights(llama.LlamaWeights):
    layer_table: Any = None
    layer_projection: PackedWeight | None = None
    layer_projection_norm: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: Gemma4Config, max_model_len: int) -> LoadedModel:
    tied = ["lm_head.weight"] if config.tied else []
    unused = [llama.UNUSED, llama.ROPE_FACTORS, *unused_keys(config.sources), *tied]
    layers = {f"model.layers.{layer}.": layer_specs(config, layer) for layer in range(config.layers)}
    top, loaded = load_weights(ops, checkpoint, top_specs(config), layers, "|".join(unused))
    assert config.local_rope is not None
    weights = Gemma4Weights(
        **top,
        layers=[Gemma4Layer(**layer) for layer in loaded],
        rope=ops.frequencies(*frequencies(config.rope, max_model_len, llama.rope_factors(checkpoint))),
        local_rope=ops.frequencies(*frequencies(config.local_rope, max_model_len)),
    )
    return LoadedModel(config, partial(forward, config, weights), [top, *loaded])


def forward(c: Gemma4Config, w: Gemma4Weights, ops: OpSet, batch: Any) -> Value:
    angles, local = ops.rope_angles(batch.positions, w.rope), ops.rope_angles(batch.positions, w.local_rope)
    x = ops.scale(ops.embedding(batch.ids, w.embed), c.embed_scale)
    inputs = per_layer_inputs.per_layer_inputs(c, w, ops, batch, x) if c.input_size else ()
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        h = attention(c, layer, index, ops, normed(ops, x, layer.attn_norm, c.eps), (angles, local), batch)
        x = ops.add(x, normed(ops, h, layer.post_attn_norm, c.eps))
        x = ops.add(x, normed(ops, feed_forward(c, layer, ops, x), layer.post_mlp_norm, c.eps))
        if inputs:
            x = ops.add(x, per_layer_inputs.projected_input(ops, x, layer, inputs[index], c.eps))
        x = x if layer.scale == 1 else ops.scale(x, layer.scale)
    ops.tap(x, c.layers)
    x = normed(ops, x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch, c.logit_cap)


def attention(
    c: Gemma4Config, layer: Gemma4Layer, index: int, ops: OpSet, x: Value, ropes: tuple[Value, Value], batch: Any
) -> Value:
    width, keys, source = c.widths[index], c.key_heads[index], c.sources[index]
    angles = ropes[1 if c.windows[index] else 0]
    sizes = (c.heads * width, keys * width, keys * width)
    if source == index:
        q, k, *rest = ops.split(ops.linear(x, layer.qkv), sizes[: 2 if _keys_are_values(c, index) else 3])
        v = ops.rms_norm(rest[0] if rest else k, layer.v_norm, c.eps)
        k = ops.rope(ops.rms_norm(k, layer.k_norm, c.eps), angles, width)
        cached = [widened(ops, part, keys, width, c.head_dim, c.kv_heads // keys) for part in (k, v)]
        ops.write_kv(cached[0], cached[1], batch, source)
    else:
        q = ops.linear(x, layer.qkv)
    q = ops.rope(ops.rms_norm(q, layer.q_norm, c.eps), angles, width)
    q = widened(ops, q, c.heads, width, c.head_dim)
    attended = ops.paged_attention(q, batch, source, c.head_dim, 1.0, c.windows[index])
    return ops.linear(narrowed(ops, attended, c.heads, width, c.head_dim), layer.out)


def feed_forward(c: Gemma4Config, layer: Gemma4Layer, ops: OpSet, x: Value) -> Value:
    dense = llama.mlp(c, layer, ops, normed(ops, x, layer.mlp_norm, c.eps))
    if layer.router is None:
        return dense
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    logits = ops.linear(ops.rms_norm(x, layer.router_norm, c.eps), layer.router)
    experts = (layer.experts_gate_up, layer.experts_down)
    routed = ops.moe(ops.rms_norm(x, layer.expert_norm, c.eps), logits, *experts, c.routing, c.activation)
    return ops.add(
        ops.rms_norm(dense, layer.post_dense_norm, c.eps), ops.rms_norm(routed, layer.post_expert_norm, c.eps)
    )
