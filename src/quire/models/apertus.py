"""Apertus: Llama with norms of q and k, and a feed-forward layer without a gate, whose activation has parameters.

xIELU(x) is alpha_p x^2 + beta x above zero, and alpha_n (exp(x) - 1 - x) + beta x below. GGUF files have the parameters
of all layers in their metadata."""

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
PARAMETERS = ("alpha_p", "alpha_n", "beta")


class XIELU(NamedTuple):
    alpha_p: float
    alpha_n: float
    beta: float

    @staticmethod
    def from_stored(alpha_p: float, alpha_n: float, beta: float) -> "XIELU":
        """Stored alphas go through a softplus, and beta is added to the second."""
        return XIELU(_softplus(alpha_p), beta + _softplus(alpha_n), beta)


def _softplus(x: float) -> float:
    return float(np.logaddexp(0.0, x))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApertusConfig(LlamaConfig):
    xielu: tuple[XIELU, ...]  # for each layer; empty: the checkpoint has them as tensors


def config(hf: CheckpointConfig) -> ApertusConfig:
    fields = llama.config_fields(translate(hf, FAMILY), FAMILY)
    listed = [hf.section("xielu").get(name, ()) for name in PARAMETERS]
    if any(len(values) != fields["layers"] for values in listed) and any(map(len, listed)):
        raise BadCheckpoint(f"{hf.source}: the parameters of xielu are not those of {fields['layers']} layers")
    return ApertusConfig(**fields, xielu=tuple(XIELU.from_stored(*values) for values in zip(*listed, strict=True)))


@dataclass(frozen=True, slots=True)
class StoredXIELU:
    """The parameters of a layer's activation: `known` from the metadata, or three tensors."""

    name: str
    known: XIELU | None

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.known is None:
            yield from ((f"{self.name}.{parameter}", (1,)) for parameter in PARAMETERS)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> XIELU:
        return self.known or XIELU.from_stored(*(float(dequantize(tensor).item()) for tensor in tensors))


@dataclass(frozen=True, slots=True)
class ApertusLayer(llama.LlamaLayer):
    """`gate_up` is the up projection."""

    xielu: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: ApertusConfig, max_model_len: int) -> LoadedModel:
    specs = llama.layer_specs(config)
    known = config.xielu or [None] * config.layers
    layers = [{**specs, "xielu": StoredXIELU("mlp.act_fn", xielu)} for xielu in known]
    unused = [r".*\.act_fn\.eps"]
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, ApertusLayer, mlp, unused)


def mlp(c: LlamaConfig, layer: Any, ops: OpSet, x: Value) -> Value:
    return ops.linear(activated(ops, ops.linear(x, layer.gate_up), layer.xielu), layer.down)


def activated(ops: OpSet, x: Value, p: XIELU) -> Value:
    """ELU(x) is x above zero and exp(x) - 1 below."""
    squares = ops.scale(ops.activate(x, Activation.RELU_SQUARED), p.alpha_p)
    elus = ops.scale(ops.activate(x, Activation.ELU), p.alpha_n)
    return ops.add(ops.add(squares, elus), ops.scale(x, p.beta - p.alpha_n))
