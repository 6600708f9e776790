"""Bamba: Llama in which most layers have a mixer of Mamba 2 instead of attention."""

from dataclasses import dataclass
from typing import Any

from quire.models import llama, moe
from quire.models.config import ATTENTION
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.mamba2_mixer import MAMBA, Mamba2Shape, hybrid_shape, mixer, mixer_specs
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

ATTENTION_TENSORS = ("qkv", "q_norm", "k_norm", "out")
FAMILY = LlamaFamily(
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    renamed={"model.final_layernorm.": "model.norm."},
    norms={"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(LlamaConfig):
    mamba: Mamba2Shape


def config(hf: CheckpointConfig) -> BambaConfig:
    attending = hf.list("attn_layer_indices", [])
    fields = llama.config_fields(translate(hf, FAMILY), FAMILY)
    kinds = tuple(ATTENTION if layer in attending else MAMBA for layer in range(fields["layers"]))
    mamba = hybrid_shape(hf)
    states = mamba.states(kinds.count(MAMBA)) if MAMBA in kinds else None
    return BambaConfig(**fields | {"kinds": kinds, "states": states}, mamba=mamba)


def layer_specs(c: Any) -> list[TensorSpecs]:
    attending = llama.layer_specs(c)
    others = {name: spec for name, spec in attending.items() if name not in ATTENTION_TENSORS}
    mixing = {**others, **mixer_specs(c.mamba, c.hidden, "mamba")}
    return [attending if kind == ATTENTION else mixing for kind in c.kinds]


@dataclass(frozen=True, slots=True)
class BambaLayer(moe.MoeLayer):
    """With attention, or with a mixer of Mamba 2, in which `qkv` is None. Families on it have experts, or both."""

    qkv: Any = None
    out: Any = None
    mamba_in: Any = None
    conv: Any = None
    conv_bias: Any = None
    scan: Any = None
    gated_norm: Any = None
    mamba_out: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: BambaConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layer_specs(config), BambaLayer, mixer=mix)


def mix(c: Any, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    """Attention or Mamba 2."""
    if layer.mamba_in is None:
        return llama.attention(c, layer, index, ops, x, angles, batch, slopes)
    return mixer(c.mamba, layer, c.eps, ops, x, batch, c.index_of_kind(index))
