"""DiffLlama: Llama with differential attention, whose output is the difference of two.

A value is as wide as two heads: one of the first half of the value heads and one of the second. The cache keeps the
keys of a layer twice, beside the one and beside the other, as if the layer were two; so a query head attends twice. The
outputs of the second half of the query heads are then subtracted from those of the first, by a factor of the layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models import llama
from quire.models.constant_weights import Ones
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel
from quire.ops.dequantize import dequantize
from quire.ops.opset import OpSet, Value
from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = LlamaFamily()
FACTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffLlamaConfig(LlamaConfig):
    @property
    def kv_layers(self) -> int:
        return 2 * self.layers

    @property
    def kv_windows(self) -> tuple[int, ...]:
        return (0,) * self.kv_layers


def config(hf: CheckpointConfig) -> DiffLlamaConfig:
    fields = llama.config_fields(translate(hf, FAMILY), FAMILY)
    if fields["heads"] % 2 or fields["kv_heads"] % 2:
        raise BadCheckpoint(
            f"{fields['heads']} query heads and {fields['kv_heads']} key heads do not make pairs, whose attention is "
            "subtracted"
        )
    return DiffLlamaConfig(**fields)


def first_factor(layer: int) -> float:
    return 0.8 - 0.6 * exp(-0.3 * layer)


@dataclass(frozen=True, slots=True)
class Lambda:
    """The factor of what is subtracted in a layer, out of four vectors."""

    layer: int
    head_dim: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((f"self_attn.{name}", (self.head_dim,)) for name in FACTORS)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> float:
        q1, k1, q2, k2 = (dequantize(tensor).ravel().astype(np.float64) for tensor in tensors)
        return exp(q1 @ k1) - exp(q2 @ k2) + first_factor(self.layer)


@dataclass(frozen=True, slots=True)
class DiffLlamaLayer(llama.LlamaLayer):
    factor: float = 0.0  # of the attention that is subtracted
    head_norm: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: DiffLlamaConfig, max_model_len: int) -> LoadedModel:
    specs = {**llama.layer_specs(config, set(checkpoint.names())), "head_norm": Ones(2 * config.head_dim)}
    layers = [{**specs, "factor": Lambda(layer, config.head_dim)} for layer in range(config.layers)]
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, DiffLlamaLayer, mixer=attention)


def attention(
    c: DiffLlamaConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    q, k, v = llama.queries_keys_values(c, layer, index, ops, x, angles, batch)
    values = ops.split(v, (c.head_dim,) * c.kv_heads)
    parts = []  # of a value, side by side: the difference of two attentions, [T, heads / 2 * head_dim]
    for half in range(2):
        own = list(values[half * c.kv_heads // 2 : (half + 1) * c.kv_heads // 2])
        ops.write_kv(k, ops.concat(own * 2), batch, 2 * index + half)
        attended = ops.paged_attention(q, batch, 2 * index + half, c.head_dim, 1 / sqrt(c.head_dim))
        first, second = ops.split(attended, (c.q_size // 2, c.q_size // 2))
        parts.append(ops.split(ops.add(first, ops.scale(second, -layer.factor)), (c.head_dim,) * (c.heads // 2)))
    heads = ops.concat([part for head in zip(*parts, strict=True) for part in head])
    normed = ops.rms_norm(heads, layer.head_norm, c.eps)
    return ops.linear(ops.scale(normed, 1 - first_factor(index)), layer.out)
