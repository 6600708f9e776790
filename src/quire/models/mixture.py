"""Llama with experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

A router sends each token to a few of many small feed-forward layers. Qwen2-MoE has one more that every token goes to,
through a gate; Qwen's may leave some layers without experts."""

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import Experts, Matrix, Model, Wanted
from quire.ops.opset import Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    num_experts: int
    routing: Routing
    expert_size: int  # columns between an expert's two matrices; `intermediate` is that of layers without experts
    shared_size: int  # of the expert that every token goes to; 0: there is none
    sparse: tuple[bool, ...]  # for each layer: whether it has experts


def config(hf: CheckpointConfig) -> MixtureConfig:
    hf.expect("hidden_act", "silu")
    if hf.architecture == "OlmoeForCausalLM":
        hf.expect("clip_qkv", None)
    return MixtureConfig(**numbers(hf))


def numbers(hf: CheckpointConfig) -> dict[str, Any]:
    """The fields of MixtureConfig."""
    common = llama.numbers(hf)
    count = hf.int("num_local_experts" if "num_local_experts" in hf else "num_experts")
    top_k = hf.int("num_experts_per_tok")
    if not 1 <= top_k <= count:
        raise BadCheckpoint(f"num_experts_per_tok is {top_k}, and there are {count} experts")
    # Mixtral and Granite divide by the sum over the chosen; the others say whether they do.
    renormalize = hf.bool("norm_topk_prob", hf.architecture in ("MixtralForCausalLM", "GraniteMoeForCausalLM"))
    return common | {
        "windows": _windows(hf, common["layers"]),
        "qkv_bias": hf.bool("qkv_bias", common["out_bias"] or hf.architecture == "Qwen2MoeForCausalLM"),
        "qk_norms": QK_NORMS.get(hf.architecture, "none"),
        "num_experts": count,
        "routing": Routing(top_k, renormalize=renormalize),
        "expert_size": hf.int("moe_intermediate_size", common["intermediate"]),
        "shared_size": hf.int("shared_expert_intermediate_size", 0),
        "sparse": _sparse(hf, common["layers"]),
    }


QK_NORMS = {"Qwen3MoeForCausalLM": "heads", "OlmoeForCausalLM": "rows"}


def _windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """Mixtral has one for all layers, and so has Qwen3-MoE, if it says so. Qwen2-MoE lists kinds of layers."""
    if "layer_types" in hf:
        return llama.listed_windows(hf, layers)
    if hf.architecture == "Qwen2MoeForCausalLM":
        hf.expect("use_sliding_window", False, None)
    everywhere = hf.architecture == "MixtralForCausalLM" or hf.bool("use_sliding_window", False)
    return (hf.int("sliding_window", 0) if everywhere else 0,) * layers


def _sparse(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    dense, step = hf.list("mlp_only_layers", []), hf.int("decoder_sparse_step", 1)
    if step < 1:
        raise BadCheckpoint(f"decoder_sparse_step is {step}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


@dataclass(frozen=True, slots=True)
class Names:
    router: str
    gate_up: tuple[str, ...]
    down: str


MIXTRAL = Names(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
GRANITE = Names(  # the experts of a layer in one tensor
    "block_sparse_moe.router.layer",
    ("block_sparse_moe.input_linear.weight",),
    "block_sparse_moe.output_linear.weight",
)
GRANITE_APART = replace(MIXTRAL, router=GRANITE.router)  # in GGUF files
OTHERS = Names("mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj")
NAMES = {"MixtralForCausalLM": (MIXTRAL,), "GraniteMoeForCausalLM": (GRANITE, GRANITE_APART)}


def layer_names(c: MixtureConfig, stored: Container[str]) -> list[Wanted]:
    dense = llama.layer_names(c)
    attention = {ours: want for ours, want in dense.items() if ours not in ("gate_up", "down")}
    experts = expert_names(c, _names(c, stored))
    return [{**attention, **experts} if sparse else dense for sparse in c.sparse]


def _names(c: MixtureConfig, stored: Container[str]) -> Names:
    """Of the ways to name experts, the one that the first layer with experts is stored in."""
    usual, *others = NAMES.get(c.architecture, (OTHERS,))
    prefix = f"model.layers.{c.sparse.index(True)}." if True in c.sparse else ""
    return next((names for names in others if f"{prefix}{names.down.format(0)}.weight" in stored), usual)


def expert_names(c: MixtureConfig, names: Names) -> Wanted:
    outputs = 2 * c.expert_size // len(names.gate_up)
    wanted: dict[str, Matrix | Experts] = {
        "router": Matrix({names.router: c.num_experts}, c.hidden, keep=Keep.ALL),
        "experts_gate_up": Experts(dict.fromkeys(names.gate_up, outputs), c.hidden, c.num_experts),
        "experts_down": Experts({names.down: c.hidden}, c.expert_size, c.num_experts),
    }
    if c.shared_size:
        gate_up = {f"mlp.shared_expert.{part}_proj": c.shared_size for part in ("gate", "up")}
        wanted |= {
            "gate_up": Matrix(gate_up, c.hidden),
            "down": Matrix({"mlp.shared_expert.down_proj": c.hidden}, c.shared_size),
            "shared_gate": Matrix({"mlp.shared_expert_gate": 1}, c.hidden, keep=Keep.ALL),
        }
    return wanted


@dataclass(frozen=True, slots=True)
class Layer(llama.Layer):
    """`gate_up` and `down` are of a layer without experts, or of the one that every token goes to."""

    gate_up: Any = None
    down: Any = None
    router: PackedWeight | None = None
    experts_gate_up: PackedExperts | None = None
    experts_down: PackedExperts | None = None
    shared_gate: PackedWeight | None = None


def load(ops: OpSet, checkpoint: Checkpoint, config: MixtureConfig, max_model_len: int) -> Model:
    forward = partial(llama.forward, feed_forward=feed_forward)
    names = layer_names(config, set(checkpoint.names()))
    return llama.load_with(ops, checkpoint, config, max_model_len, forward, names, Layer)


def feed_forward(c: MixtureConfig, layer: Layer, ops: OpSet, x: Value) -> Value:
    if layer.router is None:
        return llama.mlp(c, layer, ops, x)
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    experts = (layer.experts_gate_up, layer.experts_down)
    mixed = ops.moe(x, ops.linear(x, layer.router), *experts, c.routing, c.activation)
    if layer.shared_gate is None:
        return mixed
    return ops.add(mixed, ops.mul_sigmoid(llama.mlp(c, layer, ops, x), ops.linear(x, layer.shared_gate)))
