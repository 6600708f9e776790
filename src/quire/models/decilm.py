"""DeciLM and the Nemotron models found by architecture search: Llama whose layers differ in size, and in which layers
may lack attention or a feed-forward layer.

`block_configs` lists the layers. The cache has the most key heads that a layer has (uneven_heads.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama
from quire.models.config import ATTENTION
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel, TensorSpecs, load_weights
from quire.models.rope import frequencies
from quire.models.uneven_heads import widened
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

NO_ATTENTION = "none"  # a kind of layer, beside ATTENTION
UNIT = 256  # sizes of feed-forward layers are multiples of it
ATTENTION_TENSORS = ("attn_norm", "qkv", "out")
MLP_TENSORS = ("mlp_norm", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeciConfig(LlamaConfig):
    key_heads: tuple[int, ...]  # of each layer; 0: it has no attention
    sizes: tuple[int, ...]  # of the feed-forward layer of each layer; 0: it has none


def config(hf: CheckpointConfig) -> DeciConfig:
    heads, hidden, layers = hf.int("num_attention_heads"), hf.int("hidden_size"), hf.int("num_hidden_layers")
    blocks = hf.list("block_configs", [])
    key_heads = hf.list("layer_key_heads", [_key_heads(block.get("attention", {}), heads) for block in blocks])
    sizes = hf.list("layer_sizes", [_size(block.get("ffn", {}), hidden) for block in blocks])
    if not len(key_heads) == len(sizes) == layers or not any(key_heads):
        raise BadCheckpoint(f"{hf.source}: block_configs lists {len(key_heads)} layers, and there are {layers}")
    most = max(key_heads)
    if uneven := {count for count in key_heads if count and most % count}:
        raise Unsupported(f"layers have {sorted(uneven)} and {most} key heads", "these must divide each other")
    hf = hf.with_values({"num_key_value_heads": most, "intermediate_size": max(sizes)})
    return DeciConfig(
        **llama.config_fields(hf) | {"kinds": tuple(ATTENTION if count else NO_ATTENTION for count in key_heads)},
        key_heads=tuple(key_heads),
        sizes=tuple(sizes),
    )


def _key_heads(attention: Mapping[str, Any], heads: int) -> int:
    if attention.get("replace_with_linear"):
        raise Unsupported("a layer has a linear layer instead of attention")
    if attention.get("no_op"):
        return 0
    group = attention.get("n_heads_in_group")
    if not isinstance(group, int) or group < 1 or heads % group:
        raise BadCheckpoint(f"n_heads_in_group of a layer is {group}, and there are {heads} heads")
    return heads // group


def _size(ffn: Mapping[str, Any], hidden: int) -> int:
    if ffn.get("replace_with_linear"):
        raise Unsupported("a layer has a linear layer instead of its feed-forward layer")
    if ffn.get("no_op"):
        return 0
    factor = ffn.get("ffn_mult")
    if not isinstance(factor, int | float) or not 0 < factor < 1024:
        raise BadCheckpoint(f"ffn_mult of a layer is {factor}, and it must be above 0 and below 1024")
    return -(-int(2 * factor * hidden / 3) // UNIT) * UNIT


def layer_specs(c: DeciConfig, layer: int) -> TensorSpecs:
    keys, size = c.key_heads[layer], c.sizes[layer]
    specs = llama.layer_specs(replace(c, kv_heads=keys or c.kv_heads, intermediate=size or c.intermediate))
    absent = (*(() if keys else ATTENTION_TENSORS), *(() if size else MLP_TENSORS))
    return {name: spec for name, spec in specs.items() if name not in absent}


@dataclass(frozen=True, slots=True)
class DeciLayer(llama.LlamaLayer):
    qkv: Any = None
    out: Any = None
    gate_up: Any = None
    down: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: DeciConfig, max_model_len: int) -> LoadedModel:
    unused = "|".join([llama.UNUSED, llama.ROPE_FACTORS, *(["lm_head.weight"] if config.tied else [])])
    layers = {f"model.layers.{layer}.": layer_specs(config, layer) for layer in range(config.layers)}
    top, loaded = load_weights(ops, checkpoint, llama.top_specs(config), layers, unused)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len, llama.rope_factors(checkpoint)))
    weights = llama.LlamaWeights(**top, layers=[DeciLayer(**layer) for layer in loaded], rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *loaded])


def forward(c: DeciConfig, w: llama.LlamaWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        if layer.qkv is not None:
            x = ops.add(x, attention(c, layer, index, ops, ops.rms_norm(x, layer.attn_norm, c.eps), angles, batch))
        if layer.gate_up is not None:
            x = ops.add(x, llama.mlp(c, layer, ops, ops.rms_norm(x, layer.mlp_norm, c.eps)))
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch)


def attention(c: DeciConfig, layer: DeciLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    keys, cached = c.key_heads[index], c.index_of_kind(index)
    q, k, v = ops.split(ops.linear(x, layer.qkv), (c.q_size, keys * c.head_dim, keys * c.head_dim))
    k = ops.rope(k, angles, c.head_dim)
    k, v = (widened(ops, part, keys, c.head_dim, c.head_dim, c.kv_heads // keys) for part in (k, v))
    ops.write_kv(k, v, batch, cached)
    attended = ops.paged_attention(ops.rope(q, angles, c.head_dim), batch, cached, c.head_dim, 1 / sqrt(c.head_dim))
    return ops.linear(attended, layer.out)
