"""Tokens become vectors or scores: the array half of `Embedder`, and of the engine process."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.core.encode_request import EncodeInput
from quire.core.errors import BadRequest, Unsupported
from quire.engine.load_encoder import load_encoder
from quire.engine.options import EngineOptions
from quire.models.config import EncoderConfig
from quire.ops.opset import Float32
from quire.runtime.encoder import Wanted
from quire.runtime.pooling import Pooling, PoolingMode, unit_length
from quire.weights.checkpoint import open_checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.sentence_modules import DenseLayer, SentenceModules, read_sentence_modules

WANTED: dict[PoolingMode, Wanted] = {"cls": "first", "mean": "all", "last": "last"}


class Encoder:
    """A model that reads texts whole, with the way its tokens become a vector or a score."""

    def __init__(
        self, path: Path, options: EngineOptions, pooling: PoolingMode | None = None, normalize: bool | None = None
    ) -> None:
        checkpoint = open_checkpoint(path)
        self.modules = read_sentence_modules(path) if path.is_dir() else SentenceModules()
        self.config, self.max_model_len, self._runner = load_encoder(checkpoint, options, self.modules.max_tokens)
        self.num_labels = self.config.labels if isinstance(self.config, EncoderConfig) else 0
        self.weight_bytes = checkpoint.nbytes
        default: PoolingMode = "mean" if isinstance(self.config, EncoderConfig) else "last"
        self._pooling = Pooling.of(self.modules, default, normalize)
        if pooling is not None:
            self._pooling = Pooling(pooling, self._pooling.steps)
        self._squashes = _scores_are_squashed(checkpoint.config)

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        layers = [step.num_outputs for step in self.modules.steps if isinstance(step, DenseLayer)]
        return layers[-1] if layers else self.config.hidden

    def vectors(self, texts: Sequence[EncodeInput]) -> list[Float32]:
        if self.num_labels:
            raise Unsupported(f"a `{self.config.architecture}` scores texts, and has no vectors of them", "use score()")
        return self._runner.run(texts, WANTED[self._pooling.mode], self._pooling)

    def scores(self, pairs: Sequence[EncodeInput], sigmoid: bool | None = None) -> list[float]:
        """Of a cross-encoder."""
        if self.num_labels != 1:
            raise Unsupported(
                f"the model tells {self.num_labels} classes apart, and a score is one number", "use a reranker"
            )
        logits = self._runner.run(pairs, "first", lambda rows: float(rows[0, 0]))
        squashes = self._squashes if sigmoid is None else sigmoid
        return [float(1 / (1 + np.exp(-logit))) for logit in logits] if squashes else logits


def first_numbers(vector: Float32, dimensions: int) -> Float32:
    if not 0 < dimensions <= len(vector):
        raise BadRequest(f"dimensions is {dimensions}", f"vectors have {len(vector)}", param="dimensions")
    return unit_length(vector[:dimensions])


def _scores_are_squashed(config: CheckpointConfig) -> bool:
    """sentence-transformers does where nothing is said: by a sigmoid."""
    said = config.section("sentence_transformers").get("activation_fn") or config.get(
        "sbert_ce_default_activation_function", "Sigmoid"
    )
    name = str(said).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise Unsupported(f"{config.source}: scores go through {name}", "supported: Sigmoid, Identity")
    return name == "Sigmoid"
