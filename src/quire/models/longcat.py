"""LongCat-Flash: two blocks of latent attention and a feed-forward layer, and experts beside the second of them.

The experts read what the first feed-forward layer reads, and their output is added behind the second (a shortcut). Some
experts pass on their input. A block is a layer here: layer 2i and 2i + 1 are layer i of the checkpoint."""

import re
from functools import partial
from typing import Any

from quire.models import deepseek
from quire.models.deepseek import DeepseekConfig, DeepseekFamily, DeepseekWeights
from quire.models.indexer import Choice
from quire.models.llama import UNUSED
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.rope import frequencies
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

KEYS = {  # DeepSeek's key -> LongCat's
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}
PAIRED = re.compile(r"(model\.layers\.)(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.(.*)")
ROUTED = re.compile(r"(model\.layers\.)(\d+)\.mlp\.(.*)")
GATE_UP, DOWN = ("moe.experts.{}.gate_proj", "moe.experts.{}.up_proj"), "moe.experts.{}.down_proj"


def routing(hf: CheckpointConfig) -> Routing:
    num_zero = hf.int("zero_expert_num", 0)
    chosen = Routing(hf.int("num_experts_per_tok"), scale=hf.float("routed_scaling_factor", 1.0), num_zero=num_zero)
    chosen.check(hf.int("n_routed_experts") + num_zero)
    return chosen


FAMILY = DeepseekFamily(routing)


def config(hf: CheckpointConfig) -> DeepseekConfig:
    hf.expect("zero_expert_type", "identity", None)
    hf.expect("router_bias", False, None)
    hf.expect("attention_method", "MLA", None)
    layers = 2 * hf.int("num_layers" if "num_layers" in hf else "num_hidden_layers")
    values = {ours: hf.get(theirs) for ours, theirs in KEYS.items() if ours not in hf}
    values |= {"num_hidden_layers": layers, "first_k_dense_replace": layers, "n_shared_experts": 0}
    values |= {"mlp_layer_types": None, "hidden_act": hf.get("hidden_act", "silu")}
    fields = deepseek.config_fields(hf.with_values(values), FAMILY)
    hidden, latent, queries = fields["hidden"], fields["latent"], fields["q_lora_rank"]
    scale_q, scale_kv = hf.bool("mla_scale_q_lora", True), hf.bool("mla_scale_kv_lora", True)
    return DeepseekConfig(
        **fields
        | {
            "scale": fields["scale"] * ((hidden / queries) ** 0.5 if scale_q and queries else 1.0),
            "latent_scale": (hidden / latent) ** 0.5 if scale_kv else 1.0,
        }
    )


def layer_specs(c: DeepseekConfig, layer: int) -> TensorSpecs:
    common = deepseek.layer_specs(c, layer)
    return common if layer % 2 else {**common, **expert_specs(c)}


def expert_specs(c: DeepseekConfig) -> TensorSpecs:
    all_experts = c.num_experts + c.routing.num_zero
    return {
        "router": Linear({"moe.router.classifier": all_experts}, c.hidden, keep=Keep.ALL),
        "experts_up": ExpertLinear(dict.fromkeys(GATE_UP, c.expert_size), c.hidden, c.num_experts),
        "experts_down": ExpertLinear({DOWN: c.hidden}, c.expert_size, c.num_experts),
        "correction": Vector("moe.router", all_experts, suffix="e_score_correction_bias"),
    }


def renamed(name: str) -> str:
    """The tensor's name, with each block as a layer."""
    if match := PAIRED.fullmatch(name):
        start, layer, part, block, rest = match.groups()
        return f"{start}{2 * int(layer) + int(block)}.{part.replace('mlps', 'mlp')}.{rest}"
    if match := ROUTED.fullmatch(name):
        return f"{match[1]}{2 * int(match[2])}.moe.{match[3]}"
    return name


def load(ops: OpSet, checkpoint: Checkpoint, config: DeepseekConfig, max_model_len: int) -> LoadedModel:
    if names := checkpoint.names():  # a DummyCheckpoint has none
        checkpoint = RenamedCheckpoint(checkpoint, {renamed(name): name for name in names})
    by_prefix = {f"model.layers.{layer}.": layer_specs(config, layer) for layer in range(config.layers)}
    unused = "|".join([UNUSED, *_zero_experts(config), *(["lm_head.weight"] if config.tied else [])])
    top, layers = load_weights(ops, checkpoint, deepseek.top_specs(config), by_prefix, unused)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = DeepseekWeights(**top, layers=[deepseek.new_layer(layer) for layer in layers], rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def _zero_experts(c: DeepseekConfig) -> list[str]:
    """Patterns of tensors that some files have for experts that pass on their input."""
    numbers = range(c.num_experts, c.num_experts + c.routing.num_zero)
    return [rf"model\.layers\.\d+\.moe\.experts\.({'|'.join(map(str, numbers))})\..*"] if numbers else []


def forward(c: DeepseekConfig, w: DeepseekWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x, routed = ops.embedding(batch.ids, w.embed), None
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        h = ops.rms_norm(x, layer.attn_norm, c.eps)
        x = ops.add(x, deepseek.attention(c, layer, index, ops, h, angles, batch, Choice()))
        h = ops.rms_norm(x, layer.mlp_norm, c.eps)
        assert layer.mlp is not None
        if (m := layer.moe) is not None:
            experts = (m.experts_up, m.experts_down)
            routed = ops.moe(h, ops.linear(h, m.router), *experts, c.routing, Activation.SILU, m.correction)
        x = ops.add(x, deepseek.mlp(layer.mlp, ops, h))
        if layer.moe is None:
            x = ops.add(x, routed)
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch)
