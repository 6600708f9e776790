"""LFM2 with experts in all but the first layers."""

from dataclasses import dataclass
from typing import Any

from quire.models import lfm2, llama, moe
from quire.models.layer_patterns import experts_after_dense
from quire.models.llama_families import translate
from quire.models.loading import LoadedModel, TensorSpecs, Vector
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import ExpertNames, MoeFamily
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.routing import grouped_sigmoid
from quire.ops.opset import Activation, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EXPERTS = ExpertNames(
    "feed_forward.gate",
    ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    "feed_forward.experts.{}.w2",
)
FAMILY = MoeFamily(
    keys={"n_routed_experts": "num_experts", "first_k_dense_replace": "num_dense_layers"},
    defaults={
        **lfm2.FAMILY.defaults,
        "block_auto_adjust_ff_dim": False,
        "first_k_dense_replace": 2,
    },
    adapt=lfm2.llama_keys,
    activations={"silu": Activation.SILU, None: Activation.SILU},
    qk_norms="heads",
    norms=lfm2.FAMILY.norms,
    q_norm=lfm2.FAMILY.q_norm,
    k_norm=lfm2.FAMILY.k_norm,
    gate_up=lfm2.FAMILY.gate_up,
    down=lfm2.FAMILY.down,
    routing=grouped_sigmoid,
    sparse=experts_after_dense,
    experts=(EXPERTS,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(MoeConfig):
    conv_bias: bool  # see Lfm2Config
    expert_bias: bool  # the scores that experts are chosen by are corrected


def config(hf: CheckpointConfig) -> Lfm2MoeConfig:
    fields = lfm2.hybrid_fields(hf, moe.config_fields(translate(hf, FAMILY), FAMILY))
    return Lfm2MoeConfig(**fields, expert_bias=hf.bool("use_expert_bias", True))


def layer_specs(c: Lfm2MoeConfig, flat: bool) -> list[TensorSpecs]:
    experts = dict(moe.expert_specs(c, EXPERTS))
    if c.expert_bias:
        experts["correction"] = Vector("feed_forward", c.num_experts, "expert_bias")
    return [
        {**without_mlp(specs), **experts} if sparse else specs
        for specs, sparse in zip(lfm2.layer_specs(c, flat), c.sparse, strict=True)
    ]


def without_mlp(specs: TensorSpecs) -> TensorSpecs:
    return {name: spec for name, spec in specs.items() if name not in ("gate_up", "down")}


@dataclass(frozen=True, slots=True)
class Lfm2MoeLayer(MoeLayer):
    """With attention, or with a convolution, in which `qkv` is None."""

    qkv: Any = None
    out: Any = None
    conv_in: Any = None
    conv: Any = None
    conv_bias: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: Lfm2MoeConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, lfm2.FAMILY.renamed)
    layers = layer_specs(config, lfm2.has_flat_convs(checkpoint))
    return llama.load_layers(
        ops, checkpoint, config, max_model_len, layers, Lfm2MoeLayer, moe.feed_forward, mixer=lfm2.mixer
    )
