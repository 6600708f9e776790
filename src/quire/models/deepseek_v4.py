"""DeepSeek V4: compressed attention, several residual streams, and experts that the token itself may choose.

All heads share one vector a token, which is key and value. A token attends to those before it in a window, as they are;
of everything before, to entries. An entry is a mean of the tokens of a group, weighted by gates that are computed from
them. Layers are of three kinds: `sliding_attention` has no entries; `heavily_compressed_attention` has one for every
128 tokens, and attends to all of them; `compressed_sparse_attention` has one for every 4 (a mean over these and the 4
before, of other columns), and attends to those that an indexer chooses, whose keys are entries of their own.

Since the vectors are rotated, values are too: what a head has attended to is rotated back, by its own position. An
entry has the position of its first token.

What flows from layer to layer are `hc_mult` residual streams (hyper-connections): a layer reads a weighted sum of them,
its output is added to each with a weight, and they are mixed by a doubly stochastic matrix. All these weights are
computed from the streams."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.models.config import ModelConfig
from quire.models.constant_weights import Ones
from quire.models.llama import UNUSED
from quire.models.loading import (
    EmbeddingTable,
    ExpertLinear,
    Linear,
    LinearPart,
    LoadedModel,
    TensorSpec,
    TensorSpecs,
    Vector,
    load_weights,
)
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.dequantize import as_floats, dequantize
from quire.ops.kv_spec import CompressedLayer, CompressedSpec
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # by the ratio that configurations give a layer
HASHED, ROUTED = "hash_moe", "moe"
SCORINGS = {"sqrtsoftplus": "sqrt softplus", "softmax": "softmax", "sigmoid": "sigmoid"}
DEFAULT_ROPE_SHARE = 64 / 512  # of the columns of a head
LEAST_LIMIT = 1.0  # of SwiGLU: below, it would clamp what SiLU gives of numbers below zero

# The authors' names -> those of transformers, one after the other.
RENAMED = (
    (r"^model\.", ""),
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn_sink$", ".sinks"),
    (r"(\.self_attn\..*|\.self_attn)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"(_hc\.fn|\.hc_fn)$", r"\1.weight"),
    (r"^(?!lm_head\.|mtp\.)", "model."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(ModelConfig):
    """`layer_kinds`, `hashed`: of each layer. `groups`: tokens of an entry, by the kind of layer."""

    layer_kinds: tuple[str, ...]
    groups: Mapping[str, int]
    sliding_window: int
    rope_dim: int  # the last columns of a head are rotated
    rope: RopeSpec  # of layers without entries
    compressed_rope: RopeSpec
    q_lora_rank: int
    out_groups: int  # of heads, whose outputs are multiplied by matrices of their own
    out_rank: int  # columns of the result for each
    index_heads: int
    index_columns: int
    index_top_k: int  # 0: no context is so long that an indexer would leave something out
    streams: int
    stream_eps: float
    stream_iterations: int
    eps: float
    tied: bool
    hashed: tuple[bool, ...]  # the experts are those that a table has for the token's id
    num_experts: int
    expert_size: int
    shared_size: int
    routing: Routing

    def group(self, layer: int) -> int:
        return self.groups.get(self.layer_kinds[layer], 0)

    def is_indexed(self, layer: int) -> bool:
        return self.layer_kinds[layer] == SPARSE and self.index_top_k > 0

    @property
    def residual(self) -> int:
        return self.streams * self.hidden

    @property
    def head_order(self) -> NDArray[np.int32]:
        """Of the columns of a head."""
        return rope_first(self.head_dim, self.rope_dim)

    def at_length(self, length: int) -> "DeepseekV4Config":
        if self.index_top_k and length // self.groups[SPARSE] <= self.index_top_k:
            return with_cache(replace(self, index_top_k=0))
        return self


def rope_first(columns: int, rope_dim: int) -> NDArray[np.int32]:
    """The checkpoint rotates pairs of neighbours among the last columns. We rotate column i with column i + rope_dim /
    2, among the first."""
    order = np.arange(columns, dtype=np.int32)
    rotated = order[columns - rope_dim :]
    return np.concatenate([rotated[::2], rotated[1::2], order[: columns - rope_dim]])


def with_cache(c: DeepseekV4Config) -> DeepseekV4Config:
    """With the shape of the cache that goes with the other numbers."""
    layers, reach = [], c.sliding_window
    for layer, kind in enumerate(c.layer_kinds):
        if not (group := c.group(layer)):
            layers.append(CompressedLayer(c.head_dim))
            continue
        parts = (c.head_dim, c.index_columns) if c.is_indexed(layer) else (c.head_dim,)
        overlap = 2 if kind == SPARSE else 1
        layers.append(CompressedLayer(c.head_dim + 2 * overlap * sum(parts), group, parts))
        reach = max(reach, overlap * group)
    return replace(c, compressed=CompressedSpec(tuple(layers), reach))


def config(hf: CheckpointConfig) -> DeepseekV4Config:
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False, None)
    hf.expect("mlp_bias", False, None)
    hf.expect("num_key_value_heads", 1)
    hf.expect("norm_topk_prob", True, None)
    layers, head_dim = hf.int("num_hidden_layers"), hf.int("head_dim")
    rope_dim = hf.int("qk_rope_head_dim", int(head_dim * hf.float("partial_rotary_factor", DEFAULT_ROPE_SHARE)))
    rope, compressed_rope = read_ropes(hf, rope_dim)
    kinds, groups = read_kinds(hf, layers), read_groups(hf)
    expert_size = hf.int("moe_intermediate_size")
    index_columns = hf.int("index_head_dim", 128)
    heads, out_groups = hf.int("num_attention_heads"), hf.int("o_groups")
    if not 0 < rope_dim <= min(head_dim, index_columns) or rope_dim % 2 or out_groups < 1 or heads % out_groups:
        raise BadCheckpoint(
            f"{rope_dim} of {head_dim} columns, and of {index_columns} of the indexer, are rotated, and {heads} heads "
            f"are in {out_groups} groups"
        )
    c = DeepseekV4Config(
        architecture=hf.architecture,
        hidden=hf.int("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        latent=head_dim,
        vocab=hf.int("vocab_size"),
        max_position=compressed_rope.default_length,
        max_length=compressed_rope.max_length,
        windows=(0,) * layers,
        layer_kinds=kinds,
        groups=groups,
        sliding_window=hf.int("sliding_window", minimum=1),
        rope_dim=rope_dim,
        rope=rope,
        compressed_rope=compressed_rope,
        q_lora_rank=hf.int("q_lora_rank"),
        out_groups=out_groups,
        out_rank=hf.int("o_lora_rank"),
        index_heads=hf.int("index_n_heads", 64, minimum=1),
        index_columns=index_columns,
        index_top_k=hf.int("index_topk", 512, minimum=1) if SPARSE in kinds else 0,
        streams=hf.int("hc_mult", 4, minimum=1),
        stream_eps=hf.float("hc_eps", 1e-6),
        stream_iterations=hf.int("hc_sinkhorn_iters", 20, minimum=1),
        eps=hf.float("rms_norm_eps", 1e-6),
        tied=hf.bool("tie_word_embeddings", False),
        hashed=read_hashed(hf, layers),
        num_experts=hf.int("n_routed_experts"),
        expert_size=expert_size,
        shared_size=hf.int("n_shared_experts", 1, minimum=1) * expert_size,
        routing=read_routing(hf),
    )
    return with_cache(c)


def read_ropes(hf: CheckpointConfig, rope_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of layers without entries, and of those with entries, which alone are scaled: cos and sin are not."""
    scaling = {"attention_factor": 1.0, **hf.dict("rope_scaling", {})}
    cleared = {"rope_scaling": None, "partial_rotary_factor": None}
    thetas = hf.float("rope_theta", 10_000.0), hf.float("compress_rope_theta", 160_000.0)
    main, compressed = (hf.with_values({**cleared, "rope_theta": theta}) for theta in thetas)
    length = hf.int("max_position_embeddings")
    return (
        read_rope(main, rope_dim, length),
        read_rope(compressed.with_values({"rope_scaling": scaling}), rope_dim, length),
    )


def read_kinds(hf: CheckpointConfig, layers: int) -> tuple[str, ...]:
    default = [HEAVY, HEAVY, *(SPARSE if layer % 2 else HEAVY for layer in range(layers))]
    given = [KINDS.get(ratio, ratio) for ratio in hf.list("compress_ratios", [])] or default
    kinds = hf.list("layer_types", given)[:layers]
    if len(kinds) != layers or not {*kinds} <= {*KINDS.values()}:
        raise BadCheckpoint(
            f"layer_types has {len(kinds)} layers of {', '.join(map(str, dict.fromkeys(kinds)))}; it needs {layers}, "
            f"each {', '.join(KINDS.values())}"
        )
    return tuple(kinds)


def read_groups(hf: CheckpointConfig) -> dict[str, int]:
    rates = hf.section("compress_rates")
    keys = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    defaults = {kind: ratio for ratio, kind in KINDS.items()}
    return {kind: hf.int(key, rates.int(kind, defaults[kind]), minimum=1) for kind, key in keys.items()}


def read_hashed(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    count = hf.int("num_hash_layers", 3)
    kinds = hf.list("mlp_layer_types", [HASHED if layer < count else ROUTED for layer in range(layers)])[:layers]
    if len(kinds) != layers or not {*kinds} <= {HASHED, ROUTED}:
        raise BadCheckpoint(f"mlp_layer_types is {kinds}; it needs {layers}, each {HASHED} or {ROUTED}")
    return tuple(kind == HASHED for kind in kinds)


def read_routing(hf: CheckpointConfig) -> Routing:
    limit = hf.float("swiglu_limit", 10.0)
    if limit and limit < LEAST_LIMIT:
        raise BadCheckpoint(f"swiglu_limit is {limit}, and it is 0 or at least {LEAST_LIMIT}")
    scoring = SCORINGS[hf.expect("scoring_func", *SCORINGS, None) or "sqrtsoftplus"]
    routing = Routing(
        hf.int("num_experts_per_tok"),
        cast(Any, scoring),
        renormalize=True,
        scale=hf.float("routed_scaling_factor", 1.5),
        limit=limit,
        gate_limit=limit / (1 + math.exp(-limit)),  # what SiLU gives of a gate at the limit
    )
    routing.check(hf.int("n_routed_experts"))
    return routing


# -- tensors


class AuthorsCheckpoint(RenamedCheckpoint):
    """Tables of experts are integers."""

    def tensor(self, name: str) -> StoredTensor:
        if not name.endswith(".tid2eid"):
            return super().tensor(name)
        experts = cast(HuggingFaceCheckpoint, self._checkpoint).integers(self._names[name])
        return stored_floats(name, experts.astype(np.float32))


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    if not checkpoint.names():  # a DummyCheckpoint
        return checkpoint
    return AuthorsCheckpoint(checkpoint, {new_name(name): name for name in checkpoint.names()})


def new_name(name: str) -> str:
    for pattern, to in RENAMED:
        name = re.sub(pattern, to, name)
    return name


@dataclass(frozen=True, slots=True)
class TokenExperts:
    """The experts of every token: `name` [vocab, top_k]."""

    name: str
    vocab: int
    top_k: int
    num_experts: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.vocab, self.top_k)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        if not tensor.dummy and tensor.data.any():
            experts = dequantize(tensor)
            if experts.min() < 0 or experts.max() >= self.num_experts:
                raise BadCheckpoint(f"{tensor.name} names expert {experts.max():.0f} of {self.num_experts}")
        return ops.table(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class GateBias:
    """Of the gates of a group's tokens: `name` [group, columns]."""

    name: str
    group: int
    order: NDArray[np.int32]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.group, len(self.order))

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        values = dequantize(tensor).reshape(tensor.shape)
        return ops.biases(np.ascontiguousarray(values[:, self.order], np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLinear:
    """A matrix for each group of heads: `name.weight` [groups * outputs, inputs], whose inputs are taken in an
    order."""

    name: str
    groups: int
    num_outputs: int
    order: NDArray[np.int32]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.groups * self.num_outputs, len(self.order))

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedHeads:
        (tensor,) = tensors
        cuts = [as_floats(tensor.part(i * self.num_outputs, self.num_outputs)) for i in range(self.groups)]
        return ops.pack_heads([cut.transposed().ordered(self.order).transposed() for cut in cuts])


def repeated(order: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """The order of `count` parts side by side."""
    return (np.arange(count, dtype=np.int32)[:, None] * len(order) + order).ravel().astype(np.int32)


def top_specs(c: DeepseekV4Config) -> TensorSpecs:
    return {
        "embed": EmbeddingTable("model.embed_tokens", c.vocab, c.hidden),
        "streams_norm": Ones(c.streams * c.hidden),
        "merge": Linear({"model.hc_head.hc_fn": c.streams}, c.streams * c.hidden, keep=Keep.ALL),
        "merge_base": Vector("model.hc_head", c.streams, "hc_base"),
        "merge_scale": Vector("model.hc_head", 1, "hc_scale"),
        "norm": Vector("model.norm", c.hidden),
        "head": Linear({"model.embed_tokens" if c.tied else "lm_head": c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
        "heads_norm": Ones(c.head_dim),
    }


def layer_specs(c: DeepseekV4Config, layer: int, stored: set[str]) -> TensorSpecs:
    order, heads = c.head_order, repeated(c.head_order, c.heads)
    group_inputs = repeated(order, c.heads // c.out_groups)
    attn_in: dict[str, int | LinearPart] = {
        "self_attn.q_a_proj": c.q_lora_rank,
        "self_attn.kv_proj": LinearPart(c.head_dim, order),
    }
    queries = {"self_attn.q_b_proj": LinearPart(c.heads * c.head_dim, heads)}
    return {
        **_stream_specs(c, "attn"),
        "attn_norm": Vector("input_layernorm", c.hidden),
        "attn_in": Linear(attn_in, c.hidden),
        "query_norm": Vector("self_attn.q_a_norm", c.q_lora_rank),
        "query_up": Linear(queries, c.q_lora_rank),
        "key_norm": Vector("self_attn.kv_norm", c.head_dim, order=order),
        "sinks": Vector("self_attn", c.heads, "sinks"),
        **(_entry_specs(c, layer) if c.group(layer) else {}),
        "out_groups": GroupedLinear("self_attn.o_a_proj", c.out_groups, c.out_rank, group_inputs),
        "out": Linear({"self_attn.o_b_proj": c.hidden}, c.out_groups * c.out_rank),
        **_stream_specs(c, "ffn"),
        "mlp_norm": Vector("post_attention_layernorm", c.hidden),
        **_expert_specs(c, layer, stored),
    }


def _stream_specs(c: DeepseekV4Config, part: str) -> TensorSpecs:
    name, columns = f"{part}_hc", (2 + c.streams) * c.streams
    return {
        f"{part}_streams": Linear({f"{name}.fn": columns}, c.streams * c.hidden, keep=Keep.ALL),
        f"{part}_base": Vector(name, columns, "base"),
        f"{part}_scale": Vector(name, 3, "scale"),
    }


def _entry_specs(c: DeepseekV4Config, layer: int) -> TensorSpecs:
    """Kept as they are: an error would change which entries are read. All that is computed from the hidden state is one
    matrix: vectors, then gates; of the indexer the same, and a weight for each of its heads."""
    name, series = "self_attn.compressor", 2 if c.layer_kinds[layer] == SPARSE else 1
    order = repeated(c.head_order, series)
    part = LinearPart(len(order), order)
    inputs: dict[str, int | LinearPart] = {f"{name}.kv_proj": part, f"{name}.gate_proj": part}
    specs: dict[str, TensorSpec] = {
        "entry_bias": GateBias(f"{name}.position_bias", c.group(layer), order),
        "entry_norm": Vector(f"{name}.kv_norm", c.head_dim, order=c.head_order),
    }
    if not c.is_indexed(layer):
        return {**specs, "entry_in": Linear(inputs, c.hidden, keep=Keep.ALL)}
    name, one = f"{name}.indexer", rope_first(c.index_columns, c.rope_dim)
    order, heads = repeated(one, series), repeated(one, c.index_heads)
    part = LinearPart(len(order), order)
    inputs |= {f"{name}.kv_proj": part, f"{name}.gate_proj": part, f"{name}.scorer.weights_proj": c.index_heads}
    queries = {f"{name}.q_b_proj": LinearPart(len(heads), heads)}
    return {
        **specs,
        "entry_in": Linear(inputs, c.hidden, keep=Keep.ALL),
        "index_bias": GateBias(f"{name}.position_bias", c.group(layer), order),
        "index_norm": Vector(f"{name}.kv_norm", c.index_columns, order=one),
        "index_query": Linear(queries, c.q_lora_rank, keep=Keep.ALL),
    }


def _expert_specs(c: DeepseekV4Config, layer: int, stored: set[str]) -> TensorSpecs:
    size, name = c.expert_size, "mlp.experts"
    stacked = f"model.layers.{layer}.{name}.down_proj" in stored
    gate_up = {f"{name}.gate_up_proj": 2 * size}
    if not stacked:
        gate_up = dict.fromkeys((f"{name}.{{}}.gate_proj", f"{name}.{{}}.up_proj"), size)
    down = f"{name}.down_proj" if stacked else f"{name}.{{}}.down_proj"
    shared = {f"mlp.shared_experts.{part}_proj": c.shared_size for part in ("gate", "up")}
    tokens = TokenExperts("mlp.gate.tid2eid", c.vocab, c.routing.top_k, c.num_experts)
    correction = Vector("mlp.gate", c.num_experts, "e_score_correction_bias")
    return {
        "router": Linear({"mlp.gate": c.num_experts}, c.hidden, keep=Keep.ALL),
        **({"token_experts": tokens} if c.hashed[layer] else {"correction": correction}),
        "experts_up": ExpertLinear(gate_up, c.hidden, c.num_experts),
        "experts_down": ExpertLinear({down: c.hidden}, size, c.num_experts),
        "gate_up": Linear(shared, c.hidden),
        "down": Linear({"mlp.shared_experts.down_proj": c.hidden}, c.shared_size),
    }


@dataclass(frozen=True, slots=True)
class Layer:
    attn_streams: PackedWeight
    attn_base: Any
    attn_scale: Any
    attn_norm: Any
    attn_in: PackedWeight  # hidden -> the latent of queries, the vector of the token
    query_norm: Any
    query_up: PackedWeight
    key_norm: Any
    sinks: Any
    out_groups: PackedHeads
    out: PackedWeight
    ffn_streams: PackedWeight
    ffn_base: Any
    ffn_scale: Any
    mlp_norm: Any
    router: PackedWeight
    experts_up: PackedExperts
    experts_down: PackedExperts
    gate_up: PackedWeight  # of the shared experts
    down: PackedWeight
    correction: Any = None
    token_experts: Any = None
    entry_in: PackedWeight | None = None
    entry_bias: Any = None
    entry_norm: Any = None
    index_bias: Any = None
    index_norm: Any = None
    index_query: PackedWeight | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Any
    layers: list[Layer]
    streams_norm: Any
    merge: PackedWeight
    merge_base: Any
    merge_scale: Any
    norm: Any
    head: PackedWeight
    heads_norm: Any
    rope: tuple[Any, Any]  # rotary frequencies, and those that turn back
    compressed_rope: tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Angles:
    """Of a kind of layer: of tokens, back, and of the first token of their groups."""

    own: Value
    back: Value
    group: Value = None


def load(ops: OpSet, checkpoint: Checkpoint, config: DeepseekV4Config, max_model_len: int) -> LoadedModel:
    config = config.at_length(max_model_len)
    checkpoint = renamed(checkpoint)
    stored = set(checkpoint.names())
    by_prefix = {f"model.layers.{layer}.": layer_specs(config, layer, stored) for layer in range(config.layers)}
    ignored = ["lm_head.weight"] if config.tied else []
    ignored += [] if config.index_top_k else [r".*\.compressor\.indexer\..*"]
    top, layers = load_weights(ops, checkpoint, top_specs(config), by_prefix, "|".join([UNUSED, *ignored]))
    ropes: dict[str, Any] = {}
    for name, spec in (("rope", config.rope), ("compressed_rope", config.compressed_rope)):
        inv_freq, scale = frequencies(spec, max_model_len)
        ropes[name] = ops.frequencies(inv_freq, scale), ops.frequencies(-inv_freq, scale)
    own = {field.name for field in fields(Layer)}
    made = [Layer(**{name: value for name, value in layer.items() if name in own}) for layer in layers]
    return LoadedModel(config, partial(forward, config, Weights(**top, layers=made, **ropes)), [top, *layers])


# -- the forward pass


def forward(c: DeepseekV4Config, w: Weights, ops: OpSet, batch: Any) -> Value:
    angles = angles_of(c, w, ops, batch)
    x = ops.concat([ops.embedding(batch.ids, w.embed)] * c.streams)
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        streams = partial(through_streams, c, w, ops)
        mixer = partial(attention, c, w, layer, index, ops, angles=angles[c.layer_kinds[index]], batch=batch)
        x = streams(x, layer.attn_streams, layer.attn_scale, layer.attn_base, layer.attn_norm, mixer)
        mlp = partial(feed_forward, c, layer, ops, batch=batch)
        x = streams(x, layer.ffn_streams, layer.ffn_scale, layer.ffn_base, layer.mlp_norm, mlp)
    ops.tap(x, c.layers)
    merging = ops.linear(ops.rms_norm(x, w.streams_norm, c.eps), w.merge)
    weights = ops.stream_weights(merging, w.merge_scale, w.merge_base, c.streams, c.stream_eps, 0)
    x = ops.rms_norm(ops.merge_streams(x, weights), w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch)


def angles_of(c: DeepseekV4Config, w: Weights, ops: OpSet, batch: Any) -> dict[str, Angles]:
    found = {}
    for kind in dict.fromkeys(c.layer_kinds):
        rope, back = w.rope if kind == SLIDING else w.compressed_rope
        own = ops.rope_angles(batch.positions, rope), ops.rope_angles(batch.positions, back)
        group = c.groups.get(kind)
        found[kind] = Angles(*own, ops.rope_angles(batch.positions, rope, group) if group else None)
    return found


def through_streams(
    c: DeepseekV4Config,
    w: Weights,
    ops: OpSet,
    x: Value,
    mixing: PackedWeight,
    scale: Any,
    base: Any,
    norm: Any,
    layer: Callable[[Value], Value],
) -> Value:
    """x [T, streams * hidden] -> the same, after a layer that reads the streams as one and writes to all of them."""
    mixes = ops.linear(ops.rms_norm(x, w.streams_norm, c.eps), mixing)
    weights = ops.stream_weights(mixes, scale, base, c.streams, c.stream_eps, c.stream_iterations)
    pre, post, matrix = ops.split(weights, (c.streams, c.streams, c.streams**2))
    y = layer(ops.rms_norm(ops.merge_streams(x, pre), norm, c.eps))
    return ops.update_streams(x, y, post, matrix)


def attention(
    c: DeepseekV4Config, w: Weights, layer: Layer, index: int, ops: OpSet, x: Value, *, angles: Angles, batch: Any
) -> Value:
    q_latent, vector = ops.split(ops.linear(x, layer.attn_in), (c.q_lora_rank, c.head_dim))
    q_latent = ops.rms_norm(q_latent, layer.query_norm, c.eps)
    vector = ops.rms_norm(vector, layer.key_norm, c.eps)
    ops.write_tokens(ops.rope(vector, angles.own, c.head_dim), batch, index)
    chosen = entries(c, layer, index, ops, x, q_latent, angles, batch) if layer.entry_in else None
    q = ops.rms_norm(ops.linear(q_latent, layer.query_up), w.heads_norm, c.eps)
    attended = ops.compressed_attention(
        ops.rope(q, angles.own, c.head_dim),
        batch,
        index,
        c.head_dim**-0.5,
        c.sliding_window,
        layer.sinks,
        chosen,
    )
    attended = ops.rope(attended, angles.back, c.head_dim)
    return ops.linear(ops.linear_heads(attended, layer.out_groups), layer.out)


def entries(
    c: DeepseekV4Config, layer: Layer, index: int, ops: OpSet, x: Value, q_latent: Value, angles: Angles, batch: Any
) -> Value | None:
    """Writes the entries of the groups that end in this step. -> those that each token attends to; None: all"""
    assert layer.entry_in is not None
    overlap = c.layer_kinds[index] == SPARSE
    stored = (4 if overlap else 2) * c.head_dim  # of a token, for entries
    made = ops.linear(x, layer.entry_in)
    weights = None
    if c.is_indexed(index):
        made, weights = ops.split(made, (stored + 4 * c.index_columns, c.index_heads))
    ops.write_tokens(made, batch, index, c.head_dim)

    def write(part: int, first: int, columns: int, bias: Any, norm: Any) -> None:
        pooled = ops.pool_group(batch, index, first, columns, bias, overlap)
        entry = ops.rope(ops.rms_norm(pooled, norm, c.eps), angles.group, columns)
        ops.write_entry(entry, batch, index, part)

    write(0, c.head_dim, c.head_dim, layer.entry_bias, layer.entry_norm)
    if weights is None or layer.index_query is None:
        return None
    write(1, c.head_dim + stored, c.index_columns, layer.index_bias, layer.index_norm)
    queries = ops.rope(ops.linear(q_latent, layer.index_query), angles.own, c.index_columns)
    return ops.top_entries(queries, weights, batch, index, c.index_top_k)


def feed_forward(c: DeepseekV4Config, layer: Layer, ops: OpSet, x: Value, *, batch: Any) -> Value:
    by_token = {} if layer.token_experts is None else {"chosen": ops.embedding(batch.ids, layer.token_experts)}
    experts = layer.experts_up, layer.experts_down
    logits = ops.linear(x, layer.router)
    routed = ops.moe(x, logits, *experts, c.routing, Activation.SILU, layer.correction, **by_token)
    gate, up = ops.split(ops.linear(x, layer.gate_up), (c.shared_size, c.shared_size))
    gate = ops.activate(gate, Activation.SILU)
    if c.routing.limit:
        gate, up = ops.clamp(gate, c.routing.gate_limit), ops.clamp(up, c.routing.limit)
    return ops.add(routed, ops.linear(ops.mul(gate, up), layer.down))
