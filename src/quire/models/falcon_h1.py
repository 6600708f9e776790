"""Falcon-H1: Llama in which every layer has a mixer of Mamba 2 beside its attention, and factors all over."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import bamba, llama
from quire.models.llama import LlamaConfig, scaled
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.mamba2_mixer import Mamba2Shape, hybrid_shape, mixer, mixer_specs
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def factors(hf: CheckpointConfig) -> dict[str, float]:
    """Keys are scaled, which is the same as scaling scores."""
    head_dim = hf.int("head_dim", hf.int("hidden_size") // hf.int("num_attention_heads"))
    return {
        "embed_scale": hf.float("embedding_multiplier", 1.0),
        "logit_scale": hf.float("lm_head_multiplier", 1.0),
        "score_scale": hf.float("key_multiplier", 1.0) / sqrt(head_dim),
    }


FAMILY = LlamaFamily(
    defaults={"rms_norm_eps": 1e-5},
    scales=factors,
    renamed=bamba.FAMILY.renamed,
    norms=bamba.FAMILY.norms,
    gate_up=bamba.FAMILY.gate_up,
    down=bamba.FAMILY.down,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(LlamaConfig):
    mamba: Mamba2Shape
    attention_in: float  # factors of the input and of the output of attention
    attention_out: float
    mamba_out: float  # of the output of the mixer
    gate: float  # of the gate of the feed-forward layer
    down: float  # of its output


def config(hf: CheckpointConfig) -> FalconH1Config:
    fields = llama.config_fields(translate(hf, FAMILY), FAMILY)
    norm = hf.bool("mamba_rms_norm", False)
    mamba = hybrid_shape(
        hf.with_values({"mamba_d_ssm": hf.get("mamba_d_ssm", 0 if hf.is_given("mamba_d_ssm") else 1024)}),
        out_bias=hf.bool("projectors_bias", False),
        norm=norm,
        gate_first=not (norm and hf.bool("mamba_norm_before_gate", True)),
        in_scale=hf.float("ssm_in_multiplier", 1.0),
        scales=_numbers(hf, "ssm_multipliers", 5),
    )
    gate, down = _numbers(hf, "mlp_multipliers", 2)
    return FalconH1Config(
        **fields | {"states": mamba.states(fields["layers"])},
        mamba=mamba,
        attention_in=hf.float("attention_in_multiplier", 1.0),
        attention_out=hf.float("attention_out_multiplier", 1.0),
        mamba_out=hf.float("ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _numbers(hf: CheckpointConfig, key: str, count: int) -> tuple[float, ...]:
    numbers = hf.list(key, [1.0] * count)
    if len(numbers) != count:
        raise BadCheckpoint(f"{key} has {len(numbers)} numbers, and not {count}")
    return tuple(float(number) for number in numbers)


def layer_specs(c: FalconH1Config) -> TensorSpecs:
    return {**llama.layer_specs(c), **mixer_specs(c.mamba, c.hidden, "mamba")}


def load(ops: OpSet, checkpoint: Checkpoint, config: FalconH1Config, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    layers = [layer_specs(config)] * config.layers
    layer_type = bamba.BambaLayer
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, layer_type, feed_forward, mixer=mix)


def mix(
    c: FalconH1Config, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    """Attention and Mamba 2."""
    attended = llama.attention(c, layer, index, ops, scaled(ops, x, c.attention_in), angles, batch, slopes)
    mixed = mixer(c.mamba, layer, c.eps, ops, x, batch, index)
    return ops.add(scaled(ops, mixed, c.mamba_out), scaled(ops, attended, c.attention_out))


def feed_forward(c: FalconH1Config, layer: Any, ops: OpSet, x: Value) -> Value:
    if c.gate == 1:
        return scaled(ops, llama.mlp(c, layer, ops, x), c.down)
    gate, up = ops.split(ops.linear(x, layer.gate_up), (c.intermediate, c.intermediate))
    gated = ops.mul(ops.activate(ops.scale(gate, c.gate), c.activation), up)
    return scaled(ops, ops.linear(gated, layer.down), c.down)
