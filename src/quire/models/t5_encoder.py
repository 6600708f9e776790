"""The encoder of T5 alone, which embeds texts (Sentence-T5, GTR)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.models import t5
from quire.models.config import EncoderConfig
from quire.models.loading import EmbeddingTable, LoadedModel, TensorSpecs, Vector, load_weights
from quire.ops.opset import Activation, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

UNUSED = r"encoder\.embed_tokens\.weight|decoder\..*|lm_head\.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class T5EncoderConfig(EncoderConfig):
    """The sizes of T5's encoder, as in T5Config."""

    intermediate: int
    eps: float
    gated: bool
    activation: Activation
    buckets: int
    max_distance: int
    own_biases: bool


def config(hf: CheckpointConfig) -> T5EncoderConfig:
    """The longest text is that of the checkpoint's training: more is possible, and the biases allow it."""
    whole = t5.config(hf.with_values({"decoder_start_token_id": hf.get("decoder_start_token_id", 0)}))
    length = hf.int("n_positions", 512)
    shared = ["architecture", "hidden", "heads", "kv_heads", "head_dim", "vocab", "intermediate", "eps", "gated"]
    shared += ["activation", "buckets", "max_distance"]
    layers = whole.encoder_layers
    return T5EncoderConfig(
        **{name: getattr(whole, name) for name in shared},
        own_biases=hf.architecture == "UMT5EncoderModel",
        layers=layers,
        max_position=length,
        max_length=t5.MAX_TOKENS,
        windows=(0,) * layers,
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: T5EncoderConfig, max_model_len: int) -> LoadedModel:
    top_specs: TensorSpecs = {
        "embed": EmbeddingTable("shared", config.vocab, config.hidden),
        "norm": Vector("encoder.final_layer_norm", config.hidden),
    }
    layers = {f"encoder.block.{index}.": t5.layer_specs(config, index, 1) for index in range(config.layers)}
    top, loaded = load_weights(ops, checkpoint, top_specs, layers, UNUSED)
    weights = [t5.T5Layer(**layer) for layer in loaded]
    return LoadedModel(config, partial(forward, config, top, weights), [top, *loaded])


def forward(c: T5EncoderConfig, top: Any, layers: list[t5.T5Layer], ops: OpSet, batch: Any) -> Value:
    return ops.rows(t5.encode_tokens(c, ops.embedding(batch.ids, top["embed"]), layers, top["norm"], ops, batch), batch)
