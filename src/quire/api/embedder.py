"""`Embedder`: an embedding model, or a cross-encoder that scores pairs of texts, in this process.

embedder = Embedder("./all-MiniLM-L6-v2")
vectors = embedder.embed(["A quire is a gathering of pages", "Paper was made of rags"])  # [2, 384]

reranker = Embedder("./ms-marco-MiniLM-L6-v2")
scores = reranker.score("What is a quire?", ["A gathering of pages", "A group of singers"])
"""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from quire.client.embed_request import Text
from quire.client.encoder_prompt import EncoderPrompter
from quire.core.errors import BadRequest
from quire.engine.options import EngineOptions
from quire.engine.start import load_tokenizer, new_encoder, score_tokens
from quire.executors.encoder import truncate_embedding
from quire.hub import resolve_model
from quire.ops.opset import Float32
from quire.runtime.pooling import PoolingMode, unit_length


class Embedder:
    """Keywords are those of `EngineOptions`. `pooling` (cls, mean or last) and `normalize` override the checkpoint.
    A text's result does not depend on the other texts."""

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
        if self.options.is_group:
            raise BadRequest(
                "data_parallel_size and ray are for engines, and an Embedder computes in this process",
                "use `quire serve`, which embeds too",
                param="data_parallel_size",
            )
        files = resolve_model(self.options.model, revision=self.options.revision)
        self.tokenizer = load_tokenizer(files.path, self.options)
        asked = self.options.task == "score"
        tokens = score_tokens(files.path, self.tokenizer) if asked else None
        self._encoder = new_encoder(files.path, self.options, pooling, normalize, tokens)
        if self.options.tensor_parallel_size > 1:
            weakref.finalize(self, self._encoder.stop)  # also when Python ends
        self.config, self.max_model_len = self._encoder.config, self._encoder.max_model_len
        self._prompter = EncoderPrompter(
            self.tokenizer, self._encoder.modules, self.config.vocab, self.max_model_len, asked=tokens is not None
        )

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,  # one of the checkpoint's prompts, put before every text
        truncate: bool = False,  # cut off the end of a text that is too long, instead of refusing it
        dimensions: int | None = None,  # keep only the first that many numbers, normalized again
    ) -> Float32:
        """-> [texts, columns]"""
        vectors = self._encoder.embed(self._prompter.tokens(_listed(texts), prompt_name, truncate))
        if dimensions is not None:
            vectors = [truncate_embedding(vector, dimensions) for vector in vectors]
        return np.array(vectors, np.float32)

    def score(
        self, query: str, documents: Sequence[str], *, truncate: bool = False, sigmoid: bool | None = None
    ) -> list[float]:
        """How well each document answers the query. A cross-encoder's score is between 0 and 1 unless the
        checkpoint, or `sigmoid`, says otherwise. For other models it is the cosine of two embeddings."""
        pairs = [(query, document) for document in documents]
        if self._encoder.num_labels:
            return self._encoder.score(self._prompter.pairs(pairs, truncate), sigmoid)
        texts, numbers = self._prompter.sides(pairs, truncate)
        vectors = [unit_length(vector) for vector in self._encoder.embed(texts)]
        return [float(np.dot(vectors[a], vectors[b])) for a, b in numbers]

    def stop(self) -> None:
        """End the processes of other ranks, where the model has several."""
        self._encoder.stop()


def _listed(texts: Text | Sequence[Text]) -> Sequence[Text]:
    one = isinstance(texts, str) or (len(texts) > 0 and all(isinstance(token, int) for token in texts))
    return [texts] if one else texts  # type: ignore[list-item,return-value]
