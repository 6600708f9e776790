"""Llama with experts (MoE), and the families that differ in features that moe_families.py lists: one row a family.

A router sends each token to a few of many small feed-forward layers, the experts. Shared experts are those that every
token goes to. Layers may have a plain feed-forward layer instead."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import llama
from quire.models.baichuan import NormalizedHead
from quire.models.deepseek import mtp_layers
from quire.models.llama import LlamaConfig
from quire.models.llama_families import translate
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpec, TensorSpecs, Vector
from quire.models.moe_families import FAMILIES, ExpertNames, MoeFamily
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(LlamaConfig):
    family: MoeFamily
    num_experts: int
    routing: Routing
    expert_size: int  # intermediate size of an expert; `intermediate` is that of layers without experts
    shared_size: int  # of the shared experts together; 0: there are none
    sparse: tuple[bool, ...]  # for each layer: whether it has experts
    num_mtp_layers: int = 0  # layers behind the last that predict further tokens: mtp.py
    normed_head: bool = False  # columns of the head are divided by their length
    router_cap: float = 0.0  # the router's logits are router_cap * tanh(logits / router_cap)


def config(hf: CheckpointConfig) -> MoeConfig:
    family = FAMILIES[hf.architecture]
    return MoeConfig(**config_fields(translate(hf, family), family))


def config_fields(hf: CheckpointConfig, family: MoeFamily) -> dict[str, Any]:
    """The fields of MoeConfig, to which other model files add their own. `hf` has the keys of Llama and Qwen-MoE."""
    common = llama.config_fields(hf, family)
    num_experts = hf.int("num_local_experts" if "num_local_experts" in hf else "num_experts")
    top_k = hf.int("num_experts_per_tok")
    if not 1 <= top_k <= num_experts:
        raise BadCheckpoint(f"num_experts_per_tok is {top_k}, and there are {num_experts} experts")
    expert_size = hf.int("moe_intermediate_size", common["intermediate"])
    shared_size = hf.int("shared_expert_intermediate_size", 0)
    if family.num_shared_key:
        shared_size = hf.int(family.num_shared_key, 0) * expert_size
    return common | {
        "num_experts": num_experts,
        "routing": family.routing(hf),
        "expert_size": expert_size,
        "shared_size": shared_size,
        "sparse": family.sparse(hf, common["layers"]),
        "num_mtp_layers": hf.int("num_nextn_predict_layers", 0),
        "normed_head": family.normed_head_key is not None and hf.bool(family.normed_head_key, False),
    }


Shapes = Callable[[str], tuple[int, ...]]  # of tensors, by name


def layer_specs(c: MoeConfig, stored: Container[str], shape: Shapes | None = None) -> list[TensorSpecs]:
    dense = llama.layer_specs(c, stored)
    experts = expert_specs(c, expert_names(c, stored, shape))
    return [{**attention_specs(c, stored), **experts} if sparse else dense for sparse in c.sparse]


def attention_specs(c: MoeConfig, stored: Container[str] = ()) -> TensorSpecs:
    return {ours: spec for ours, spec in llama.layer_specs(c, stored).items() if ours not in ("gate_up", "down")}


def expert_names(c: MoeConfig, stored: Container[str], shape: Shapes | None = None) -> ExpertNames:
    """The family's names for experts that the first layer with experts is stored under. Tensors of all experts may be
    stored either way, whichever is usual."""
    usual, *others = c.family.experts
    prefix = f"model.layers.{c.sparse.index(True)}." if True in c.sparse else ""
    names = next((names for names in others if names.is_stored(prefix, stored)), usual)
    if names.transposed and shape and prefix + names.down in stored:
        turned = shape(prefix + names.down)[1:] == (c.hidden, c.expert_size) != (c.expert_size, c.hidden)
        return replace(names, transposed=not turned)
    return names


def expert_specs(c: MoeConfig, names: ExpertNames) -> TensorSpecs:
    f, outputs = c.family, 2 * c.expert_size // len(names.gate_up)
    specs: dict[str, TensorSpec] = {
        "router": Linear({names.router: c.num_experts}, c.hidden, keep=Keep.ALL),
        "experts_gate_up": ExpertLinear(
            dict.fromkeys(names.gate_up, outputs), c.hidden, c.num_experts, names.transposed
        ),
        "experts_down": ExpertLinear({names.down: c.hidden}, c.expert_size, c.num_experts, names.transposed),
    }
    if f.correction:
        specs["correction"] = Vector(f.correction, c.num_experts, f.correction_name, stored_as_row=f.correction_is_row)
    if c.shared_size:
        outputs = 2 * c.shared_size // len(names.shared_gate_up)
        specs["gate_up"] = Linear({f"{f.shared}.{part}": outputs for part in names.shared_gate_up}, c.hidden)
        specs["down"] = Linear({f"{f.shared}.{f.shared_down}": c.hidden}, c.shared_size)
        if f.shared_gate:
            specs["shared_gate"] = Linear({f.shared_gate: 1}, c.hidden, keep=Keep.ALL)
    return specs


@dataclass(frozen=True, slots=True)
class MoeLayer(llama.LlamaLayer):
    """`gate_up` and `down` are of a layer without experts, or of the shared experts."""

    gate_up: Any = None
    down: Any = None
    router: PackedWeight | None = None
    experts_gate_up: PackedExperts | None = None
    experts_down: PackedExperts | None = None
    shared_gate: PackedWeight | None = None
    correction: Any = None  # of the scores that experts are chosen by


def load(ops: OpSet, checkpoint: Checkpoint, config: MoeConfig, max_model_len: int) -> LoadedModel:
    if config.family.renamed:
        checkpoint = RenamedCheckpoint.by_substring(checkpoint, config.family.renamed)
    if config.normed_head:
        checkpoint = NormalizedHead(checkpoint, axis=0)
    layers = layer_specs(config, set(checkpoint.names()), checkpoint.shape)
    unused = mtp_layers(config.layers, config.num_mtp_layers)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, MoeLayer, feed_forward, unused)


def feed_forward(c: MoeConfig, layer: MoeLayer, ops: OpSet, x: Value) -> Value:
    if layer.router is None:
        return llama.mlp(c, layer, ops, x)
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    experts = (layer.experts_gate_up, layer.experts_down)
    routed = ops.moe(x, router_logits(c, layer, ops, x), *experts, c.routing, c.activation, layer.correction)
    if layer.gate_up is None:
        return routed
    shared = llama.mlp(c, layer, ops, x)
    gated = shared if layer.shared_gate is None else ops.mul_sigmoid(shared, ops.linear(x, layer.shared_gate))
    return ops.add(routed, gated)


def router_logits(c: MoeConfig, layer: MoeLayer, ops: OpSet, x: Value) -> Value:
    assert layer.router is not None
    logits = ops.linear(x, layer.router)
    if not c.router_cap:
        return logits
    return ops.scale(ops.activate(ops.scale(logits, 1 / c.router_cap), Activation.TANH), c.router_cap)
