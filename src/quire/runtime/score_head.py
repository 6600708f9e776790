"""How a decoder scores a text: a linear layer over the hidden state of its last token.

A classifier has that layer. A model that is asked a question whose answer is one token (Qwen3-Reranker) scores by the
logit of that token less the logit of another: by rows of its head."""

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.bert import label_count
from quire.models.config import ModelConfig
from quire.ops.dequantize import dequantize
from quire.ops.opset import Float32
from quire.weights.checkpoint import Checkpoint
from quire.weights.decoder_body import BODY, CLASSIFIER, EMBEDDING

ScoreTokens = tuple[int, int | None]  # the answers yes and no; None: the score is the logit of yes


def classifier_head(checkpoint: Checkpoint, config: ModelConfig) -> Float32:
    """[labels, hidden]. Of a model that answers yes or no (GGUF files of Qwen3-Reranker), one for the two is left."""
    labels = checkpoint.config.dict("id2label", {})
    shape = (label_count(checkpoint.config), config.hidden)
    if CLASSIFIER not in checkpoint.names() or checkpoint.shape(CLASSIFIER) != shape:
        raise BadCheckpoint(f"{checkpoint.path} has no {CLASSIFIER} of {[*shape]}, the classifier of its config.json")
    weight: Float32 = dequantize(checkpoint.tensor(CLASSIFIER)).reshape(shape) / np.float32(_logit_scale(config))
    return weight[:1] - weight[1:] if [*labels.values()] == ["yes", "no"] else weight


def _logit_scale(config: ModelConfig) -> float:
    """Of some decoders, and already in hidden states as `Headless` returns them."""
    scale: float = getattr(config, "logit_scale", 1.0)
    return scale


def token_head(checkpoint: Checkpoint, config: ModelConfig, tokens: ScoreTokens) -> Float32:
    """[1, hidden]"""
    names = checkpoint.names()
    name = next((name for name in ("lm_head.weight", BODY + EMBEDDING, EMBEDDING) if name in names), None)
    if name is None or "lm_head.bias" in names or getattr(config, "logit_cap", 0.0):
        raise Unsupported(
            f"a `{config.architecture}` does not score by the logits of single tokens",
            "use a reranker, or a head of Llama's kind",
        )
    if bad := next((token for token in tokens if token is not None and not 0 <= token < config.vocab), None):
        raise BadCheckpoint(f"{checkpoint.path} scores by token {bad}, and the vocabulary has {config.vocab}")
    head = checkpoint.tensor(name)
    yes, *no = (dequantize(head.part(token, 1)).reshape(1, -1) for token in tokens if token is not None)
    return yes - no[0] if no else yes
