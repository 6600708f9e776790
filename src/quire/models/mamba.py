"""Mamba and Falcon-Mamba: layers of a norm and a mixer, without attention and without feed-forward layers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel, Vector
from quire.models.mamba2 import load_mixers, without_attention
from quire.models.mamba_mixer import MambaShape, mixer, mixer_specs
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(ModelConfig):
    mamba: MambaShape
    eps: float
    tied: bool


def config(hf: CheckpointConfig) -> MambaConfig:
    hf.expect("hidden_act", "silu", None)
    hf = hf.with_values({"tie_word_embeddings": hf.bool("tie_word_embeddings", True)})
    hidden, layers = hf.int("hidden_size"), hf.int("num_hidden_layers")
    mamba = MambaShape(
        channels=hf.int("intermediate_size", hf.int("expand", 2) * hidden),
        columns=hf.int("state_size", 16),
        rank=dt_rank(hf, "time_step_rank"),
        taps=hf.int("conv_kernel", 4),
        conv_bias=hf.bool("use_conv_bias", True),
        bias=hf.bool("use_bias", False),
        norms="plain" if hf.architecture == "FalconMambaForCausalLM" else "none",
        norm_eps=hf.float("mixer_rms_eps", 1e-6),
        converted=hf.bool("converted", False),
    )
    return MambaConfig(**without_attention(hf, hidden, layers), states=mamba.states(layers), mamba=mamba)


def dt_rank(hf: CheckpointConfig, key: str) -> int:
    return -(-hf.int("hidden_size") // 16) if hf.get(key, "auto") == "auto" else hf.int(key)


@dataclass(frozen=True, slots=True)
class MambaLayer:
    norm: Any
    mamba_in: Any
    conv: Any
    parameters: Any
    dt: Any
    scan: Any
    mamba_out: Any
    conv_bias: Any = None
    dt_norm: Any = None
    b_norm: Any = None
    c_norm: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: MambaConfig, max_model_len: int) -> LoadedModel:
    layer = {"norm": Vector("norm", config.hidden), **mixer_specs(config.mamba, config.hidden, "mixer")}
    return load_mixers(ops, checkpoint, config, layer, MambaLayer, partial(mix, config))


def mix(c: MambaConfig, layer: MambaLayer, ops: OpSet, x: Value, batch: Any, index: int) -> Value:
    return mixer(c.mamba, layer, ops, x, batch, index)
