"""Granite 4: Granite in which most layers have a mixer of Mamba 2 instead of attention, and all may have experts.

Beside its experts, a layer has a feed-forward layer that every token goes to."""

from dataclasses import dataclass, replace

from quire.core.errors import Unsupported
from quire.models import bamba, llama, moe
from quire.models.config import ATTENTION
from quire.models.layer_patterns import full_attention, rope_by_type
from quire.models.llama_families import granite_scales, translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.mamba2_mixer import MAMBA, Mamba2Shape, hybrid_shape
from quire.models.moe import MoeConfig
from quire.models.moe_families import GRANITE_EXPERTS, GRANITE_GGUF_EXPERTS, MoeFamily
from quire.models.routing import softmax_top_k
from quire.ops.opset import OpSet, Routing
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

KINDS = {"attention": ATTENTION, "full_attention": ATTENTION, "mamba": MAMBA, "linear_attention": MAMBA}


def llama_keys(hf: CheckpointConfig) -> CheckpointConfig:
    return hf.with_values({"layer_types": None, "intermediate_size": hf.int("shared_intermediate_size", 1024)})


FAMILY = MoeFamily(
    defaults={"norm_topk_prob": True},
    adapt=llama_keys,
    scales=granite_scales,
    windows=full_attention,
    rotated=rope_by_type,
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    experts=(GRANITE_EXPERTS,),
)


GGUF_FAMILY = replace(  # gate and up are stored apart there
    FAMILY,
    gate_up=("shared_mlp.gate_proj", "shared_mlp.up_proj"),
    down="shared_mlp.down_proj",
    experts=(GRANITE_GGUF_EXPERTS,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(MoeConfig):
    mamba: Mamba2Shape | None


def config(hf: CheckpointConfig) -> GraniteHybridConfig:
    family = GGUF_FAMILY if hf.bool("converted", False) else FAMILY
    translated = translate(hf, family)
    fields = llama.config_fields(translated, family)
    layers, num_experts = fields["layers"], hf.int("num_local_experts", 0)
    kinds = layer_kinds(hf, layers)
    mamba = hybrid_shape(hf) if MAMBA in kinds else None
    experts = {
        "num_experts": num_experts,
        "routing": softmax_top_k(translated) if num_experts else Routing(1),
        "expert_size": hf.int("intermediate_size", 1),
        "shared_size": 0,  # the feed-forward layer beside the experts is the one that Llama has
        "sparse": (num_experts > 0,) * layers,
    }
    if num_experts:
        experts["routing"].check(num_experts)
    states = mamba.states(kinds.count(MAMBA)) if mamba else None
    return GraniteHybridConfig(**fields | experts | {"kinds": kinds, "states": states}, mamba=mamba)


def layer_kinds(hf: CheckpointConfig, layers: int) -> tuple[str, ...]:
    listed = hf.list("layer_types", hf.list("layers_block_type", ["mamba"] * layers))
    if unknown := sorted({str(kind) for kind in listed} - KINDS.keys()):
        raise Unsupported(f"layer_types lists {', '.join(unknown)}", f"supported: {', '.join(KINDS)}")
    if len(listed) != layers:
        raise Unsupported(f"layer_types lists {len(listed)} layers, and there are {layers}")
    return tuple(KINDS[kind] for kind in listed)


def layer_specs(c: GraniteHybridConfig) -> list[TensorSpecs]:
    layers = bamba.layer_specs(c) if c.mamba else [llama.layer_specs(c)] * c.layers
    if not c.num_experts:
        return layers
    experts = moe.expert_specs(c, c.family.experts[0])
    return [{**specs, **experts} for specs in layers]


def load(ops: OpSet, checkpoint: Checkpoint, config: GraniteHybridConfig, max_model_len: int) -> LoadedModel:
    layers = layer_specs(config)
    return llama.load_layers(
        ops, checkpoint, config, max_model_len, layers, bamba.BambaLayer, moe.feed_forward, mixer=bamba.mix
    )
