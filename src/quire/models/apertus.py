"""Apertus: Llama with norms of heads, whose feed-forward layer has no gate and two learned numbers in its activation.

xIELU(x) is alpha_p x^2 + beta x above zero, and alpha_n (exp(x) - 1 - x) + beta x below."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import Matrix, Model, Vector
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> LlamaConfig:
    hf.expect("hidden_act", "xielu")
    return LlamaConfig(**llama.numbers(hf) | {"qk_norms": "heads"})


class Curve(NamedTuple):
    above: float  # alpha_p
    below: float  # alpha_n
    slope: float  # beta


@dataclass(frozen=True, slots=True)
class StoredCurve:
    """The numbers of an activation: the alphas are stored as what makes them under a softplus, the second less beta."""

    name: str

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((f"{self.name}.{part}", (1,)) for part in ("alpha_p", "alpha_n", "beta"))

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Curve:
        above, below, slope = (float(dequantize(tensor).item()) for tensor in tensors)
        return Curve(_softplus(above), slope + _softplus(below), slope)


def _softplus(x: float) -> float:
    return float(np.logaddexp(0.0, x))


@dataclass(frozen=True, slots=True)
class Layer(llama.Layer):
    """`gate_up` is what is activated."""

    curve: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> Model:
    names = {
        **llama.layer_names(config),
        "norm1": Vector("attention_layernorm", config.hidden),
        "norm2": Vector("feedforward_layernorm", config.hidden),
        "gate_up": Matrix({"mlp.up_proj": config.intermediate}, config.hidden, bias=config.mlp_bias),
        "curve": StoredCurve("mlp.act_fn"),
    }
    forward = partial(llama.forward, feed_forward=mlp)
    unused = [r".*\.act_fn\.eps"]  # how near to zero nothing is computed
    return llama.load_with(ops, checkpoint, config, max_model_len, forward, [names] * config.layers, Layer, unused)


def mlp(c: LlamaConfig, layer: Any, ops: OpSet, x: Value) -> Value:
    return ops.linear(activated(ops, ops.linear(x, layer.gate_up), layer.curve), layer.down)


def activated(ops: OpSet, x: Value, curve: Curve) -> Value:
    """ELU(x) is x above zero and exp(x) - 1 below."""
    squares = ops.scale(ops.activate(x, Activation.RELU_SQUARED), curve.above)
    bends = ops.scale(ops.activate(x, Activation.ELU), curve.below)
    return ops.add(ops.add(squares, bends), ops.scale(x, curve.slope - curve.below))
