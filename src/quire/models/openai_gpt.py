"""The first GPT: GPT-2 with norms after residual sums, and without one behind the last layer."""

from quire.models import gpt
from quire.models.gpt2 import layer_specs
from quire.models.loading import EmbeddingTable, LoadedModel, TensorSpecs
from quire.ops.opset import Activation, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

ACTIVATIONS = {
    "gelu": Activation.GELU_TANH,  # the approximation, whatever its name says
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    return gpt.read_config(
        hf,
        activation=ACTIVATIONS[hf.expect("afn", *ACTIVATIONS, None) or "gelu"],
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        post_norm=True,
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("tokens_embed", config.vocab, config.hidden),
        "positions": EmbeddingTable("positions_embed", config.max_position, config.hidden),
    }
    layer = layer_specs(config, inputs_first=True, by_head=False)
    return gpt.load_model(ops, checkpoint, config, max_model_len, gpt.GPTTensors("transformer.", "h", top, layer))
