"""Nemotron-H: each layer is a mixer of Mamba 2, attention without rope, a feed-forward layer, or experts.

Neither feed-forward layers nor experts have a gate. Experts may work on a narrower value, `latent`."""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import mamba2
from quire.models.activations import NAMES as ACTIVATIONS
from quire.models.config import ATTENTION, ModelConfig
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpec, TensorSpecs, Vector, load_weights
from quire.models.mamba2_mixer import MAMBA, Mamba2Shape, dt_limit, mixer, mixer_specs
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.routing import grouped_sigmoid
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

MLP, MOE = "mlp", "moe"
PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, ATTENTION: ATTENTION, MLP: MLP, MOE: MOE}
RENAMED = {f"model.{name}.": f"backbone.{name}." for name in ("embeddings", "layers", "norm_f")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    mamba: Mamba2Shape
    eps: float
    tied: bool
    intermediate: int
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    num_experts: int
    expert_size: int
    shared_size: int  # of the experts that every token goes to, as one feed-forward layer
    latent_size: int  # columns of what experts read and give; 0: `hidden`
    routing: Routing | None
    num_mtp_layers: int  # layers behind the last that predict further tokens, of a GGUF file


def config(hf: CheckpointConfig) -> NemotronHConfig:
    kinds = layer_kinds(hf)
    hf.expect("mamba_hidden_act", "silu", None)
    hf.expect("sliding_window", None)
    bias = hf.bool("use_bias", False)
    mamba = Mamba2Shape(
        heads=hf.int("mamba_num_heads"),
        head_dim=hf.int("mamba_head_dim"),
        groups=hf.int("n_groups", 8),
        columns=hf.int("ssm_state_size", 128),
        taps=hf.int("conv_kernel", 4),
        conv_bias=hf.bool("use_conv_bias", True),
        in_bias=hf.bool("mamba_proj_bias", bias),
        out_bias=hf.bool("mamba_proj_bias", bias),
        dt_limit=dt_limit(hf),
        converted=hf.bool("converted", False),
    )
    heads, length = hf.int("num_attention_heads"), hf.int("max_position_embeddings")
    activation = hf.expect("mlp_hidden_act", *ACTIVATIONS)
    return NemotronHConfig(
        architecture=hf.architecture,
        hidden=hf.int("hidden_size"),
        layers=len(kinds),
        heads=heads,
        kv_heads=hf.int("num_key_value_heads", heads),
        head_dim=hf.int("head_dim", hf.int("attention_head_dim", hf.int("hidden_size") // max(heads, 1))),
        vocab=hf.int("vocab_size"),
        max_position=length,
        max_length=length,
        windows=(0,) * len(kinds),
        kinds=kinds,
        states=mamba.states(kinds.count(MAMBA)) if MAMBA in kinds else None,
        mamba=mamba,
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", False),
        intermediate=hf.int("intermediate_size"),
        activation=ACTIVATIONS[activation],
        attention_bias=hf.bool("attention_bias", False),
        mlp_bias=hf.bool("mlp_bias", False),
        num_experts=hf.int("n_routed_experts", 0),
        expert_size=hf.int("moe_intermediate_size", 0),
        shared_size=hf.int("moe_shared_expert_intermediate_size", 0),
        latent_size=hf.int("moe_latent_size", 0),
        routing=grouped_sigmoid(hf) if MOE in kinds else None,
        num_mtp_layers=hf.int("num_nextn_predict_layers", 0),
    )


def layer_kinds(hf: CheckpointConfig) -> tuple[str, ...]:
    listed = hf.list("layers_block_type", hf.list("layer_types", []))
    if not listed:
        letters = hf.str("hybrid_override_pattern")
        if strange := sorted(set(letters) - PATTERN.keys()):
            raise BadCheckpoint(f"hybrid_override_pattern has {', '.join(strange)}, and not only {', '.join(PATTERN)}")
        listed = [PATTERN[letter] for letter in letters]
    if unknown := sorted({str(kind) for kind in listed} - KINDS.keys()):
        raise Unsupported(f"layers of the kind {', '.join(unknown)}", f"supported: {', '.join(KINDS)}")
    if len(listed) > hf.int("num_hidden_layers", len(listed)):
        raise BadCheckpoint(f"{len(listed)} layers are listed, and there are {hf.int('num_hidden_layers')}")
    return tuple(KINDS[kind] for kind in listed)


def layer_specs(c: NemotronHConfig) -> list[TensorSpecs]:
    qkv = {"mixer.q_proj": c.q_size, "mixer.k_proj": c.kv_size, "mixer.v_proj": c.kv_size}
    attending: dict[str, TensorSpec] = {
        "qkv": Linear(qkv, c.hidden, bias=c.attention_bias),
        "out": Linear({"mixer.o_proj": c.hidden}, c.q_size, bias=c.attention_bias),
    }
    feeding: dict[str, TensorSpec] = {
        "up": Linear({"mixer.up_proj": c.intermediate}, c.hidden, bias=c.mlp_bias),
        "down": Linear({"mixer.down_proj": c.hidden}, c.intermediate, bias=c.mlp_bias),
    }
    kinds = {ATTENTION: attending, MLP: feeding, MAMBA: mixer_specs(c.mamba, c.hidden, "mixer"), MOE: expert_specs(c)}
    return [{"norm": Vector("norm", c.hidden), **kinds[kind]} for kind in c.kinds]


def expert_specs(c: NemotronHConfig) -> TensorSpecs:
    width = c.latent_size or c.hidden
    specs: dict[str, TensorSpec] = {
        "router": Linear({"mixer.gate": c.num_experts}, c.hidden, keep=Keep.ALL),
        "correction": Vector("mixer.gate", c.num_experts, "e_score_correction_bias"),
        "experts_up": ExpertLinear({"mixer.experts.{}.up_proj": c.expert_size}, width, c.num_experts),
        "experts_down": ExpertLinear({"mixer.experts.{}.down_proj": width}, c.expert_size, c.num_experts),
        "up": Linear({"mixer.shared_experts.up_proj": c.shared_size}, c.hidden, bias=c.mlp_bias),
        "down": Linear({"mixer.shared_experts.down_proj": c.hidden}, c.shared_size, bias=c.mlp_bias),
    }
    if c.latent_size:
        specs["latent_in"] = Linear({"mixer.fc1_latent_proj": c.latent_size}, c.hidden, bias=c.mlp_bias)
        specs["latent_out"] = Linear({"mixer.fc2_latent_proj": c.hidden}, c.latent_size, bias=c.mlp_bias)
    return specs


@dataclass(frozen=True, slots=True)
class NemotronHLayer:
    """Weights that its kind does not have are None."""

    norm: Any
    qkv: Any = None
    out: Any = None
    up: Any = None  # of a feed-forward layer, or of the shared experts
    down: Any = None
    router: Any = None
    correction: Any = None
    experts_up: Any = None
    experts_down: Any = None
    latent_in: Any = None
    latent_out: Any = None
    mamba_in: Any = None
    conv: Any = None
    conv_bias: Any = None
    scan: Any = None
    gated_norm: Any = None
    mamba_out: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: NemotronHConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, RENAMED)
    layers = {f"backbone.layers.{index}.": specs for index, specs in enumerate(layer_specs(config))}
    further = [rf"backbone\.layers\.{config.layers + index}\..*" for index in range(config.num_mtp_layers)]
    unused = "|".join([r"mtp\..*", *further, *(["lm_head.weight"] if config.tied else [])])
    top, loaded = load_weights(ops, checkpoint, mamba2.top_specs(config), layers, unused)
    weights = [NemotronHLayer(**layer) for layer in loaded]
    forward = partial(mamba2.forward, config, top, weights, partial(mix, config))
    return LoadedModel(config, forward, [top, *loaded])


def mix(c: NemotronHConfig, layer: NemotronHLayer, ops: OpSet, x: Value, batch: Any, index: int) -> Value:
    number = c.index_of_kind(index)
    if layer.up is not None:
        fed = ops.linear(ops.activate(ops.linear(x, layer.up), c.activation), layer.down)
        return fed if layer.router is None else ops.add(routed(c, layer, ops, x), fed)
    if layer.qkv is None:
        return mixer(c.mamba, layer, c.eps, ops, x, batch, number)
    q, k, v = ops.split(ops.linear(x, layer.qkv), (c.q_size, c.kv_size, c.kv_size))
    ops.write_kv(k, v, batch, number)
    return ops.linear(ops.paged_attention(q, batch, number, c.head_dim, 1 / sqrt(c.head_dim)), layer.out)


def routed(c: NemotronHConfig, layer: NemotronHLayer, ops: OpSet, x: Value) -> Value:
    assert c.routing is not None
    inputs = x if layer.latent_in is None else ops.linear(x, layer.latent_in)
    experts = (layer.experts_up, layer.experts_down)
    y = ops.moe(inputs, ops.linear(x, layer.router), *experts, c.routing, c.activation, layer.correction)
    return y if layer.latent_out is None else ops.linear(y, layer.latent_out)
