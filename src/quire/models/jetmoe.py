"""JetMoe: Llama with experts in attention, too: of several query and output projections, each token has a few.

All of them share the keys and values of a layer. Queries are computed for all experts, and the outputs of those that
the router did not choose are multiplied by zero: more arithmetic than it takes, in a model whose attention is small."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.models import llama
from quire.models.constant_weights import StoredRow, zero_columns
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpecs, Vector
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import F16, F32, PackedExperts, PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = LlamaFamily(
    keys={"head_dim": "kv_channels", "hidden_act": "activation_function"}, defaults={"tie_word_embeddings": True}
)
ATTENTION, MLP = "self_attention.experts", "mlp"
ONE_COLUMNS = 8  # of an expert that gives a one


@dataclass(frozen=True, slots=True, kw_only=True)
class JetMoeConfig(LlamaConfig):
    """`heads` are those of all experts of attention."""

    num_experts: int
    routing: Routing


def config(hf: CheckpointConfig) -> JetMoeConfig:
    num_experts, kv_heads = hf.int("num_local_experts", 8), hf.int("num_key_value_heads", 16)
    hf = hf.with_values({"num_attention_heads": num_experts * kv_heads, "num_key_value_heads": kv_heads})
    routing = Routing(hf.int("num_experts_per_tok", 2), renormalize=True)
    routing.check(num_experts)
    return JetMoeConfig(**llama.config_fields(translate(hf, FAMILY), FAMILY), num_experts=num_experts, routing=routing)


@dataclass(frozen=True, slots=True)
class ExpertQueries:
    """The query projections of all experts, by key head: [experts, kv_heads * head_dim, hidden]."""

    config: JetMoeConfig

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{ATTENTION}.input_linear.weight", (self.config.num_experts, self.config.kv_size, self.config.hidden)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        c = self.config
        rows = np.arange(c.q_size, dtype=np.int32).reshape(c.num_experts, c.kv_heads, c.head_dim)
        (tensor,) = tensors
        return ops.pack([replace(tensor, shape=(c.q_size, c.hidden)).ordered(rows.swapaxes(0, 1).ravel())])


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """The output projections of all experts, side by side, by key head: [experts, hidden, kv_heads * head_dim]. They
    are in fp32 if they are stored so, else in fp16."""

    config: JetMoeConfig

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{ATTENTION}.output_linear.weight", (self.config.num_experts, self.config.hidden, self.config.kv_size)
        yield f"{ATTENTION}.bias", (self.config.hidden,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        c, (tensor, bias) = self.config, tensors
        stored = dequantize(tensor).reshape(c.num_experts, c.hidden, c.kv_heads, c.head_dim)
        columns = stored.transpose(1, 2, 0, 3).reshape(c.hidden, c.q_size)
        kind, dtype = (F32, np.float32) if tensor.type is F32 else (F16, np.float16)
        data = np.ascontiguousarray(columns, dtype).view(np.uint8)
        return ops.pack([StoredTensor(tensor.name, columns.shape, kind, data)], [bias])


@dataclass(frozen=True, slots=True)
class OneOfExperts:
    """Experts that give a one in the column of their own number, whatever their input: a router's weights as columns,
    with zeros for the experts that it did not choose. One matrix gives `ONE_COLUMNS` ones, the other their mean."""

    num_experts: int
    down: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedExperts:
        experts = range(self.num_experts)
        if not self.down:
            zeros = stored_floats("zeros", np.zeros((ONE_COLUMNS, self.num_experts), np.float32))
            ones = stored_floats("ones", np.ones(ONE_COLUMNS, np.float32))
            return ops.pack_experts([[zeros] for _ in experts], [[ones] for _ in experts])
        means = np.zeros((self.num_experts, self.num_experts, ONE_COLUMNS), np.float32)
        means[experts, experts] = 1 / ONE_COLUMNS
        return ops.pack_experts([[stored_floats("means", means[expert])] for expert in experts])


@dataclass(frozen=True, slots=True)
class Spread:
    """A matrix that repeats the weight of an expert for all columns of its heads."""

    config: JetMoeConfig

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        c = self.config
        matrix = np.tile(np.repeat(np.eye(c.num_experts, dtype=np.float32), c.head_dim, axis=0), (c.kv_heads, 1))
        return ops.pack([stored_floats("spread", matrix)], keep=Keep.ALL)


def layer_specs(c: JetMoeConfig) -> TensorSpecs:
    return {
        "attn_norm": Vector("input_layernorm", c.hidden),
        "qkv": ExpertQueries(c),
        "kv": Linear({"self_attention.kv_proj": 2 * c.kv_size}, c.hidden),
        "out": ExpertOutputs(c),
        "attn_router": Linear({f"{ATTENTION}.router.layer": c.num_experts}, c.hidden, keep=Keep.ALL),
        "one_up": OneOfExperts(c.num_experts, down=False),
        "one_down": OneOfExperts(c.num_experts, down=True),
        "spread": Spread(c),
        "mlp_norm": Vector("post_attention_layernorm", c.hidden),
        "router": Linear({f"{MLP}.router.layer": c.num_experts}, c.hidden, keep=Keep.ALL),
        "gate_up": ExpertLinear({f"{MLP}.input_linear.weight": 2 * c.intermediate}, c.hidden, c.num_experts),
        "down": ExpertLinear({f"{MLP}.output_linear.weight": c.hidden}, c.intermediate, c.num_experts),
        "mlp_bias": StoredRow(f"{MLP}.bias", c.hidden),
    }


@dataclass(frozen=True, slots=True)
class JetMoeLayer(llama.LlamaLayer):
    """`qkv` are the queries of all experts; `gate_up` and `down` are those of all experts of the MLP."""

    gate_up: Any = None
    down: Any = None
    kv: Any = None
    attn_router: Any = None
    one_up: Any = None
    one_down: Any = None
    spread: Any = None
    router: Any = None
    mlp_bias: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: JetMoeConfig, max_model_len: int) -> LoadedModel:
    layers = [layer_specs(config)] * config.layers
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, JetMoeLayer, feed_forward, mixer=attention)


def attention(
    c: JetMoeConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    q = ops.rope(ops.linear(x, layer.qkv), angles, c.head_dim)
    k, v = ops.split(ops.linear(x, layer.kv), (c.kv_size, c.kv_size))
    ops.write_kv(ops.rope(k, angles, c.head_dim), v, batch, index)
    attended = ops.paged_attention(q, batch, index, c.head_dim, c.head_dim**-0.5)
    logits = ops.linear(x, layer.attn_router)
    weights = ops.moe(logits, logits, layer.one_up, layer.one_down, c.routing, Activation.RELU)
    return ops.linear(ops.mul(attended, ops.linear(weights, layer.spread)), layer.out)


def feed_forward(c: JetMoeConfig, layer: Any, ops: OpSet, x: Value) -> Value:
    routed = ops.moe(x, ops.linear(x, layer.router), layer.gate_up, layer.down, c.routing, c.activation)
    return ops.add(routed, ops.linear(zero_columns(ops, x, c.hidden), layer.mlp_bias))
