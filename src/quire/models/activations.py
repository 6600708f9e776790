"""The names of activations in config.json."""

from quire.ops.opset import Activation
from quire.weights.config import CheckpointConfig

NAMES: dict[str | None, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "quick_gelu": Activation.QUICK_GELU,
}


def read_activation(hf: CheckpointConfig, key: str, default: str | None = None) -> Activation:
    if default is not None and key not in hf:
        return NAMES[default]
    return NAMES[hf.expect(key, *NAMES)]
