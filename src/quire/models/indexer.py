"""The indexer of sparse attention (DSA), of DeepSeek V3.2 and GLM-5: by small queries and keys of its own, a token
chooses the `index_topk` positions that it attends to. In GLM-5, a layer may use the choice of a layer before it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.loading import Linear, LinearPart, TensorSpecs, Vector
from quire.ops.kv_spec import IndexSpec
from quire.ops.opset import Keep, OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.config import CheckpointConfig

KEY_EPS = 1e-6  # of the norm of keys: no configuration has it
MODES = {"F": "full", "S": "shared"}


@dataclass(frozen=True, slots=True)
class IndexerShape:
    heads: int
    columns: int  # of a query, and of the key
    rope_dim: int  # of these columns, the first are rotated
    interleaved: bool  # the checkpoint has the two columns of a rotary pair side by side
    own: tuple[bool, ...]  # for each layer: whether it has an indexer; else it uses the choice of a layer before

    @property
    def order(self) -> NDArray[np.int32]:
        """We rotate column i with column i + rope_dim / 2."""
        rotated, columns = np.arange(self.rope_dim, dtype=np.int32), np.arange(self.columns, dtype=np.int32)
        if not self.interleaved:
            return columns
        return np.concatenate([rotated[::2], rotated[1::2], columns[self.rope_dim :]])


@dataclass(frozen=True, slots=True)
class Indexer:
    index_query: PackedWeight  # the latent of queries -> queries
    index_in: PackedWeight  # hidden -> the key, and a weight for each head
    index_norm: Any
    index_norm_bias: Any


@dataclass(slots=True)
class Choice:
    """The positions that the last layer with an indexer has chosen, on the way through the layers."""

    positions: Value | None = None


def index_fields(hf: CheckpointConfig, interleaved: bool) -> dict[str, Any]:
    """`index` and `indexer` of a configuration."""
    if not hf.int("q_lora_rank", 0):
        raise Unsupported("an indexer without q_lora_rank: its queries are computed from the latent of queries")
    columns, rope_dim = hf.int("index_head_dim", 128), hf.int("qk_rope_head_dim")
    heads, top_k = hf.int("index_n_heads", 64), hf.int("index_topk", 2048)
    if not 0 < rope_dim <= columns or heads < 1 or top_k < 1:
        raise BadCheckpoint(
            f"index_head_dim is {columns}, with qk_rope_head_dim {rope_dim}; index_n_heads is {heads}, "
            f"index_topk {top_k}"
        )
    own = tuple(mode == "full" for mode in _modes(hf))
    return {
        "index": IndexSpec(columns, top_k),
        "indexer": IndexerShape(heads, columns, rope_dim, interleaved, own),
    }


def _modes(hf: CheckpointConfig) -> list[str]:
    layers = hf.int("num_hidden_layers")
    pattern = hf.get("index_topk_pattern")
    every, offset = max(hf.int("index_topk_freq", 1), 1), hf.int("index_skip_topk_offset", 2)
    scheduled = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(layers)]
    if pattern:
        scheduled = [MODES.get(mode, mode) for mode in pattern]
    modes = hf.list("indexer_types", scheduled)
    if len(modes) != layers or modes[:1] != ["full"] or not {*modes} <= {*MODES.values()}:
        raise BadCheckpoint(
            f"indexer_types has {len(modes)} layers of {', '.join(map(str, dict.fromkeys(modes)))}; it needs {layers}, "
            "each full or shared, the first full"
        )
    return modes


def indexer_specs(shape: IndexerShape, hidden: int, q_lora_rank: int) -> TensorSpecs:
    """Kept as they are: an error would change which positions are read."""
    name, order = "self_attn.indexer", shape.order
    heads = (np.arange(shape.heads, dtype=np.int32)[:, None] * shape.columns + order).ravel()
    queries = {f"{name}.wq_b": LinearPart(shape.heads * shape.columns, heads)}
    inputs: dict[str, int | LinearPart] = {
        f"{name}.wk": LinearPart(shape.columns, order),
        f"{name}.weights_proj": shape.heads,
    }
    return {
        "index_query": Linear(queries, q_lora_rank, keep=Keep.ALL),
        "index_in": Linear(inputs, hidden, keep=Keep.ALL),
        "index_norm": Vector(f"{name}.k_norm", shape.columns, order=order),
        "index_norm_bias": Vector(f"{name}.k_norm", shape.columns, "bias", order=order),
    }


def choose(
    shape: IndexerShape, w: Indexer, layer: int, ops: OpSet, x: Value, q_latent: Value, angles: Value, batch: Any
) -> Value:
    """-> the positions that each token attends to"""
    key, weights = ops.split(ops.linear(x, w.index_in), (shape.columns, shape.heads))
    key = ops.layer_norm(key, w.index_norm, w.index_norm_bias, KEY_EPS)
    ops.write_index_key(ops.rope(key, angles, shape.columns), batch, layer)
    queries = ops.rope(ops.linear(q_latent, w.index_query), angles, shape.columns)
    return ops.top_positions(queries, weights, batch, layer)
