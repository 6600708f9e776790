"""Gemma 3n: four streams of hidden states of which a layer computes one (AltUp), a low-rank path beside attention
(Laurel), layers that read the keys and values of others, and an input for every layer (per_layer_inputs.py).

A layer predicts all streams as mixtures of all, computes the first, and corrects the others by what the prediction of
the first missed. The coefficients of both are numbers a token; a matrix whose rows are repeated makes them columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, per_layer_inputs
from quire.models.constant_weights import Constant, ConstantVector, Ones
from quire.models.gemma_layers import kinds, kv_sources, unused_keys
from quire.models.layer_patterns import window_except_every
from quire.models.llama import LlamaConfig
from quire.models.llama_families import GEMMA_NORMS, LlamaFamily, root_of_hidden, translate
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpec, TensorSpecs, Vector, load_weights
from quire.models.rope import frequencies
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

TINY = 1e-30  # added to a mean of squares that is not zero
SCALE = "altup.correct_output_scale"


def scales(hf: CheckpointConfig) -> dict[str, float]:
    return {
        "embed_scale": root_of_hidden(hf),
        "score_scale": 1.0,
        "logit_cap": hf.float("final_logit_softcapping", 30.0),
    }


def alike_in_all_layers(hf: CheckpointConfig) -> CheckpointConfig:
    """`intermediate_size` is listed for each layer; those of published models are all the same."""
    sizes = hf.get("intermediate_size")
    if not isinstance(sizes, list):
        return hf
    if len(set(sizes)) != 1:
        raise Unsupported(f"{hf.source}: intermediate_size is {sizes}", "one size for all layers is supported")
    return hf.with_values({"intermediate_size": sizes[0]})


FAMILY = LlamaFamily(
    defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0},
    expects={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "altup_active_idx": (0, None),
        "rope_local_scaling": (None,),
    },
    adapt=alike_in_all_layers,
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    scales=scales,
    windows=window_except_every(5),
    default_window=512,
    local_rope=True,
    qk_norms="heads",
    norms=GEMMA_NORMS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig(LlamaConfig):
    sources: tuple[int, ...]  # the layer whose keys and values each layer reads
    input_size: int  # of the input of each layer
    input_rows: int  # of the table of these inputs
    streams: int
    stacked_streams: bool  # the matrices between streams are in one tensor: in GGUF files
    scaled_correction: bool  # what gates a layer's input is scaled column by column
    laurel_rank: int
    cutoffs: tuple[float | None, ...]  # for each layer: gates so many standard deviations above their mean count


def config(hf: CheckpointConfig) -> Gemma3nConfig:
    hf = translate(hf.with_values({"rope_local_base_freq": hf.get("rope_local_base_freq", 10_000.0)}), FAMILY)
    base = llama.config_fields(hf, FAMILY)
    layers, sources = base["layers"], kv_sources(hf, base["windows"])
    streams = hf.int("altup_num_inputs", 4, minimum=2)
    return Gemma3nConfig(
        **base | {"kinds": kinds(sources)},
        sources=sources,
        input_size=hf.int("hidden_size_per_layer_input", 256),
        input_rows=hf.int("vocab_size_per_layer_input", base["vocab"]),
        streams=streams,
        stacked_streams=hf.bool("stacked_streams", False),
        scaled_correction=hf.bool("altup_correct_scale", True),
        laurel_rank=hf.int("laurel_rank", 64),
        cutoffs=_cutoffs(hf, layers),
    )


def _cutoffs(hf: CheckpointConfig, layers: int) -> tuple[float | None, ...]:
    """`activation_sparsity_pattern`: for each layer, the share of gates that are zero if gates are normal."""
    if "activation_cutoffs" in hf:  # in GGUF files
        return tuple(hf.list("activation_cutoffs"))
    given = hf.get("activation_sparsity_pattern")
    if given is None:
        num_sparse = 10 if layers > 10 else 0
        given = [0.95] * num_sparse + [0.0] * (layers - num_sparse)
    shares = given if isinstance(given, list) else [given] * layers
    if len(shares) != layers or not all(isinstance(share, int | float) and 0 <= share < 1 for share in shares):
        raise BadCheckpoint(f"{hf.source}: activation_sparsity_pattern is {given}, not a share for each layer")
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


# -- tensors -----------------------------------------------------------------------------------------------------------


def top_specs(c: Gemma3nConfig) -> TensorSpecs:
    others = range(c.streams - 1)
    return {
        **llama.top_specs(c),
        **per_layer_inputs.top_specs(c.hidden, c.layers, c.input_size, c.vocab, c.input_rows),
        **{f"stream_in_{i}": _stream(c, "model.altup_projections", i) for i in others},
        **{f"stream_out_{i}": _stream(c, "model.altup_unembed_projections", i) for i in others},
        "ones": Ones(c.hidden),
        "mean": Constant(1, c.hidden, 1 / c.hidden),
        "spread": Constant(c.hidden, 1),
        "gate_mean": Constant(1, c.intermediate, 1 / c.intermediate),
        "gate_spread": Constant(c.intermediate, 1),
    }


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """The linear layer `index` of several of one shape, all in one tensor: `name.weight` [count, outputs, inputs]."""

    name: str
    index: int
    count: int
    size: int  # of inputs and outputs

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.count, self.size, self.size)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        return ops.pack([tensors[0].part(self.index, 1).squeezed()])


def _stream(c: Gemma3nConfig, name: str, index: int) -> TensorSpec:
    """The matrix that makes another stream of the first, or, at the end, what is added to the first of another."""
    if c.stacked_streams:
        return StackedLinear(name, index, c.streams - 1, c.hidden)
    return Linear({f"{name}.{index}": c.hidden}, c.hidden)


def layer_specs(c: Gemma3nConfig, layer: int) -> TensorSpecs:
    specs: dict[str, TensorSpec] = {
        **llama.layer_specs(c),
        **per_layer_inputs.layer_specs(c.hidden, c.input_size),
        "router": Linear({"altup.modality_router": c.streams}, c.hidden, keep=Keep.ALL),
        "router_norm": Vector("altup.router_norm", c.hidden),
        "predicted": _columns(c, "altup.prediction_coefs", c.streams**2),
        "corrected": _columns(c, "altup.correction_coefs", c.streams),
        "laurel_left": Linear({"laurel.linear_left": c.laurel_rank}, c.hidden),
        "laurel_right": Linear({"laurel.linear_right": c.hidden}, c.laurel_rank),
        "laurel_norm": Vector("laurel.post_laurel_norm", c.hidden),
    }
    if c.scaled_correction:
        gate = per_layer_inputs.ScaledLinear("per_layer_input_gate", SCALE, c.input_size, c.hidden)
        specs["input_gate"] = gate
    if (cutoff := c.cutoffs[layer]) is not None:
        specs["cutoff"] = ConstantVector(c.intermediate, -cutoff)
    if c.sources[layer] == layer:
        specs["v_norm"] = Ones(c.head_dim)
    else:
        del specs["k_norm"]
        specs["qkv"] = Linear({"self_attn.q_proj": c.q_size}, c.hidden, bias=c.qkv_bias)
    return specs


def _columns(c: Gemma3nConfig, name: str, count: int) -> Linear:
    """`count` coefficients a token, each in as many columns as a stream has."""
    order = np.repeat(np.arange(count, dtype=np.int32), c.hidden)
    return Linear({name: LinearPart(count * c.hidden, order, num_stored=count)}, c.streams, keep=Keep.ALL)


@dataclass(frozen=True, slots=True)
class Gemma3nLayer(llama.LlamaLayer):
    """`qkv` has only queries where the layer reads the keys and values of another."""

    v_norm: Any = None
    router: Any = None
    router_norm: Any = None
    predicted: Any = None
    corrected: Any = None
    laurel_left: Any = None
    laurel_right: Any = None
    laurel_norm: Any = None
    input_gate: Any = None
    input_projection: Any = None
    input_norm: Any = None
    cutoff: Any = None  # negative, for each gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nWeights(llama.LlamaWeights):
    layer_table: Any
    layer_projection: PackedWeight
    layer_projection_norm: Any
    streams_in: Sequence[PackedWeight]
    streams_out: Sequence[PackedWeight]
    ones: Any
    mean: PackedWeight  # the mean of a row, and
    spread: PackedWeight  # a number in every column
    gate_mean: PackedWeight
    gate_spread: PackedWeight


def load(ops: OpSet, checkpoint: Checkpoint, config: Gemma3nConfig, max_model_len: int) -> LoadedModel:
    unscaled = [] if config.scaled_correction else [rf".*\.{SCALE}"]
    unused = [llama.UNUSED, *unused_keys(config.sources), *unscaled, *(["lm_head.weight"] if config.tied else [])]
    layers = {f"model.layers.{layer}.": layer_specs(config, layer) for layer in range(config.layers)}
    top, loaded = load_weights(ops, checkpoint, top_specs(config), layers, "|".join(unused))
    assert config.local_rope is not None
    weights = Gemma3nWeights(
        **{name: weight for name, weight in top.items() if not name.startswith("stream_")},
        streams_in=[top[f"stream_in_{i}"] for i in range(config.streams - 1)],
        streams_out=[top[f"stream_out_{i}"] for i in range(config.streams - 1)],
        layers=[Gemma3nLayer(**layer) for layer in loaded],
        rope=ops.frequencies(*frequencies(config.rope, max_model_len)),
        local_rope=ops.frequencies(*frequencies(config.local_rope, max_model_len)),
    )
    return LoadedModel(config, partial(forward, config, weights), [top, *loaded])


# -- forward pass ------------------------------------------------------------------------------------------------------


def forward(c: Gemma3nConfig, w: Gemma3nWeights, ops: OpSet, batch: Any) -> Value:
    angles, local = ops.rope_angles(batch.positions, w.rope), ops.rope_angles(batch.positions, w.local_rope)
    first = ops.scale(ops.embedding(batch.ids, w.embed), c.embed_scale)
    inputs = per_layer_inputs.per_layer_inputs(c, w, ops, batch, first)
    others = tuple(ops.linear(first, weight) for weight in w.streams_in)
    streams = [first, *as_long_as(first, others, w, ops)]
    for index in range(c.layers):
        ops.tap(streams[0], index)
        rope = local if c.windows[index] else angles
        streams = block(c, w, index, ops, streams, inputs[index], rope, batch)
    ops.tap(streams[0], c.layers)
    others = tuple(ops.linear(x, out) for x, out in zip(streams[1:], w.streams_out, strict=True))
    x = streams[0]
    for other in as_long_as(streams[0], others, w, ops):
        x = ops.add(x, other)
    x = ops.rms_norm(ops.scale(x, 1 / c.streams), w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch, c.logit_cap)


def as_long_as(x: Value, others: Sequence[Value], w: Gemma3nWeights, ops: OpSet) -> list[Value]:
    """The others, scaled to the root mean square of x, which is the mean of x times x normed."""
    mean = ops.linear(ops.mul(x, ops.rms_norm(x, w.ones, TINY)), w.mean)
    length = ops.linear(mean, w.spread)
    return [ops.mul(ops.rms_norm(other, w.ones, TINY), length) for other in others]


def block(
    c: Gemma3nConfig, w: Gemma3nWeights, index: int, ops: OpSet, streams: Sequence[Value], layer_input: Value,
    rope: Value, batch: Any,
) -> list[Value]:  # fmt: skip
    layer = w.layers[index]
    predictions = predict(c, layer, ops, streams)
    x = ops.rms_norm(predictions[0], layer.attn_norm, c.eps)
    laurel = ops.linear(ops.linear(x, layer.laurel_left), layer.laurel_right)
    laurel = ops.add(x, ops.rms_norm(laurel, layer.laurel_norm, c.eps))
    attended = ops.rms_norm(attention(c, layer, index, ops, x, rope, batch), layer.post_attn_norm, c.eps)
    x = ops.scale(ops.add(ops.add(predictions[0], attended), laurel), sqrt(0.5))
    h = mlp(c, w, layer, ops, ops.rms_norm(x, layer.mlp_norm, c.eps))
    x = ops.add(x, ops.rms_norm(h, layer.post_mlp_norm, c.eps))
    first, *others = correct(c, layer, ops, predictions, x)
    added = per_layer_inputs.projected_input(ops, first, layer, layer_input, c.eps)
    return [first, *(ops.add(other, added) for other in others)]


def modalities(c: Gemma3nConfig, layer: Gemma3nLayer, ops: OpSet, x: Value) -> Value:
    routed = ops.linear(ops.scale(ops.rms_norm(x, layer.router_norm, c.eps), 1 / c.hidden), layer.router)
    return ops.activate(routed, Activation.TANH)


def predict(c: Gemma3nConfig, layer: Gemma3nLayer, ops: OpSet, streams: Sequence[Value]) -> list[Value]:
    """Stream i plus the sum over j of coefficient [i, j] times stream j."""
    coefficients = ops.linear(modalities(c, layer, ops, streams[0]), layer.predicted)
    columns = ops.split(coefficients, (c.hidden,) * c.streams**2)
    predictions = []
    for i, x in enumerate(streams):
        for j, other in enumerate(streams):
            x = ops.add(x, ops.mul(columns[i * c.streams + j], other))
        predictions.append(x)
    return predictions


def correct(
    c: Gemma3nConfig, layer: Gemma3nLayer, ops: OpSet, predictions: Sequence[Value], computed: Value
) -> list[Value]:
    """Prediction i plus (1 + coefficient i) times the difference of what was computed and predicted."""
    missed = ops.add(computed, ops.scale(predictions[0], -1.0))
    coefficients = ops.linear(modalities(c, layer, ops, computed), layer.corrected)
    columns = ops.split(coefficients, (c.hidden,) * c.streams)
    return [
        ops.add(ops.add(prediction, missed), ops.mul(missed, column))
        for prediction, column in zip(predictions, columns, strict=True)
    ]


def attention(
    c: Gemma3nConfig, layer: Gemma3nLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any
) -> Value:
    source = c.sources[index]
    if source == index:
        q, k, v = ops.split(ops.linear(x, layer.qkv), (c.q_size, c.kv_size, c.kv_size))
        k = ops.rope(ops.rms_norm(k, layer.k_norm, c.eps), angles, c.head_dim)
        ops.write_kv(k, ops.rms_norm(v, layer.v_norm, c.eps), batch, source)
    else:
        q = ops.linear(x, layer.qkv)
    q = ops.rope(ops.rms_norm(q, layer.q_norm, c.eps), angles, c.head_dim)
    attended = ops.paged_attention(q, batch, source, c.head_dim, 1.0, c.windows[index])
    return ops.linear(attended, layer.out)


def mlp(c: Gemma3nConfig, w: Gemma3nWeights, layer: Gemma3nLayer, ops: OpSet, x: Value) -> Value:
    if layer.cutoff is None:
        return llama.mlp(c, layer, ops, x)
    gate, up = ops.split(ops.linear(x, layer.gate_up), (c.intermediate,) * 2)
    above = ops.activate(ops.layer_norm(gate, None, layer.cutoff, TINY), Activation.RELU)
    # In units of the standard deviation, which is the mean of the gates times the gates in such units.
    deviation = ops.linear(ops.mul(gate, ops.layer_norm(gate, None, None, TINY)), w.gate_mean)
    gate = ops.activate(ops.mul(above, ops.linear(deviation, w.gate_spread)), Activation.GELU_TANH)
    return ops.linear(ops.mul(gate, up), layer.down)
