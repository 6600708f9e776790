"""Mamba 2: layers of a norm and a mixer, without attention and without feed-forward layers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.config import ModelConfig
from quire.models.loading import EmbeddingTable, Linear, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.mamba2_mixer import MAMBA, Mamba2Shape, dt_limit, mixer, mixer_specs
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import Keep, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

DEFAULT_LENGTH, MAX_LENGTH = 32768, 1 << 20  # tokens: the model itself has no limit
RENAMED = {"backbone.embedding.": "backbone.embeddings."}  # as its authors spell it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(ModelConfig):
    mamba: Mamba2Shape
    eps: float
    tied: bool


def config(hf: CheckpointConfig) -> Mamba2Config:
    hf.expect("hidden_act", "silu", None)
    hidden, heads, head_dim = hf.int("hidden_size"), hf.int("num_heads"), hf.int("head_dim", 64)
    if heads * head_dim != hf.int("expand", 2) * hidden:
        raise BadCheckpoint(f"{heads} heads of {head_dim} columns are not {hf.int('expand', 2)} x {hidden} columns")
    mamba = Mamba2Shape(
        heads=heads,
        head_dim=head_dim,
        groups=hf.int("n_groups", 8),
        columns=hf.int("state_size", 128),
        taps=hf.int("conv_kernel", 4),
        conv_bias=hf.bool("use_conv_bias", True),
        in_bias=hf.bool("use_bias", False),
        out_bias=hf.bool("use_bias", False),
        dt_limit=dt_limit(hf),
        converted=hf.bool("converted", False),
    )
    layers = hf.int("num_hidden_layers")
    return Mamba2Config(**without_attention(hf, hidden, layers), states=mamba.states(layers), mamba=mamba)


def without_attention(hf: CheckpointConfig, hidden: int, layers: int) -> dict[str, Any]:
    """The fields of models that have no attention. Heads of keys and values are none, and are not zero only because
    sizes are not."""
    length = hf.int("max_position_embeddings", DEFAULT_LENGTH)
    return {
        "architecture": hf.architecture,
        "hidden": hidden,
        "layers": layers,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab": hf.int("vocab_size"),
        "max_position": length,
        "max_length": max(length, MAX_LENGTH),
        "windows": (0,) * layers,
        "kinds": (MAMBA,) * layers,
        "eps": hf.float("layer_norm_epsilon", 1e-5),
        "tied": hf.bool("tie_word_embeddings", False),
    }


def top_specs(c: Any) -> TensorSpecs:
    head = "backbone.embeddings" if c.tied else "lm_head"
    return {
        "embed": EmbeddingTable("backbone.embeddings", c.vocab, c.hidden),
        "norm": Vector("backbone.norm_f", c.hidden),
        "head": Linear({head: c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    norm: Any
    mamba_in: Any
    conv: Any
    scan: Any
    mamba_out: Any
    conv_bias: Any = None
    gated_norm: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: Mamba2Config, max_model_len: int) -> LoadedModel:
    layer = {"norm": Vector("norm", config.hidden), **mixer_specs(config.mamba, config.hidden, "mixer")}
    return load_mixers(ops, checkpoint, config, layer, Mamba2Layer, partial(mix, config))


def load_mixers(
    ops: OpSet, checkpoint: Checkpoint, config: Any, layer: TensorSpecs, layer_type: Any, mix: Any
) -> LoadedModel:
    """A model whose layers all have these tensors and mix tokens by `mix(layer, ops, x, batch, index)`."""
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, RENAMED)
    layers = {f"backbone.layers.{index}.": layer for index in range(config.layers)}
    unused = "lm_head.weight" if config.tied else ""
    top, loaded = load_weights(ops, checkpoint, top_specs(config), layers, unused)
    weights = [layer_type(**each) for each in loaded]
    return LoadedModel(config, partial(forward, config, top, weights, mix), [top, *loaded])


def mix(c: Mamba2Config, layer: Mamba2Layer, ops: OpSet, x: Value, batch: Any, index: int) -> Value:
    return mixer(c.mamba, layer, c.eps, ops, x, batch, index)


def forward(c: Any, top: Any, layers: list[Any], mix: Any, ops: OpSet, batch: Any) -> Value:
    x = ops.embedding(batch.ids, top["embed"])
    for index, layer in enumerate(layers):
        ops.tap(x, index)
        x = ops.add(x, mix(layer, ops, ops.rms_norm(x, layer.norm, c.eps), batch, index))
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, top["norm"], c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, top["head"], batch)
