"""Zamba2: Mamba 2, and a few blocks of attention and a feed-forward layer that many layers share.

A hybrid layer gives such a block its input beside the embeddings, and its mixer the sum of both. Blocks are taken in
turn; what differs between two uses of one are small matrices, `adapters`, added to its linear layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.activations import read_activation
from quire.models.config import ModelConfig
from quire.models.loading import EmbeddingTable, Linear, LoadedModel, TensorSpec, TensorSpecs, Vector, load_weights
from quire.models.mamba2_mixer import MAMBA, Mamba2Shape, mixer, mixer_specs
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

HYBRID = "hybrid"
KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "hybrid": HYBRID}
GATED_NORM_EPS = 1e-5
UNUSED = r"model\.layers\.\d+\.shared_transformer\..*|lm_head.weight"  # blocks may be stored once for each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(ModelConfig):
    mamba: Mamba2Shape
    eps: float
    intermediate: int
    activation: Activation
    num_blocks: int  # that hybrid layers share
    rank: int  # of adapters
    attention_adapters: bool
    rope: RopeSpec | None
    bias: bool

    @property
    def kv_layers(self) -> int:
        return self.kinds.count(HYBRID)


def config(hf: CheckpointConfig) -> Zamba2Config:
    hidden, heads, layers = hf.int("hidden_size"), hf.int("num_attention_heads"), hf.int("num_hidden_layers")
    kinds = hf.list("layers_block_type", hf.list("layer_types", []))
    if unknown := sorted({str(kind) for kind in kinds} - KINDS.keys()):
        raise Unsupported(f"layers_block_type lists {', '.join(unknown)}", f"supported: {', '.join(KINDS)}")
    if len(kinds) != layers:
        raise BadCheckpoint(f"layers_block_type lists {len(kinds)} layers, and there are {layers}")
    hf.expect("use_long_context", False, None)
    hf.expect("tie_word_embeddings", True, None)
    mamba_heads, bias = hf.int("n_mamba_heads", 8), hf.bool("add_bias_linear", False)
    mamba = Mamba2Shape(
        heads=mamba_heads,
        head_dim=hf.int("mamba_expand", 2) * hidden // max(mamba_heads, 1),
        groups=hf.int("mamba_ngroups", 1),
        columns=hf.int("mamba_d_state", 64),
        taps=hf.int("mamba_d_conv", 4),
        in_bias=bias,
        out_bias=bias,
        norm_groups=hf.int("mamba_ngroups", 1),
    )
    head_dim, length = 2 * hidden // max(heads, 1), hf.int("max_position_embeddings", 4096)
    return Zamba2Config(
        architecture=hf.architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=hf.int("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab=hf.int("vocab_size"),
        max_position=length,
        max_length=length,
        windows=(0,) * layers,
        kinds=tuple(KINDS[kind] for kind in kinds),
        states=mamba.states(layers),
        mamba=mamba,
        eps=hf.float("rms_norm_eps", 1e-5),
        intermediate=hf.int("intermediate_size", 4 * hidden),
        activation=read_activation(hf, "hidden_act", "gelu"),
        num_blocks=max(hf.int("num_mem_blocks", 1), 1),
        rank=hf.int("adapter_rank", 128),
        attention_adapters=hf.bool("use_shared_attention_adapter", False),
        rope=read_rope(hf, head_dim, length) if hf.bool("use_mem_rope", False) else None,
        bias=bias,
    )


def top_specs(c: ModelConfig) -> TensorSpecs:
    return {
        "embed": EmbeddingTable("model.embed_tokens", c.vocab, c.hidden),
        "norm": Vector("model.final_layernorm", c.hidden),
        "head": Linear({"model.embed_tokens": c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }


def layer_specs(c: Zamba2Config) -> dict[str, TensorSpecs]:
    """By the prefix of their names: those of the layers, then those of the shared blocks."""
    specs: dict[str, TensorSpecs] = {}
    for layer, kind in enumerate(c.kinds):
        inner = "mamba_decoder." if kind == HYBRID else ""
        own: dict[str, TensorSpec] = {
            "norm": Vector(f"{inner}input_layernorm", c.hidden),
            **mixer_specs(c.mamba, c.hidden, f"{inner}mamba"),
        }
        if kind == HYBRID:
            own["linear"] = Linear({"linear": c.hidden}, c.hidden)
        specs[f"model.layers.{layer}."] = own
    hybrids = [layer for layer, kind in enumerate(c.kinds) if kind == HYBRID]
    for block, layer in enumerate(hybrids[: c.num_blocks]):
        specs[f"model.layers.{layer}.shared_transformer."] = block_specs(c, range(block, len(hybrids), c.num_blocks))
    return specs


def block_specs(c: Zamba2Config, uses: range) -> TensorSpecs:
    """`uses`: the numbers of the hybrid layers that share the block."""
    wide, sizes = 2 * c.hidden, {"q": c.q_size, "k": c.kv_size, "v": c.kv_size}
    specs: dict[str, TensorSpec] = {
        "attn_norm": Vector("input_layernorm", wide),
        "qkv": Linear({f"self_attn.{part}_proj": size for part, size in sizes.items()}, wide),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size),
        "mlp_norm": Vector("pre_ff_layernorm", c.hidden),
        "gate_up": Linear({"feed_forward.gate_up_proj": 2 * c.intermediate}, c.hidden, bias=c.bias),
        "down": Linear({"feed_forward.down_proj": c.hidden}, c.intermediate, bias=c.bias),
    }
    for use in uses:
        name = f"feed_forward.gate_up_proj_adapter_list.{use}"
        specs[f"gate_up_in_{use}"] = Linear({f"{name}.0": c.rank}, c.hidden)
        specs[f"gate_up_out_{use}"] = Linear({f"{name}.1": 2 * c.intermediate}, c.rank)
        for part, size in sizes.items() if c.attention_adapters else ():
            name = f"self_attn.linear_{part}_adapter_list.{use}"
            specs[f"{part}_in_{use}"] = Linear({f"{name}.0": c.rank}, wide)
            specs[f"{part}_out_{use}"] = Linear({f"{name}.1": size}, c.rank)
    return specs


@dataclass(frozen=True, slots=True)
class Zamba2Layer:
    norm: Any
    mamba_in: Any
    conv: Any
    scan: Any
    mamba_out: Any
    gated_norm: Any
    conv_bias: Any = None
    linear: Any = None  # of what the shared block gives, in hybrid layers


def load(ops: OpSet, checkpoint: Checkpoint, config: Zamba2Config, max_model_len: int) -> LoadedModel:
    top, loaded = load_weights(ops, checkpoint, top_specs(config), layer_specs(config), UNUSED)
    layers = [Zamba2Layer(**layer) for layer in loaded[: config.layers]]
    blocks = loaded[config.layers :]
    rope = ops.frequencies(*frequencies(config.rope, max_model_len)) if config.rope else None
    return LoadedModel(config, partial(forward, config, top, layers, blocks, rope), [top, *loaded])


def forward(
    c: Zamba2Config,
    top: Mapping[str, Any],
    layers: list[Zamba2Layer],
    blocks: list[dict[str, Any]],
    rope: Any,
    ops: OpSet,
    batch: Any,
) -> Value:
    embedded = x = ops.embedding(batch.ids, top["embed"])
    angles = None if rope is None else ops.rope_angles(batch.positions, rope)
    for index, layer in enumerate(layers):
        ops.tap(x, index)
        h = x
        if layer.linear is not None:
            use = c.index_of_kind(index)
            shared = shared_block(c, blocks[use % c.num_blocks], use, ops, ops.concat([x, embedded]), angles, batch)
            h = ops.add(x, ops.linear(shared, layer.linear))
        x = ops.add(x, mixer(c.mamba, layer, GATED_NORM_EPS, ops, ops.rms_norm(h, layer.norm, c.eps), batch, index))
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, top["norm"], c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, top["head"], batch)


def shared_block(c: Any, w: Mapping[str, Any], use: int, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    """x [T, 2 * hidden] -> [T, hidden]. `use`: the number of the hybrid layer. (Zamba has it, too.)"""
    x = ops.rms_norm(x, w["attn_norm"], c.eps)
    parts = ops.split(ops.linear(x, w["qkv"]), (c.q_size, c.kv_size, c.kv_size))
    if c.attention_adapters:
        parts = tuple(ops.add(part, adapted(ops, x, w, name, use)) for part, name in zip(parts, "qkv", strict=True))
    q, k, v = parts
    if angles is not None:
        q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
    ops.write_kv(k, v, batch, use)
    attended = ops.paged_attention(q, batch, use, c.head_dim, 1 / sqrt(c.head_dim / 2))
    x = ops.rms_norm(ops.linear(attended, w["out"]), w["mlp_norm"], c.eps)
    gate_up = ops.linear(x, w["gate_up"])
    if c.rank:
        gate_up = ops.add(gate_up, adapted(ops, x, w, "gate_up", use))
    return ops.linear(ops.activate_and_mul(gate_up, c.activation), w["down"])


def adapted(ops: OpSet, x: Value, w: Mapping[str, Any], name: str, use: int) -> Value:
    return ops.linear(ops.linear(x, w[f"{name}_in_{use}"]), w[f"{name}_out_{use}"])
