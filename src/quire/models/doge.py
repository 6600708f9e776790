"""Doge: Llama whose scores have a number of the key's token added, and whose residuals are scaled column by column.

The number of a key head is a function of the token's values. Some columns more of a key hold it, and those of a query a
constant, so that it comes with the dot product. Beyond `keep_window_size` tokens, those with the least numbers would
not be seen: contexts are that long at most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

from quire.models import llama
from quire.models.constant_weights import ZERO_COLUMNS, ConstantVector, Repeated, StoredRow, zero_columns
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import Linear, LoadedModel, TensorSpecs, load_weights
from quire.models.rope import frequencies
from quire.models.uneven_heads import narrowed, widened
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = LlamaFamily(expects={"is_moe": (False, None), "sliding_window": (None,)}, qk_norms="heads")
SPARE = ZERO_COLUMNS  # columns of a head that the number of a token takes
HALF = 0.5  # what a query has in these columns: the sigmoid of zero


@dataclass(frozen=True, slots=True, kw_only=True)
class DogeConfig(LlamaConfig):
    """`head_dim` is that of the cache."""

    width: int  # of a head of the checkpoint


def config(hf: CheckpointConfig) -> DogeConfig:
    fields = llama.config_fields(translate(hf, FAMILY), FAMILY)
    longest = hf.int("keep_window_size", 2048)
    return DogeConfig(
        **fields
        | {"head_dim": fields["head_dim"] + SPARE, "width": fields["head_dim"]}
        | {key: min(fields[key], longest) for key in ("max_position", "max_length")}
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """The tensor A of attention, with the other sign: `OpSet.decay` has it as a rate."""

    size: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "self_attn.A", (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.vector(stored_floats("rate", -dequantize(tensors[0]).ravel()))


def layer_specs(c: DogeConfig) -> TensorSpecs:
    narrow = replace(c, head_dim=c.width)
    return {
        **llama.layer_specs(narrow),
        "number": Linear({"self_attn.dt_proj": c.kv_heads}, narrow.kv_size, bias=c.qkv_bias),
        "rate": Rate(c.kv_heads),
        "zero": ConstantVector(c.kv_heads, 0.0),
        "spread": Repeated(c.kv_heads, SPARE),
        "attn_residual": StoredRow("input_residual", c.hidden),
        "mlp_residual": StoredRow("post_attention_residual", c.hidden),
    }


@dataclass(frozen=True, slots=True)
class DogeLayer(llama.LlamaLayer):
    number: Any = None  # of a token, for each key head: exp(A * softplus(a linear layer of its values))
    rate: Any = None
    zero: Any = None
    spread: Any = None
    attn_residual: Any = None
    mlp_residual: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: DogeConfig, max_model_len: int) -> LoadedModel:
    by_prefix = {f"model.layers.{layer}.": layer_specs(config) for layer in range(config.layers)}
    unused = "|".join([llama.UNUSED, *(["lm_head.weight"] if config.tied else [])])
    top, loaded = load_weights(ops, checkpoint, llama.top_specs(config), by_prefix, unused)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    layers = [DogeLayer(**layer) for layer in loaded]
    return LoadedModel(config, partial(forward, config, top, layers, rope), [top, *loaded])


def forward(c: DogeConfig, top: dict[str, Any], layers: list[DogeLayer], rope: Any, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, rope)
    x = ops.embedding(batch.ids, top["embed"])
    zeros = zero_columns(ops, x, c.hidden)
    for index, layer in enumerate(layers):
        ops.tap(x, index)
        h = attention(c, layer, index, ops, ops.rms_norm(x, layer.attn_norm, c.eps), angles, zeros, batch)
        x = ops.add(ops.mul(x, ops.linear(zeros, layer.attn_residual)), h)
        h = llama.mlp(c, layer, ops, ops.rms_norm(x, layer.mlp_norm, c.eps))
        x = ops.add(ops.mul(x, ops.linear(zeros, layer.mlp_residual)), h)
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, top["norm"], c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, top["head"], batch)


def attention(
    c: DogeConfig, layer: DogeLayer, index: int, ops: OpSet, x: Value, angles: Value, zeros: Value, batch: Any
) -> Value:
    narrow, scale = replace(c, head_dim=c.width), 1 / sqrt(c.width)
    q, k, v = llama.queries_keys_values(narrow, layer, index, ops, x, angles, batch)
    number = ops.decay(ops.linear(v, layer.number), layer.zero, layer.rate)
    spread = ops.scale(ops.linear(number, layer.spread), 1 / (SPARE * HALF * scale))
    halves = ops.activate(zeros, Activation.SIGMOID)
    q = _beside(ops, q, c.heads, c.width, [halves] * c.heads)
    k = _beside(ops, k, c.kv_heads, c.width, ops.split(spread, (SPARE,) * c.kv_heads))
    ops.write_kv(k, widened(ops, v, c.kv_heads, c.width, c.head_dim), batch, index)
    attended = ops.paged_attention(q, batch, index, c.head_dim, scale)
    return ops.linear(narrowed(ops, attended, c.heads, c.width, c.head_dim), layer.out)


def _beside(ops: OpSet, x: Value, heads: int, width: int, spare: Sequence[Value]) -> Value:
    """Each head of x with its spare columns behind it."""
    parts = zip(ops.split(x, (width,) * heads), spare, strict=True)
    return ops.concat([piece for pair in parts for piece in pair])
