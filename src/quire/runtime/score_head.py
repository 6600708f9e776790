"""How hidden states become the score of a text, where that is not the last part of a forward pass.

A decoder has a linear layer over the hidden state of its last token. A classifier has that layer. A model that is asked
a question whose answer is one token (Qwen3-Reranker) scores by the logit of that token less the logit of another: by
rows of its head. ModernBERT may have a head over the mean of all tokens."""

from collections.abc import Callable
from math import erf, sqrt

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.bert_layers import label_count
from quire.models.config import EncoderConfig, ModelConfig
from quire.models.registry import CLASSIFIER
from quire.ops.dequantize import dequantize
from quire.ops.opset import Float32
from quire.weights.checkpoint import Checkpoint
from quire.weights.decoder_body import BODY, EMBEDDING, SCORE

ScoreTokens = tuple[int, int | None]  # the answers yes and no; None: the score is the logit of yes


ScoreHead = Callable[[Float32], Float32]  # hidden states of the wanted tokens [n, hidden] -> logits [labels]


def score_head(checkpoint: Checkpoint, config: ModelConfig, tokens: ScoreTokens | None) -> ScoreHead | None:
    """The head that scores; None: the model embeds, or its forward pass ends in its classifier."""
    if isinstance(config, EncoderConfig):
        return mean_head(checkpoint, config) if config.labels_of_mean else None
    if config.bidirectional:
        return None
    if checkpoint.config.architecture.endswith(CLASSIFIER):
        weight = classifier_head(checkpoint, config)
    elif tokens is not None:
        weight = token_head(checkpoint, config, tokens)
    else:
        return None
    return lambda rows: weight @ rows[0]


def mean_head(checkpoint: Checkpoint, config: EncoderConfig) -> ScoreHead:
    """ModernBERT's head: a linear layer, GELU, a norm, and the classifier."""

    def read(name: str, *shape: int) -> Float32:
        if name not in checkpoint.names() or checkpoint.shape(name) != shape:
            raise BadCheckpoint(f"{checkpoint.path} has no {name} of {[*shape]}, a part of its classifier")
        return dequantize(checkpoint.tensor(name)).reshape(shape)

    checkpoint.config.expect("classifier_activation", "gelu", None)
    hidden, hf = config.hidden, checkpoint.config
    dense, scale = read("head.dense.weight", hidden, hidden), read("head.norm.weight", hidden)
    dense_bias = read("head.dense.bias", hidden) if hf.bool("classifier_bias", False) else np.float32(0)
    norm_bias = read("head.norm.bias", hidden) if hf.bool("norm_bias", False) else np.float32(0)
    classifier, bias = read("classifier.weight", config.labels, hidden), read("classifier.bias", config.labels)
    eps = np.float32(hf.float("norm_eps", 1e-5))

    def head(rows: Float32) -> Float32:
        x = dense @ rows.mean(axis=0, dtype=np.float32) + dense_bias
        x = x * np.array([0.5 * (1 + erf(value / sqrt(2))) for value in x], np.float32)
        x = (x - x.mean()) / np.sqrt(x.var() + eps) * scale + norm_bias
        logits: Float32 = classifier @ x + bias
        return logits

    return head


def classifier_head(checkpoint: Checkpoint, config: ModelConfig) -> Float32:
    """[labels, hidden]. Of a model that answers yes or no (GGUF files of Qwen3-Reranker), one for the two is left."""
    labels = checkpoint.config.dict("id2label", {})
    shape = (label_count(checkpoint.config), config.hidden)
    if SCORE not in checkpoint.names() or checkpoint.shape(SCORE) != shape:
        raise BadCheckpoint(f"{checkpoint.path} has no {SCORE} of {[*shape]}, the classifier of its config.json")
    weight: Float32 = dequantize(checkpoint.tensor(SCORE)).reshape(shape) / np.float32(_logit_scale(config))
    return weight[:1] - weight[1:] if [*labels.values()] == ["yes", "no"] else weight


def _logit_scale(config: ModelConfig) -> float:
    """The factor that some decoders multiply logits by; hidden states that `Headless` returns have it already."""
    scale: float = getattr(config, "logit_scale", 1.0)
    return scale


def token_head(checkpoint: Checkpoint, config: ModelConfig, tokens: ScoreTokens) -> Float32:
    """[1, hidden]"""
    names = checkpoint.names()
    name = next((name for name in ("lm_head.weight", BODY + EMBEDDING, EMBEDDING) if name in names), None)
    softcap: float = getattr(config, "logit_cap", 0.0)
    if name is None or "lm_head.bias" in names or softcap:
        raise Unsupported(
            f"a `{config.architecture}` does not score by the logits of single tokens",
            "use a reranker, or a head of Llama's kind",
        )
    if bad := next((token for token in tokens if token is not None and not 0 <= token < config.vocab), None):
        raise BadCheckpoint(f"{checkpoint.path} scores by token {bad}, and the vocabulary has {config.vocab}")
    head = checkpoint.tensor(name)
    yes, *no = (dequantize(head.part(token, 1)).reshape(1, -1) for token in tokens if token is not None)
    return yes - no[0] if no else yes
