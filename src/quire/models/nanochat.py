"""nanochat: Llama whose norms have no weights, and whose embeddings are normed, too.

A norm without weights is the same for a token wherever it stands: it is applied to the rows of the embedding table."""

import numpy as np

from quire.models import llama
from quire.models.activations import NAMES as ACTIVATION_NAMES
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel
from quire.ops.dequantize import dequantize
from quire.ops.opset import OpSet
from quire.ops.tensors import StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.delegating_checkpoint import DelegatingCheckpoint

DEFAULT_SOFTCAP = 15.0  # of logits; a null means that there is none


def softcap(hf: CheckpointConfig) -> dict[str, float]:
    given = hf.is_given("final_logit_softcapping")
    return {"logit_cap": hf.float("final_logit_softcapping", 0.0 if given else DEFAULT_SOFTCAP)}


FAMILY = LlamaFamily(
    defaults={"hidden_act": "relu2"},
    expects={"tie_word_embeddings": (False, None)},
    activations=dict(ACTIVATION_NAMES),
    scales=softcap,
    rope_reversed=True,
    qk_norms="heads",
    qk_norms_after_rope=True,
    stored_norms=False,
    gated=False,
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
)


def config(hf: CheckpointConfig) -> LlamaConfig:
    return LlamaConfig(**llama.config_fields(translate(hf, FAMILY), FAMILY))


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    return llama.load(ops, NormedEmbeddings(checkpoint, config.eps), config, max_model_len)


class NormedEmbeddings(DelegatingCheckpoint):
    """A checkpoint whose embeddings went through an RMS norm without weights."""

    def __init__(self, checkpoint: Checkpoint, eps: float) -> None:
        super().__init__(checkpoint)
        self._eps = eps

    def tensor(self, name: str) -> StoredTensor:
        tensor = super().tensor(name)
        if name != "model.embed_tokens.weight":
            return tensor
        rows = dequantize(tensor)
        return stored_floats(name, rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + np.float32(self._eps)))
