"""What Zamba and Zamba2 have in common: layers of Mamba, and blocks of attention and a feed-forward layer that some of
them share.

A hybrid layer gives such a block its input beside the embeddings, and its mixer the sum of both. Blocks are taken in
turn; what may differ between two uses of one are small matrices, `adapters`, added to its linear layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.config import ModelConfig
from quire.models.loading import EmbeddingTable, Linear, TensorSpec, TensorSpecs, Vector
from quire.models.mamba2_mixer import MAMBA
from quire.models.rope import RopeSpec
from quire.ops.opset import Activation, Keep, OpSet, Value

HYBRID = "hybrid"
KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "hybrid": HYBRID}

Mixer = Callable[[Any, OpSet, Value, Any, int], Value]  # layer, ops, x, batch, number of the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockConfig(ModelConfig):
    eps: float
    intermediate: int
    activation: Activation
    num_blocks: int = 1  # blocks that hybrid layers share in turn
    rank: int = 0  # of adapters; 0: there are none
    attention_adapters: bool = False
    rope: RopeSpec | None = None

    @property
    def kv_layers(self) -> int:
        return self.kinds.count(HYBRID)

    @property
    def hybrids(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.kinds) if kind == HYBRID]


def layer_kinds(listed: Sequence[Any], layers: int) -> tuple[str, ...]:
    """`layers_block_type`, in the words of this code."""
    if unknown := sorted({str(kind) for kind in listed} - KINDS.keys()):
        raise Unsupported(f"layers_block_type lists {', '.join(unknown)}", f"supported: {', '.join(KINDS)}")
    if len(listed) != layers:
        raise BadCheckpoint(f"layers_block_type lists {len(listed)} layers, and there are {layers}")
    return tuple(KINDS[kind] for kind in listed)


def top_specs(c: ModelConfig) -> TensorSpecs:
    return {
        "embed": EmbeddingTable("model.embed_tokens", c.vocab, c.hidden),
        "norm": Vector("model.final_layernorm", c.hidden),
        "head": Linear({"model.embed_tokens": c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }


def mamba_layer_specs(c: ModelConfig, mixer_specs: Callable[[str], TensorSpecs]) -> dict[str, TensorSpecs]:
    """The tensors of all layers by the prefix of their names. `mixer_specs`: of a mixer, by its name in the layer."""
    specs: dict[str, TensorSpecs] = {}
    for layer, kind in enumerate(c.kinds):
        inner = "mamba_decoder." if kind == HYBRID else ""
        own: dict[str, TensorSpec] = {
            "norm": Vector(f"{inner}input_layernorm", c.hidden),
            **mixer_specs(f"{inner}mamba"),
        }
        if kind == HYBRID:
            own["linear"] = Linear({"linear": c.hidden}, c.hidden)
        specs[f"model.layers.{layer}."] = own
    return specs


def block_attention_specs(c: ModelConfig) -> TensorSpecs:
    """The tensors of a shared block's attention, and of both its norms."""
    sizes = {"q": c.q_size, "k": c.kv_size, "v": c.kv_size}
    return {
        "attn_norm": Vector("input_layernorm", 2 * c.hidden),
        "qkv": Linear({f"self_attn.{part}_proj": size for part, size in sizes.items()}, 2 * c.hidden),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size),
        "mlp_norm": Vector("pre_ff_layernorm", c.hidden),
    }


def forward(
    c: SharedBlockConfig,
    top: Mapping[str, Any],
    layers: Sequence[Any],
    blocks: Sequence[Mapping[str, Any]],
    rope: Any,
    mixer: Mixer,
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
        x = ops.add(x, mixer(layer, ops, ops.rms_norm(h, layer.norm, c.eps), batch, index))
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, top["norm"], c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, top["head"], batch)


def shared_block(
    c: SharedBlockConfig, w: Mapping[str, Any], use: int, ops: OpSet, x: Value, angles: Value, batch: Any
) -> Value:
    """x [T, 2 * hidden] -> [T, hidden]. `use`: the number of the hybrid layer."""
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
