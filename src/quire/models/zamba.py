"""Zamba (1): Mamba, and one block of attention and a feed-forward layer that some layers share.

A mixer is several of Mamba's side by side, its heads, between linear layers that they share: each head has a state of
its own, and counts as a layer among those with states."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from quire.models import mamba_mixer
from quire.models.activations import read_activation
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpec, TensorSpecs, load_weights
from quire.models.mamba import dt_rank
from quire.models.mamba_mixer import MambaShape
from quire.models.zamba_layers import (
    SharedBlockConfig,
    block_attention_specs,
    forward,
    layer_kinds,
    mamba_layer_specs,
    top_specs,
)
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.delegating_checkpoint import DelegatingCheckpoint

BLOCK = "shared_transf."
UNUSED = r"model\.layers\.\d+\.shared_transf\..*|lm_head.weight"  # the block may be stored once for each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ZambaConfig(SharedBlockConfig):
    head: MambaShape  # of one head of a mixer
    mamba_heads: int

    @property
    def channels(self) -> int:
        return self.mamba_heads * self.head.channels


def config(hf: CheckpointConfig) -> ZambaConfig:
    hidden, heads, layers = hf.int("hidden_size"), hf.int("num_attention_heads"), hf.int("num_hidden_layers")
    hf.expect("hidden_mamba_act", "silu", None)
    hf.expect("attention_hidden_size", 2 * hidden, None)
    mamba_heads = max(hf.int("n_mamba_heads", 2), 1)
    head = MambaShape(
        channels=hf.int("mamba_expand", 2) * hidden // mamba_heads,
        columns=hf.int("mamba_d_state", 16),
        rank=dt_rank(hf, "mamba_dt_rank"),
        taps=hf.int("mamba_d_conv", 4),
        conv_bias=hf.bool("mamba_conv_bias", True),
        bias=hf.bool("mamba_proj_bias", False),
    )
    length = hf.int("max_position_embeddings", 4096)
    return ZambaConfig(
        architecture=hf.architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=hf.int("num_key_value_heads", heads),
        head_dim=hf.int("attention_head_dim", 2 * hidden // max(heads, 1)),
        vocab=hf.int("vocab_size"),
        max_position=length,
        max_length=length,
        windows=(0,) * layers,
        kinds=layer_kinds(listed_kinds(hf, layers), layers),
        states=head.states(layers * mamba_heads),
        head=head,
        mamba_heads=mamba_heads,
        eps=hf.float("rms_norm_eps", 1e-5),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "gelu"),
    )


def listed_kinds(hf: CheckpointConfig, layers: int) -> list[Any]:
    if kinds := hf.list("layers_block_type", hf.list("layer_types", [])):
        return kinds
    period, offset = max(hf.int("attn_layer_period", 6), 1), hf.int("attn_layer_offset", 4)
    later = ["hybrid" if layer % period == offset else "mamba" for layer in range(max(layers - 3, 0))]
    return ["mamba", "mamba", "hybrid", *later][:layers]


def layer_specs(c: ZambaConfig) -> dict[str, TensorSpecs]:
    """All tensors by the prefix of their names: those of the layers, then those of the shared block."""
    blocks = {f"model.layers.{layer}.{BLOCK}": block_specs(c) for layer in c.hybrids[:1]}
    return mamba_layer_specs(c, partial(mixer_specs, c)) | blocks


def mixer_specs(c: ZambaConfig, name: str) -> TensorSpecs:
    """Stored outputs of the first linear layer are x and gate in turn. Keys of a head's weights end in its number."""
    order = np.arange(2 * c.channels, dtype=np.int32).reshape(-1, 2).T.ravel()
    specs: dict[str, TensorSpec] = {
        "mamba_in": Linear({f"{name}.in_proj": LinearPart(2 * c.channels, order)}, c.hidden, bias=c.head.bias),
        "mamba_out": Linear({f"{name}.out_proj": c.hidden}, c.channels, bias=c.head.bias),
    }
    for head in range(c.mamba_heads):
        of_head = mamba_mixer.mixer_specs(c.head, c.hidden, f"{name}.{head}")
        specs |= {f"{ours}_{head}": spec for ours, spec in of_head.items() if ours not in ("mamba_in", "mamba_out")}
    return specs


def block_specs(c: ZambaConfig) -> TensorSpecs:
    return {
        **block_attention_specs(c),
        "gate_up": Linear(dict.fromkeys(("feed_forward.gate_proj", "feed_forward.up_proj"), c.intermediate), c.hidden),
        "down": Linear({"feed_forward.down_proj": c.hidden}, c.intermediate),
    }


# Suffix of a mixer's tensor of all heads -> what it is of one head.
OF_ALL_HEADS = {
    ".mamba.x_proj_weight": "x_proj.weight",
    ".mamba.dt_proj_weight": "dt_proj.weight",
    ".mamba.dt_proj_bias": "dt_proj.bias",
    ".mamba.A_log": "A_log",
    ".mamba.D": "D",
    ".mamba.conv1d.weight": "conv1d.weight",
    ".mamba.conv1d.bias": "conv1d.bias",
}


class TensorsOfHeads(DelegatingCheckpoint):
    """A checkpoint in which the heads of a mixer have tensors of their own, as mixers of Mamba: `mamba.0.x_proj`.

    Convolutions are stored as channels of all heads, the others with an axis of heads."""

    def __init__(self, checkpoint: Checkpoint, num_heads: int) -> None:
        super().__init__(checkpoint)
        self._num_heads = num_heads
        self._stored: dict[str, tuple[str, int | None]] = {}  # name -> stored name, and the number of the head
        for name in checkpoint.names():
            suffix = next((suffix for suffix in OF_ALL_HEADS if name.endswith(suffix)), None)
            if suffix is None:
                self._stored[name] = name, None
            else:
                mixer = name.removesuffix(suffix) + ".mamba"
                for head in range(num_heads):
                    self._stored[f"{mixer}.{head}.{OF_ALL_HEADS[suffix]}"] = name, head

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, head = self._stored[name]
        shape = super().shape(stored)
        if head is None:
            return shape
        return (shape[0] // self._num_heads, *shape[1:]) if ".conv1d." in stored else shape[1:]

    def tensor(self, name: str) -> StoredTensor:
        stored, head = self._stored[name]
        tensor = super().tensor(stored)
        if head is None:
            return tensor
        rows = tensor.shape[0] // self._num_heads
        part = tensor.part(head * rows, rows)
        return part if ".conv1d." in stored else part.squeezed()


@dataclass(frozen=True, slots=True)
class MambaHead:
    conv: Any
    parameters: Any
    dt: Any
    scan: Any
    conv_bias: Any = None


@dataclass(frozen=True, slots=True)
class ZambaLayer:
    norm: Any
    mamba_in: Any
    mamba_out: Any
    heads: tuple[MambaHead, ...]
    linear: Any = None  # of what the shared block gives, in hybrid layers


def load(ops: OpSet, checkpoint: Checkpoint, config: ZambaConfig, max_model_len: int) -> LoadedModel:
    if checkpoint.names():
        checkpoint = TensorsOfHeads(checkpoint, config.mamba_heads)
    top, loaded = load_weights(ops, checkpoint, top_specs(config), layer_specs(config), UNUSED)
    layers = [_layer(weights, config.mamba_heads) for weights in loaded[: config.layers]]
    steps = partial(forward, config, top, layers, loaded[config.layers :], None, partial(mixer, config))
    return LoadedModel(config, steps, [top, *loaded])


def _layer(weights: Mapping[str, Any], num_heads: int) -> ZambaLayer:
    keys = [[key for key in weights if key.endswith(f"_{head}")] for head in range(num_heads)]
    heads = [MambaHead(**{key.rpartition("_")[0]: weights[key] for key in of_head}) for of_head in keys]
    of_layer = {key: weights[key] for key in ("norm", "mamba_in", "mamba_out", "linear") if key in weights}
    return ZambaLayer(**of_layer, heads=tuple(heads))


def mixer(c: ZambaConfig, layer: ZambaLayer, ops: OpSet, x: Value, batch: Any, index: int) -> Value:
    x, gate = ops.split(ops.linear(x, layer.mamba_in), (c.channels, c.channels))
    parts = ops.split(x, (c.head.channels,) * c.mamba_heads)
    first = index * c.mamba_heads
    numbered = enumerate(zip(layer.heads, parts, strict=True), first)
    y = ops.concat([mamba_mixer.scanned(c.head, head, ops, part, batch, n) for n, (head, part) in numbered])
    return ops.linear(ops.mul(y, ops.activate(gate, Activation.SILU)), layer.mamba_out)
