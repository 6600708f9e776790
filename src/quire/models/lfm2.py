"""LFM2: Llama with norms of q and k, in which most layers have a short causal convolution instead of attention.

Such a layer computes C * conv(B * x), where B, C and x are one linear layer of its input: two gates, and what the
convolution over the last few tokens mixes."""

from dataclasses import dataclass
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama
from quire.models.causal_conv import StoredConv
from quire.models.config import ATTENTION
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import Linear, LoadedModel, TensorSpec, TensorSpecs, Vector
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.kv_spec import MAX_CONV_TAPS, ConvSpec
from quire.ops.opset import Activation, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

CONV = "conv"  # a kind of layer, beside ATTENTION
ATTENTION_TENSORS = ("qkv", "q_norm", "k_norm", "gate", "out")


def llama_keys(hf: CheckpointConfig) -> CheckpointConfig:
    return hf.with_values(
        {
            "layer_types": None,
            "intermediate_size": intermediate_size(hf),
            "rms_norm_eps": hf.float("norm_eps", hf.float("rms_norm_eps", 1e-5)),
            "tie_word_embeddings": hf.bool("tie_embedding", hf.bool("tie_word_embeddings", True)),
        }
    )


def intermediate_size(hf: CheckpointConfig) -> int:
    """The stored size is that of a feed-forward layer without a gate, unless `block_auto_adjust_ff_dim` is false."""
    size = hf.int("block_ff_dim" if "block_ff_dim" in hf else "intermediate_size")
    if not hf.bool("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if hf.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    unit = hf.int("block_multiple_of", 256, minimum=1)
    return -(-int(hf.float("block_ffn_dim_multiplier", 1.0) * size) // unit) * unit


FAMILY = LlamaFamily(
    defaults={"rope_theta": 1_000_000.0},
    adapt=llama_keys,
    activations={"silu": Activation.SILU, None: Activation.SILU},
    qk_norms="heads",
    renamed={"model.embedding_norm.": "model.norm."},
    norms={"attn_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(LlamaConfig):
    conv_bias: bool  # of the convolution, and of the linear layers around it


def config(hf: CheckpointConfig) -> Lfm2Config:
    return Lfm2Config(**hybrid_fields(hf, llama.config_fields(translate(hf, FAMILY), FAMILY)))


def hybrid_fields(hf: CheckpointConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, with those of convolutions added."""
    kinds, taps = layer_kinds(hf, fields["layers"]), hf.int("conv_L_cache", 3)
    if not 1 <= taps <= MAX_CONV_TAPS:
        raise Unsupported(f"conv_L_cache is {taps}", f"convolutions over 1 to {MAX_CONV_TAPS} tokens are supported")
    num_convs = kinds.count(CONV)
    conv = ConvSpec(num_convs, fields["hidden"], taps) if num_convs else None
    return fields | {"kinds": kinds, "conv_bias": hf.bool("conv_bias", False), "conv": conv}


def layer_kinds(hf: CheckpointConfig, layers: int) -> tuple[str, ...]:
    """The kind of every layer, by `layer_types` or, in older configurations, `full_attn_idxs`; without either,
    attention in all layers."""
    attending = hf.list("full_attn_idxs", list(range(layers)))
    kinds = hf.list("layer_types", [ATTENTION if layer in attending else CONV for layer in range(layers)])
    if len(kinds) != layers:
        raise BadCheckpoint(f"layer_types lists {len(kinds)} layers, and there are {layers}")
    if unknown := sorted({str(kind) for kind in kinds} - {ATTENTION, CONV}):
        raise Unsupported(f"layer_types lists {', '.join(unknown)}", f"supported: {ATTENTION}, {CONV}")
    if ATTENTION not in kinds:
        raise Unsupported("no layer has attention", f"at least one of layer_types must be {ATTENTION}")
    return tuple(kinds)


def layer_specs(c: Any, flat: bool) -> list[TensorSpecs]:
    """`flat`: see StoredConv."""
    return with_convs(c, {**llama.layer_specs(c), "out": Linear({"self_attn.out_proj": c.hidden}, c.q_size)}, flat)


def with_convs(c: Any, attending: TensorSpecs, flat: bool) -> list[TensorSpecs]:
    """`attending`: the specs of a layer with attention."""
    others = {name: spec for name, spec in attending.items() if name not in ATTENTION_TENSORS}
    return [attending if kind == ATTENTION else {**others, **conv_specs(c, flat)} for kind in c.kinds]


def conv_specs(c: Any, flat: bool) -> TensorSpecs:
    specs: dict[str, TensorSpec] = {
        "conv_in": Linear({"conv.in_proj": 3 * c.hidden}, c.hidden, bias=c.conv_bias),
        "conv": StoredConv("conv.conv", c.conv.channels, c.conv.taps, flat),
        "out": Linear({"conv.out_proj": c.hidden}, c.hidden, bias=c.conv_bias),
    }
    if c.conv_bias:
        specs["conv_bias"] = Vector("conv.conv", c.hidden, "bias")
    return specs


@dataclass(frozen=True, slots=True)
class Lfm2Layer(llama.LlamaLayer):
    """With attention, or with a convolution, in which `qkv` is None."""

    qkv: Any = None
    out: Any = None
    gate_up: Any = None
    down: Any = None
    conv_in: Any = None
    conv: Any = None
    conv_bias: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: Lfm2Config, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    layers = layer_specs(config, has_flat_convs(checkpoint))
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, Lfm2Layer, mixer=mixer)


def has_flat_convs(checkpoint: Checkpoint) -> bool:
    names = (name for name in checkpoint.names() if name.endswith(".conv.conv.weight"))
    return any(len(checkpoint.shape(name)) == 2 for name in names)


def mixer(c: Any, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    """Attention or a convolution."""
    if layer.conv_in is None:
        return llama.attention(c, layer, index, ops, x, angles, batch, slopes)
    b, gate, x = ops.split(ops.linear(x, layer.conv_in), (c.hidden,) * 3)
    mixed = ops.causal_conv(ops.mul(b, x), layer.conv, layer.conv_bias, batch, c.index_of_kind(index))
    return ops.linear(ops.mul(gate, mixed), layer.out)
