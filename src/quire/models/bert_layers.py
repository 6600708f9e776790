"""What encoders like BERT have in common: sizes, layers, and classifiers.

Attention and feed-forward have biases, and most have their norms after each residual sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.loading import Affine, LayerNorm, Linear, TensorSpecs
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.config import CheckpointConfig

ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
}
BERT_LAYER = {  # our name -> tensor
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def is_classifier(hf: CheckpointConfig) -> bool:
    return hf.architecture.endswith("ForSequenceClassification")


def label_count(hf: CheckpointConfig) -> int:
    """transformers writes the names of labels, or their number where they have no names."""
    return len(hf.dict("id2label", {})) or hf.int("num_labels", 2)


def head_columns(hidden: int, heads: int) -> int:
    """The columns of each head."""
    if heads < 1 or hidden % heads:
        raise BadCheckpoint(f"{hidden} columns cannot be divided among {heads} heads")
    return hidden // heads


def encoder_fields(hf: CheckpointConfig, hidden: int, layers: int, heads: int, max_position: int) -> dict[str, Any]:
    """The fields of an `EncoderConfig` without windows."""
    return {
        "architecture": hf.architecture,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_columns(hidden, heads),
        "vocab": hf.int("vocab_size"),
        "max_position": max_position,
        "max_length": max_position,
        "windows": (0,) * layers,
        "labels": label_count(hf) if is_classifier(hf) else 0,
    }


def layer_specs(names: Mapping[str, str], hidden: int, intermediate: int) -> TensorSpecs:
    """`names`: as BERT_LAYER."""
    return {
        "qkv": Linear({names[part]: hidden for part in "qkv"}, hidden, bias=True),
        "out": Linear({names["out"]: hidden}, hidden, bias=True),
        "attn_norm": LayerNorm(names["attn_norm"], hidden),
        "up": Linear({names["up"]: intermediate}, hidden, bias=True),
        "down": Linear({names["down"]: hidden}, intermediate, bias=True),
        "mlp_norm": LayerNorm(names["mlp_norm"], hidden),
    }


@dataclass(frozen=True, slots=True)
class BertLayer:
    qkv: PackedWeight
    out: PackedWeight
    attn_norm: Affine
    up: PackedWeight
    down: PackedWeight
    mlp_norm: Affine


def after_attention(
    layer: BertLayer, ops: OpSet, x: Value, attended: Value, activation: Activation, eps: float
) -> Value:
    """The rest of a layer, whose norms stand after the sums. x: its input."""
    x = ops.layer_norm(ops.add(x, ops.linear(attended, layer.out)), *layer.attn_norm, eps)
    inner = ops.activate(ops.linear(x, layer.up), activation)
    return ops.layer_norm(ops.add(x, ops.linear(inner, layer.down)), *layer.mlp_norm, eps)


def classifier_specs(pooler: str, classifier: str, hidden: int, labels: int) -> TensorSpecs:
    """Pooler, activation, classifier. Nothing where there are no labels."""
    if not labels:
        return {}
    return {
        "pooler": Linear({pooler: hidden}, hidden, bias=True, keep=Keep.ALL),
        "head": Linear({classifier: labels}, hidden, bias=True, keep=Keep.ALL),
    }


def rows_or_labels(
    pooler: PackedWeight | None, head: PackedWeight | None, activation: Activation, ops: OpSet, x: Value, batch: Any
) -> Value:
    """The hidden states, or a classifier's logits, of rows batch.logit_rows."""
    if pooler is None or head is None:
        return ops.rows(x, batch)
    return ops.logits(ops.activate(ops.linear(x, pooler), activation), head, batch)
