"""Llama 4: experts whose inputs are weighed, and attention of two kinds.

Most layers have rope, norms of q and k without weights, and see the tokens of their own chunk of 8,192; every fourth
has neither, sees all tokens, and scales its queries by their position. Checkpoints have all experts of a layer in one
tensor; GGUF files have gate and up as two."""

from dataclasses import dataclass, replace

from quire.models import llama, moe
from quire.models.constant_weights import Ones
from quire.models.layer_patterns import rope_as_listed
from quire.models.llama import QueryGrowth
from quire.models.llama_families import translate
from quire.models.loading import LoadedModel, TensorSpec, TensorSpecs
from quire.models.moe import MoeConfig
from quire.models.moe_families import ExpertNames, MoeFamily
from quire.ops.opset import OpSet, Routing
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EXPERTS = ExpertNames(
    "feed_forward.router",
    ("feed_forward.experts.gate_up_proj",),
    "feed_forward.experts.down_proj",
    transposed=True,
)
GGUF_EXPERTS = ExpertNames(
    "feed_forward.router",
    ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    "feed_forward.experts.{}.down_proj",
)


def weighed_inputs(hf: CheckpointConfig) -> Routing:
    return Routing(hf.int("num_experts_per_tok"), "sigmoid", weigh_inputs=True)


def chunks(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """Layers with rope see their own chunk of `attention_chunk_size` tokens."""
    size = hf.int("attention_chunk_size", 0)
    return tuple(size if rotated else 0 for rotated in rope_as_listed(hf, (0,) * layers))


def sparse_layers(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """`moe_layers`, or every `interleave_moe_layer_step`-th."""
    step = hf.int("interleave_moe_layer_step", 1, minimum=1)
    listed = hf.list("moe_layers", list(range(step - 1, layers, step)))
    return tuple(layer in listed for layer in range(layers))


def llama_keys(hf: CheckpointConfig) -> CheckpointConfig:
    """`intermediate_size` is that of an expert, and of the shared one. `layer_types` follows from `no_rope_layers`."""
    size = hf.int("intermediate_size")
    values = {
        "layer_types": None,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "intermediate_size": hf.int("intermediate_size_mlp", 16384),
        "no_rope_layers": hf.list("no_rope_layers", []) or None,
    }
    return hf.with_values(values)


FAMILY = MoeFamily(
    adapt=llama_keys,
    windows=chunks,
    rotated=rope_as_listed,
    rope_interleaved=True,
    qk_norms_after_rope=True,
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    routing=weighed_inputs,
    sparse=sparse_layers,
    experts=(EXPERTS, GGUF_EXPERTS),
    shared="feed_forward.shared_expert",
    shared_gate=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(MoeConfig):
    normed_rope: bool  # layers with rope have norms of q and k, without weights


def config(hf: CheckpointConfig) -> Llama4Config:
    fields = moe.config_fields(translate(hf, FAMILY), FAMILY)
    fields |= {"chunked": True, "query_growth": query_growth(hf)}
    return Llama4Config(**fields, normed_rope=hf.bool("use_qk_norm", True))


def query_growth(hf: CheckpointConfig) -> QueryGrowth | None:
    growth, length = hf.float("attn_scale", 0.1), hf.int("floor_scale", 8192, minimum=1)
    tuned = bool(hf.get("attn_temperature_tuning", True))  # some configurations have a number here
    return QueryGrowth(growth, length, offset=1, only_without_rope=True) if tuned else None


def load(ops: OpSet, checkpoint: Checkpoint, config: Llama4Config, max_model_len: int) -> LoadedModel:
    if max_model_len <= max(config.windows):  # all tokens are in one chunk
        config = replace(config, windows=(0,) * config.layers, chunked=False)
    layers = layer_specs(config, set(checkpoint.names()), checkpoint.shape)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, moe.MoeLayer, moe.feed_forward)


def layer_specs(c: Llama4Config, stored: set[str], shape: moe.Shapes) -> list[TensorSpecs]:
    norms: dict[str, TensorSpec] = {"q_norm": Ones(c.head_dim), "k_norm": Ones(c.head_dim)}
    return [
        {**specs, **norms} if rotated and c.normed_rope else specs
        for specs, rotated in zip(moe.layer_specs(c, stored, shape), c.rotated, strict=True)
    ]
