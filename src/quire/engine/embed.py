"""`Embedder`: a model that makes vectors of texts, or scores of pairs of them, in this process.

embedder = Embedder("./all-MiniLM-L6-v2")
vectors = embedder.embed(["A quire is a gathering of pages", "Paper was made of rags"])  # [2, 384]

reranker = Embedder("./ms-marco-MiniLM-L6-v2")
scores = reranker.score("What is a quire?", ["A gathering of pages", "A group of singers"])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from quire.core.errors import BadRequest, PromptTooLong, Unsupported
from quire.engine.load_encoder import load_encoder
from quire.engine.options import EngineOptions
from quire.engine.sources import resolve_model
from quire.models.config import EncoderConfig
from quire.ops.opset import Float32
from quire.runtime.encoder import Tokens, Wanted
from quire.runtime.pooling import Pooling, PoolingMode, unit_length
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.sentence_modules import SentenceModules, read_sentence_modules

Text = str | Sequence[int]  # a text, or its tokens

WANTED: dict[PoolingMode, Wanted] = {"cls": "first", "mean": "all", "last": "last"}
QUERY, DOCUMENT = ("query",), ("document", "passage")  # what checkpoints call the prompts of both


class Embedder:
    """Keywords are those of `EngineOptions`, and how tokens become a vector where that is not as the checkpoint says:
    `pooling` (cls, mean or last) and `normalize`. A text's result does not depend on the other texts."""

    def __init__(
        self,
        model: str | Path,
        *,
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        **options: Any,
    ) -> None:
        if pooling is not None and pooling not in get_args(PoolingMode):
            raise BadRequest(f"pooling is {pooling!r}", f"choose from {', '.join(get_args(PoolingMode))}")
        self.options = EngineOptions.of({"model": str(model), **options})
        files = resolve_model(self.options.model, revision=self.options.revision)
        checkpoint = open_checkpoint(files.path)
        self._modules = read_sentence_modules(files.path) if files.path.is_dir() else SentenceModules()
        self.config, self.max_model_len, self._runner = load_encoder(checkpoint, self.options, self._modules.max_tokens)
        self.num_labels = self.config.labels if isinstance(self.config, EncoderConfig) else 0
        default: PoolingMode = "mean" if isinstance(self.config, EncoderConfig) else "last"
        self._pooling = Pooling.of(self._modules, default, normalize)
        if pooling is not None:
            self._pooling = Pooling(pooling, self._pooling.steps)
        self._squashes = _scores_are_squashed(checkpoint.config)
        self.tokenizer = Tokenizer.load(Path(self.options.tokenizer) if self.options.tokenizer else files.path)

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,  # of the prompts that the checkpoint has: put before every text
        truncate: bool = False,  # a text that is too long loses its end; otherwise it is refused
        dimensions: int | None = None,  # only the first so many numbers of each vector, made of length 1 again
    ) -> Float32:
        """-> [texts, columns]"""
        if self.num_labels:
            raise Unsupported(f"a `{self.config.architecture}` scores texts, and has no vectors of them", "use score()")
        prompt = self._prompt(prompt_name)
        tokens = [self._encode(text, prompt, truncate, place) for place, text in enumerate(_listed(texts))]
        vectors = self._runner.run(tokens, WANTED[self._pooling.mode], self._pooling)
        if dimensions is not None:
            vectors = [self._first(vector, dimensions) for vector in vectors]
        return np.array(vectors, np.float32)

    def score(
        self, query: str, documents: Sequence[str], *, truncate: bool = False, sigmoid: bool | None = None
    ) -> list[float]:
        """How well each document answers the query. A cross-encoder reads both together, and its score is between 0
        and 1 unless the checkpoint, or `sigmoid`, says otherwise. Of other models it is the cosine of two vectors."""
        if not self.num_labels:
            return self._cosines(query, documents, truncate)
        if self.num_labels != 1:
            raise Unsupported(
                f"the model tells {self.num_labels} classes apart, and a score is one number", "use a reranker"
            )
        pairs = [self._encode_pair(query, document, truncate, place) for place, document in enumerate(documents)]
        logits = self._runner.run(pairs, "first", lambda rows: float(rows[0, 0]))
        squashes = self._squashes if sigmoid is None else sigmoid
        return [float(1 / (1 + np.exp(-logit))) for logit in logits] if squashes else logits

    def _cosines(self, query: str, documents: Sequence[str], truncate: bool) -> list[float]:
        asked = self.embed(query, prompt_name=self._named(QUERY), truncate=truncate)[0]
        found = self.embed(documents, prompt_name=self._named(DOCUMENT), truncate=truncate)
        return [float(np.dot(unit_length(asked), unit_length(vector))) for vector in found]

    def _named(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._modules.prompts), None)

    def _prompt(self, name: str | None) -> str:
        name = self._modules.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self._modules.prompts:
            known = ", ".join(self._modules.prompts)
            hint = f"it has {known}" if known else "it has none: put the words before the texts"
            raise BadRequest(f"the checkpoint has no prompt {name!r}", hint, param="prompt_name")
        return self._modules.prompts[name]

    def _encode(self, text: Text, prompt: str, truncate: bool, place: int) -> Tokens:
        ids = self.tokenizer.encode(self._spelled(prompt + text)) if isinstance(text, str) else list(text)
        if truncate:
            ids = self.tokenizer.cut(ids, self.max_model_len)
        self._check(ids, place)
        return Tokens(ids)

    def _encode_pair(self, query: str, document: str, truncate: bool, place: int) -> Tokens:
        limit = self.max_model_len if truncate else None
        ids, segments = self.tokenizer.encode_pair(self._spelled(query), self._spelled(document), limit)
        self._check(ids, place)
        return Tokens(ids, segments)

    def _spelled(self, text: str) -> str:
        return text.lower() if self._modules.lower else text

    def _check(self, ids: Sequence[int], place: int) -> None:
        if not ids:
            raise BadRequest(f"text {place} has no tokens", "leave it out", param="texts")
        if len(ids) > self.max_model_len:
            raise PromptTooLong(
                f"text {place} has {len(ids)} tokens, and the model takes {self.max_model_len}",
                "cut it into parts, or set truncate to leave out its end",
                param="texts",
            )
        if unknown := next((token for token in ids if not 0 <= token < self.config.vocab), None):
            raise BadRequest(f"text {place} has token id {unknown}, and the vocabulary has {self.config.vocab}")

    @staticmethod
    def _first(vector: Float32, dimensions: int) -> Float32:
        if not 0 < dimensions <= len(vector):
            raise BadRequest(f"dimensions is {dimensions}", f"vectors have {len(vector)}", param="dimensions")
        return unit_length(vector[:dimensions])


def _listed(texts: Text | Sequence[Text]) -> Sequence[Text]:
    one = isinstance(texts, str) or (len(texts) > 0 and all(isinstance(token, int) for token in texts))
    return [texts] if one else texts  # type: ignore[list-item,return-value]


def _scores_are_squashed(config: CheckpointConfig) -> bool:
    """sentence-transformers does where nothing is said: by a sigmoid."""
    said = config.section("sentence_transformers").get("activation_fn") or config.get(
        "sbert_ce_default_activation_function", "Sigmoid"
    )
    name = str(said).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise Unsupported(f"{config.source}: scores go through {name}", "supported: Sigmoid, Identity")
    return name == "Sigmoid"
