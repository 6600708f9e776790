"""Apertus: Llama with norms of heads, whose feed-forward layer has no gate and two learned numbers in its activation.

xIELU(x) is alpha_p x^2 + beta x above zero, and alpha_n (exp(x) - 1 - x) + beta x below. GGUF files have the numbers of
all layers in their metadata."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = LlamaFamily(
    activations={"xielu": Activation.ELU},  # of which xIELU is made
    qk_norms="heads",
    norms={"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    gated=False,
    gate_up=("mlp.up_proj",),
)
STORED = ("alpha_p", "alpha_n", "beta")


class XIELU(NamedTuple):
    above: float  # alpha_p
    below: float  # alpha_n
    slope: float  # beta

    @staticmethod
    def of(alpha_p: float, alpha_n: float, beta: float) -> "XIELU":
        """Of stored numbers: the alphas are what makes them under a softplus, the second less beta."""
        return XIELU(_softplus(alpha_p), beta + _softplus(alpha_n), beta)


def _softplus(x: float) -> float:
    return float(np.logaddexp(0.0, x))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApertusConfig(LlamaConfig):
    curves: tuple[XIELU, ...]  # for each layer; none: they are tensors


def config(hf: CheckpointConfig) -> ApertusConfig:
    numbers = llama.config_fields(translate(hf, FAMILY), FAMILY)
    listed = [hf.section("xielu").get(part, ()) for part in STORED]
    if any(len(given) != numbers["layers"] for given in listed) and any(map(len, listed)):
        raise BadCheckpoint(f"{hf.source}: the numbers of xielu are not those of {numbers['layers']} layers")
    return ApertusConfig(**numbers, curves=tuple(XIELU.of(*given) for given in zip(*listed, strict=True)))


@dataclass(frozen=True, slots=True)
class StoredXIELU:
    """The numbers of an activation, unless they are known."""

    name: str
    known: XIELU | None

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.known is None:
            yield from ((f"{self.name}.{part}", (1,)) for part in STORED)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> XIELU:
        return self.known or XIELU.of(*(float(dequantize(tensor).item()) for tensor in tensors))


@dataclass(frozen=True, slots=True)
class ApertusLayer(llama.LlamaLayer):
    """`gate_up` is what is activated."""

    curve: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: ApertusConfig, max_model_len: int) -> LoadedModel:
    names = llama.layer_specs(config)
    curves = [StoredXIELU("mlp.act_fn", curve) for curve in config.curves or [None] * config.layers]
    layers = [{**names, "curve": curve} for curve in curves]
    unused = [r".*\.act_fn\.eps"]  # how near to zero nothing is computed
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, ApertusLayer, mlp, unused)


def mlp(c: LlamaConfig, layer: Any, ops: OpSet, x: Value) -> Value:
    return ops.linear(activated(ops, ops.linear(x, layer.gate_up), layer.curve), layer.down)


def activated(ops: OpSet, x: Value, curve: XIELU) -> Value:
    """ELU(x) is x above zero and exp(x) - 1 below."""
    squares = ops.scale(ops.activate(x, Activation.RELU_SQUARED), curve.above)
    bends = ops.scale(ops.activate(x, Activation.ELU), curve.below)
    return ops.add(ops.add(squares, bends), ops.scale(x, curve.slope - curve.below))
