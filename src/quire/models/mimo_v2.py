"""MiMo-V2: MoE whose layers with a window have more key heads, and sinks; values are narrower than keys.

MiMo-V2.5 stores q, k and v in one tensor, in as many parts as the layers without a window have key heads.

The cache has as many key heads as layers with a window, and values as wide as keys (uneven_heads.py)."""

from collections.abc import Container
from dataclasses import dataclass
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import llama, moe
from quire.models.layer_patterns import experts_as_listed
from quire.models.llama import FUSED_QKV
from quire.models.llama_families import translate
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.moe import MoeConfig
from quire.models.moe_families import MoeFamily
from quire.models.qkv_order import parted_qkv
from quire.models.routing import grouped_sigmoid
from quire.models.uneven_heads import narrowed, widened
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """The windows of layers, by `hybrid_layer_pattern`; without it, all but the first and every sixth have one."""
    pattern = hf.list("hybrid_layer_pattern", [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(layers)])
    if len(pattern) != layers:
        raise BadCheckpoint(f"hybrid_layer_pattern lists {len(pattern)} layers, and there are {layers}")
    return tuple(hf.int("sliding_window") if local else 0 for local in pattern)


def llama_keys(hf: CheckpointConfig) -> CheckpointConfig:
    """The authors' configurations count the tokens before one that it sees, without itself."""
    values: dict[str, Any] = {"routed_scaling_factor": hf.float("routed_scaling_factor", 1.0)}
    if "sliding_window_size" in hf:
        values["sliding_window"] = hf.int("sliding_window_size") + 1
    if "mlp_layer_types" not in hf and isinstance(sparse := hf.get("moe_layer_freq"), list):
        values["mlp_layer_types"] = ["sparse" if experts else "dense" for experts in sparse]
    if "rope_local_base_freq" not in hf:
        values["rope_local_base_freq"] = hf.float("swa_rope_theta", 10_000.0)
    if "rope_local_partial_rotary_factor" not in hf:
        values["rope_local_partial_rotary_factor"] = hf.float("partial_rotary_factor", 0.334)
    return hf.with_values(values)


FAMILY = MoeFamily(
    keys={"rms_norm_eps": "layernorm_epsilon"},
    defaults={"partial_rotary_factor": 0.334, "first_k_dense_replace": 1},
    expects={
        "add_full_attention_sink_bias": (False, None),
        "add_swa_attention_sink_bias": (True, None),
        "n_shared_experts": (0, None),
        "rope_local_scaling": (None,),
    },
    adapt=llama_keys,
    windows=windows,
    default_window=129,
    local_rope=True,
    out_bias=False,
    unused=(r"(visual|audio_encoder|speech_embeddings)\..*",),
    sinks="attention_sink_bias",
    routing=grouped_sigmoid,
    sparse=experts_as_listed,
    correction="mlp.gate",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MimoV2Config(MoeConfig):
    """`kv_heads` is the number in the cache, and in layers with a window."""

    key_heads: tuple[int, ...]  # of each layer
    value_dim: int
    value_scale: float
    qkv_parts: int  # of a tensor of q, k and v, each with its share of all three


def config(hf: CheckpointConfig) -> MimoV2Config:
    translated = translate(hf, FAMILY)
    translated = translated.with_values({"num_local_experts": hf.int("n_routed_experts")})
    fields = moe.config_fields(translated, FAMILY)
    few, value_dim = fields["kv_heads"], hf.int("v_head_dim", 128)
    many = hf.int("swa_num_key_value_heads", 2 * few)
    if few < 1 or many % few or not 0 < value_dim <= fields["head_dim"]:
        raise BadCheckpoint(
            f"{hf.source}: layers have {few} and {many} key heads of {fields['head_dim']}, and values of {value_dim}"
        )
    return MimoV2Config(
        **fields | {"kv_heads": many},
        key_heads=tuple(many if window else few for window in fields["windows"]),
        value_dim=value_dim,
        value_scale=hf.float("attention_value_scale", 1.0),
        qkv_parts=few,
    )


def layer_specs(c: MimoV2Config, layer: int, specs: TensorSpecs, stored: Container[str] = ()) -> TensorSpecs:
    keys = c.key_heads[layer]
    sizes = {"q": c.q_size, "k": keys * c.head_dim, "v": keys * c.value_dim}
    parts: dict[str, int | LinearPart] = {f"self_attn.{part}_proj": size for part, size in sizes.items()}
    if f"model.layers.{layer}.{FUSED_QKV}.weight" in stored:
        parts = {FUSED_QKV: LinearPart(sum(sizes.values()), parted_qkv(c.qkv_parts, [*sizes.values()]))}
    attention = {
        "qkv": Linear(parts, c.hidden, bias=c.qkv_bias),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.heads * c.value_dim),
    }
    return {name: spec for name, spec in {**specs, **attention}.items() if name != "sinks" or c.windows[layer]}


def load(ops: OpSet, checkpoint: Checkpoint, config: MimoV2Config, max_model_len: int) -> LoadedModel:
    stored = set(checkpoint.names())
    common = moe.layer_specs(config, stored)
    layers = [layer_specs(config, layer, specs, stored) for layer, specs in enumerate(common)]
    return llama.load_layers(
        ops, checkpoint, config, max_model_len, layers, moe.MoeLayer, moe.feed_forward, mixer=mixer
    )


def mixer(
    c: MimoV2Config, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    keys, width = c.key_heads[index], c.head_dim
    q, k, v = ops.split(ops.linear(x, layer.qkv), (c.q_size, keys * width, keys * c.value_dim))
    q, k = ops.rope(q, angles, width), ops.rope(k, angles, width)
    v = llama.scaled(ops, v, c.value_scale)
    times = c.kv_heads // keys
    ops.write_kv(
        widened(ops, k, keys, width, width, times), widened(ops, v, keys, c.value_dim, width, times), batch, index
    )
    scale, window = 1 / sqrt(width), c.windows[index]
    attended = ops.paged_attention(q, batch, index, width, scale, window, sinks=layer.sinks)
    return ops.linear(narrowed(ops, attended, c.heads, c.value_dim, width), layer.out)
