"""Command A with experts (Cohere): attention and experts both read the output of one norm, as in cohere.py. Layers have
either a window or no rope."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.models import llama, moe
from quire.models.deepseek import mtp_layers
from quire.models.layer_patterns import experts_as_listed, window_except_every
from quire.models.llama_families import translate
from quire.models.loading import LayerNorm, LoadedModel, TensorSpec, TensorSpecs, Vector, load_weights
from quire.models.moe import MoeConfig
from quire.models.moe_families import MoeFamily
from quire.models.rope import frequencies
from quire.ops.opset import OpSet, Routing, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def routing(hf: CheckpointConfig) -> Routing:
    """A softmax over the chosen logits, or sigmoids."""
    by_softmax = hf.expect("expert_selection_fn", "softmax", "sigmoid", None) != "sigmoid"
    renormalize = by_softmax or hf.bool("norm_topk_prob", True)
    return Routing(hf.int("num_experts_per_tok"), "softmax" if by_softmax else "sigmoid", renormalize)


def windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """In all layers but every `sliding_window_pattern`-th, counted anew after those without experts."""
    dense = sum(not sparse for sparse in experts_as_listed(hf, layers))
    before = window_except_every(hf.int("prefix_dense_sliding_window_pattern", 1))(hf, dense)
    return before + window_except_every(hf.int("sliding_window_pattern", 4))(hf, layers - dense)


def rotated(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Layers with a window; those without experts all are where they have none."""
    forced = hf.int("prefix_dense_sliding_window_pattern", 1) == 1
    sparse = experts_as_listed(hf, len(windows))
    return tuple(bool(window) or (forced and not experts) for window, experts in zip(windows, sparse, strict=True))


def moe_keys(hf: CheckpointConfig) -> CheckpointConfig:
    """`intermediate_size` is that of an expert."""
    size = hf.int("intermediate_size")
    dense = hf.int("prefix_dense_intermediate_size", size)
    return hf.with_values({"moe_intermediate_size": size, "intermediate_size": dense})


FAMILY = MoeFamily(
    defaults={"tie_word_embeddings": True, "hidden_act": "silu"},
    expects={"shared_expert_combination_strategy": ("average", "sum", None)},
    adapt=moe_keys,
    scales=lambda hf: {"logit_scale": hf.float("logit_scale", 0.0625)},
    windows=windows,
    default_window=4096,
    rotated=rotated,
    rope_interleaved=True,
    norms={},
    routing=routing,
    sparse=experts_as_listed,
    num_shared_key="num_shared_experts",
    shared="mlp.shared_experts",
    shared_gate=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2MoeConfig(MoeConfig):
    rms: bool  # norms are RMS norms, not layer norms without a bias
    averaged: bool  # routed and shared experts are averaged, not added


def config(hf: CheckpointConfig) -> Cohere2MoeConfig:
    fields = moe.config_fields(translate(hf, FAMILY), FAMILY)
    rms = "rms_norm_eps" in hf
    if not rms:
        fields["eps"] = hf.float("layer_norm_eps", 1e-5)
    averaged = hf.get("shared_expert_combination_strategy", "average") == "average"
    return Cohere2MoeConfig(**fields, rms=rms, averaged=averaged)


def _norm(c: Cohere2MoeConfig, name: str) -> TensorSpec:
    return Vector(name, c.hidden) if c.rms else LayerNorm(name, c.hidden, bias=False)


def load(ops: OpSet, checkpoint: Checkpoint, config: Cohere2MoeConfig, max_model_len: int) -> LoadedModel:
    top_specs: TensorSpecs = {**llama.top_specs(config), "norm": _norm(config, "model.norm")}
    layers = moe.layer_specs(config, set(checkpoint.names()))
    prefixed = {
        f"model.layers.{index}.": {**specs, "attn_norm": _norm(config, "input_layernorm")}
        for index, specs in enumerate(layers)
    }
    further = mtp_layers(config.layers, config.num_mtp_layers)
    unused = "|".join([llama.UNUSED, *further, *(["lm_head.weight"] if config.tied else [])])
    top, loaded = load_weights(ops, checkpoint, top_specs, prefixed, unused)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = llama.LlamaWeights(**top, layers=[moe.MoeLayer(**layer) for layer in loaded], rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *loaded])


def forward(c: Cohere2MoeConfig, w: llama.LlamaWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        normed = llama.normed(ops, x, layer.attn_norm, c.eps)
        attended = llama.attention(c, layer, index, ops, normed, angles, batch)
        x = ops.add(ops.add(x, attended), feed_forward(c, layer, ops, normed))
    ops.tap(x, c.layers)
    x = llama.normed(ops, x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(llama.scaled(ops, x, c.logit_scale), w.head, batch)


def feed_forward(c: Cohere2MoeConfig, layer: moe.MoeLayer, ops: OpSet, x: Value) -> Value:
    out = moe.feed_forward(c, layer, ops, x)
    return ops.scale(out, 0.5) if layer.router is not None and c.shared_size and c.averaged else out
