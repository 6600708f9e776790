"""Jamba: Llama without rope in which most layers have a mixer of Mamba instead of attention, and some have experts."""

from dataclasses import dataclass
from typing import Any

from quire.models import bamba, llama, moe
from quire.models.config import ATTENTION
from quire.models.layer_patterns import full_attention
from quire.models.llama_families import translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.mamba import dt_rank
from quire.models.mamba2_mixer import MAMBA
from quire.models.mamba_mixer import MambaShape, mixer, mixer_specs
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import ExpertNames, MoeFamily
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import OpSet, Routing, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EXPERTS = ExpertNames(
    "feed_forward.router",
    ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    "feed_forward.experts.{}.down_proj",
)
FAMILY = MoeFamily(
    windows=full_attention,
    rotated=lambda hf, windows: (False,) * len(windows),
    renamed=bamba.FAMILY.renamed,
    norms=bamba.FAMILY.norms,
    gate_up=bamba.FAMILY.gate_up,
    down=bamba.FAMILY.down,
    experts=(EXPERTS,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(MoeConfig):
    mamba: MambaShape


def config(hf: CheckpointConfig) -> JambaConfig:
    fields = llama.config_fields(translate(hf, FAMILY), FAMILY)
    layers, num_experts = range(fields["layers"]), hf.int("num_experts", 16)
    attending, sparse = (_every(hf, name, layers) for name in ("attn_layer", "expert_layer"))
    kinds = tuple(ATTENTION if here else MAMBA for here in attending)
    mamba = MambaShape(
        channels=hf.int("mamba_expand", 2) * fields["hidden"],
        columns=hf.int("mamba_d_state", 16),
        rank=dt_rank(hf, "mamba_dt_rank"),
        taps=hf.int("mamba_d_conv", 4),
        conv_bias=hf.bool("mamba_conv_bias", True),
        bias=hf.bool("mamba_proj_bias", False),
        norms="stored",
        norm_eps=fields["eps"],
        converted=hf.bool("converted", False),
    )
    experts = {
        "num_experts": num_experts,
        "routing": Routing(hf.int("num_experts_per_tok", 2)),
        "expert_size": fields["intermediate"],
        "shared_size": 0,
        "sparse": tuple(here and num_experts > 1 for here in sparse),
    }
    if any(experts["sparse"]):
        experts["routing"].check(num_experts)
    states = mamba.states(kinds.count(MAMBA)) if MAMBA in kinds else None
    return JambaConfig(**fields | experts | {"kinds": kinds, "states": states}, mamba=mamba)


def _every(hf: CheckpointConfig, name: str, layers: range) -> list[bool]:
    """Which layers are those of `name_period` and `name_offset`; of a GGUF file, those that it lists."""
    if (listed := hf.get(f"{name}s")) is not None:
        return [layer in listed for layer in layers]
    period, offset = hf.int(f"{name}_period", minimum=1), hf.int(f"{name}_offset")
    return [layer % period == offset for layer in layers]


def layer_specs(c: JambaConfig) -> list[TensorSpecs]:
    dense = llama.layer_specs(c)
    experts = {**moe.attention_specs(c), **moe.expert_specs(c, EXPERTS)}
    mamba = mixer_specs(c.mamba, c.hidden, "mamba")
    layers: list[TensorSpecs] = []
    for kind, sparse in zip(c.kinds, c.sparse, strict=True):
        specs = experts if sparse else dense
        if kind == MAMBA:
            specs = {**{name: spec for name, spec in specs.items() if name not in bamba.ATTENTION_TENSORS}, **mamba}
        layers.append(specs)
    return layers


@dataclass(frozen=True, slots=True)
class JambaLayer(MoeLayer):
    """With attention, or with a mixer of Mamba, in which `qkv` is None."""

    qkv: Any = None
    out: Any = None
    mamba_in: Any = None
    conv: Any = None
    conv_bias: Any = None
    parameters: Any = None
    dt: Any = None
    scan: Any = None
    mamba_out: Any = None
    dt_norm: Any = None
    b_norm: Any = None
    c_norm: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: JambaConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    layers = layer_specs(config)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, JambaLayer, moe.feed_forward, mixer=mix)


def mix(c: JambaConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    """Attention or Mamba."""
    if layer.mamba_in is None:
        return llama.attention(c, layer, index, ops, x, angles, batch, slopes)
    return mixer(c.mamba, layer, ops, x, batch, c.index_of_kind(index))
