"""OpenELM: Llama with norms of q and k. The higher a layer, the more heads it has, and the wider is its feed-forward
layer.

The cache has as many heads as the layer with the most of them; where a layer has fewer, the others are zeros."""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama
from quire.models.activations import NAMES as ACTIVATION_NAMES
from quire.models.llama import LlamaConfig, LlamaLayer
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.uneven_heads import with_zero_heads
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = LlamaFamily(
    keys={
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_transformer_layers",
        "max_position_embeddings": "max_context_length",
        "rope_theta": "rope_freq_constant",
        "tie_word_embeddings": "share_input_output_layers",
        "hidden_act": "activation_fn_name",
    },
    defaults={"normalize_qk_projections": True, "share_input_output_layers": True, "head_dim": 128},
    expects={"ffn_with_glu": (True, None), "normalization_layer_name": ("rms_norm", None)},
    activations=ACTIVATION_NAMES,
    qk_norms="heads",
    qk_norms_key="normalize_qk_projections",
    renamed={
        "transformer.token_embeddings.": "model.embed_tokens.",
        "transformer.norm.": "model.norm.",
        "transformer.layers.": "model.layers.",
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".attn.": ".self_attn.",
        ".attn_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".ffn.proj_1.": ".mlp.gate_up_proj.",
        ".ffn.proj_2.": ".mlp.down_proj.",
    },
    fused_qkv=True,
    gate_up=("mlp.gate_up_proj",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenElmConfig(LlamaConfig):
    """`heads`, `kv_heads` and `intermediate` are the largest of all layers."""

    query_heads: tuple[int, ...]  # of each layer
    key_heads: tuple[int, ...]
    sizes: tuple[int, ...]  # of feed-forward layers

    def of_layer(self, layer: int) -> "OpenElmConfig":
        return replace(
            self, heads=self.query_heads[layer], kv_heads=self.key_heads[layer], intermediate=self.sizes[layer]
        )


def config(hf: CheckpointConfig) -> OpenElmConfig:
    given = translate(hf, FAMILY)
    queries, keys = (_listed(given, key) for key in ("num_query_heads", "num_kv_heads"))
    if any(q * keys[0] != k * queries[0] for q, k in zip(queries, keys, strict=True)):
        raise Unsupported(f"{hf.source}: layers differ in how many query heads share a key head")
    sizes = _listed(given, "ffn_sizes") if "ffn_sizes" in given else _sizes(given)
    largest = {"num_attention_heads": queries, "num_key_value_heads": keys, "intermediate_size": sizes}
    fields = llama.config_fields(given.with_values({key: max(counts) for key, counts in largest.items()}), FAMILY)
    return OpenElmConfig(**fields, query_heads=queries, key_heads=keys, sizes=sizes)


def _listed(hf: CheckpointConfig, key: str) -> tuple[int, ...]:
    counts, layers = hf.list(key), hf.int("num_hidden_layers")
    if len(counts) != layers or not all(type(count) is int and count > 0 for count in counts):
        raise BadCheckpoint(f"{hf.source}: {key} is {counts}, and not a number for each of {layers} layers")
    return tuple(counts)


def _sizes(hf: CheckpointConfig) -> tuple[int, ...]:
    """`ffn_multipliers` times the hidden size, rounded to a multiple of `ffn_dim_divisor`, but not down by a tenth."""
    unit, layers = hf.int("ffn_dim_divisor", 256, minimum=1), hf.int("num_hidden_layers")
    wanted = [float(factor) * hf.int("hidden_size") for factor in hf.list("ffn_multipliers")]
    if len(wanted) != layers:
        raise BadCheckpoint(f"{hf.source}: ffn_multipliers lists {len(wanted)} layers, and there are {layers}")
    sizes = [max(unit, int(size + unit / 2) // unit * unit) for size in wanted]
    return tuple(size + unit if size < 0.9 * exact else size for size, exact in zip(sizes, wanted, strict=True))


def load(ops: OpSet, checkpoint: Checkpoint, config: OpenElmConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    stored = set(checkpoint.names())
    layers = [llama.layer_specs(config.of_layer(layer), stored) for layer in range(config.layers)]
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, mixer=mixer)


def mixer(
    c: OpenElmConfig, layer: LlamaLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    own, width = c.of_layer(index), c.head_dim
    q, k, v = llama.queries_keys_values(own, layer, index, ops, x, angles, batch)
    k, v = (with_zero_heads(ops, part, own.kv_heads, width, c.kv_heads) for part in (k, v))
    ops.write_kv(k, v, batch, index)
    q = with_zero_heads(ops, q, own.heads, width, c.heads)
    attended = ops.paged_attention(q, batch, index, width, 1 / sqrt(width))
    if own.heads < c.heads:
        attended, _ = ops.split(attended, (own.q_size, c.q_size - own.q_size))
    return ops.linear(attended, layer.out)
