"""Zamba2: Mamba 2, and a few blocks of attention and a feed-forward layer, with adapters, that many layers share."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.models.activations import read_activation
from quire.models.loading import Linear, LoadedModel, TensorSpec, TensorSpecs, load_weights
from quire.models.mamba2_mixer import Mamba2Shape, mixer, mixer_specs
from quire.models.rope import frequencies, read_rope
from quire.models.zamba_layers import (
    SharedBlockConfig,
    block_attention_specs,
    forward,
    layer_kinds,
    mamba_layer_specs,
    top_specs,
)
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

GATED_NORM_EPS = 1e-5
UNUSED = r"model\.layers\.\d+\.shared_transformer\..*|lm_head.weight"  # blocks may be stored once for each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(SharedBlockConfig):
    mamba: Mamba2Shape
    bias: bool


def config(hf: CheckpointConfig) -> Zamba2Config:
    hidden, heads, layers = hf.int("hidden_size"), hf.int("num_attention_heads"), hf.int("num_hidden_layers")
    kinds = layer_kinds(hf.list("layers_block_type", hf.list("layer_types", [])), layers)
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
        kinds=kinds,
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


def layer_specs(c: Zamba2Config) -> dict[str, TensorSpecs]:
    """All tensors by the prefix of their names: those of the layers, then those of the shared blocks."""
    specs = mamba_layer_specs(c, partial(mixer_specs, c.mamba, c.hidden))
    for block, layer in enumerate(c.hybrids[: c.num_blocks]):
        uses = range(block, len(c.hybrids), c.num_blocks)
        specs[f"model.layers.{layer}.shared_transformer."] = block_specs(c, uses)
    return specs


def block_specs(c: Zamba2Config, uses: range) -> TensorSpecs:
    """`uses`: the numbers of the hybrid layers that share the block."""
    specs: dict[str, TensorSpec] = {
        **block_attention_specs(c),
        "gate_up": Linear({"feed_forward.gate_up_proj": 2 * c.intermediate}, c.hidden, bias=c.bias),
        "down": Linear({"feed_forward.down_proj": c.hidden}, c.intermediate, bias=c.bias),
    }
    for use in uses:
        name = f"feed_forward.gate_up_proj_adapter_list.{use}"
        specs[f"gate_up_in_{use}"] = Linear({f"{name}.0": c.rank}, c.hidden)
        specs[f"gate_up_out_{use}"] = Linear({f"{name}.1": 2 * c.intermediate}, c.rank)
        for part, size in zip("qkv", (c.q_size, c.kv_size, c.kv_size), strict=True) if c.attention_adapters else ():
            name = f"self_attn.linear_{part}_adapter_list.{use}"
            specs[f"{part}_in_{use}"] = Linear({f"{name}.0": c.rank}, 2 * c.hidden)
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
    steps = partial(forward, config, top, layers, blocks, rope, partial(mix, config))
    return LoadedModel(config, steps, [top, *loaded])


def mix(c: Zamba2Config, layer: Zamba2Layer, ops: OpSet, x: Value, batch: Any, index: int) -> Value:
    return mixer(c.mamba, layer, GATED_NORM_EPS, ops, x, batch, index)
