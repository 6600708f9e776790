"""Models that encode whole texts, on one device: embeddings of texts, and scores of pairs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.encode_request import EncodeInput
from quire.core.errors import BadRequest, Unsupported
from quire.executors.backends import check_backend, new_ops, resolve_quantization, warn_of_dtype
from quire.executors.options import ExecutorOptions
from quire.models.config import EncoderConfig, ModelConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Purpose, decoder_of, family, read_model_config
from quire.ops.opset import Float32
from quire.runtime.encoder import EncoderRunner, Wanted
from quire.runtime.headless import load_headless
from quire.runtime.kv import longest
from quire.runtime.pooling import Pooling, PoolingMode, unit_length
from quire.runtime.score_head import ScoreTokens, score_head
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.decoder_body import as_decoder
from quire.weights.sentence_modules import DenseLayer, read_sentence_modules

log = logging.getLogger("quire.engine")

POOLING_WORDS = {"mean": "their mean is taken", "last": "that of the last token is taken"}
POOLED_TOKENS: dict[PoolingMode, Wanted] = {"cls": "first", "mean": "all", "last": "last"}


Load = Callable[[Any, Checkpoint], LoadedModel]  # (ops, checkpoint)


class EncoderExecutor:
    """An encoder, or a decoder without its head, and how its hidden states become an embedding or a score."""

    def __init__(
        self,
        path: Path,
        options: ExecutorOptions,
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        score_tokens: ScoreTokens | None = None,  # a decoder is to score by their logits; None: as the checkpoint says
    ) -> None:
        checkpoint = open_checkpoint(path)
        self.modules = read_sentence_modules(checkpoint.path)
        self.config, self.max_model_len, self._runner = self._load(checkpoint, options, self.modules.max_tokens)
        self._head = score_head(checkpoint, self.config, score_tokens or self.modules.score_tokens)
        self.num_labels = self.config.labels if isinstance(self.config, EncoderConfig) else 0
        if self._head is not None:
            self.num_labels = len(self._head(np.zeros((1, self.config.hidden), np.float32)))
        self.weight_bytes = checkpoint.nbytes
        default: PoolingMode = "mean" if self.config.bidirectional else "last"
        self._pooling = Pooling.of(self.modules, default, normalize)
        if pooling is not None:
            self._pooling = Pooling(pooling, self._pooling.steps)
        elif self.modules.pooling is None and not self.num_labels:
            log.warning(
                "%s does not say how the hidden states of tokens become an embedding: %s; if the model was trained "
                "otherwise, its vectors are wrong: add modules.json, or say pooling=",
                path,
                POOLING_WORDS[default],
            )
        self._sigmoid = _scores_through_sigmoid(checkpoint.config, self.modules.score_activation)

    def _load(
        self, checkpoint: Checkpoint, options: ExecutorOptions, max_tokens: int | None
    ) -> tuple[ModelConfig, int, EncoderRunner]:
        """-> the model's config, the longest text in tokens, and the runner. `max_tokens` is the checkpoint's own
        limit, which counts unless max_model_len is given."""
        check_backend(options)
        warn_of_dtype(options, "float16")
        options = resolve_quantization(options, checkpoint)
        decoder = decoder_of(checkpoint.config.architecture)
        if decoder is not None:
            checkpoint = as_decoder(checkpoint, decoder)
        generators: tuple[Purpose, ...] = ("generate",) if decoder is not None else ()
        module = family(checkpoint.config.architecture, *generators, "embed", "score")
        config = read_model_config(module, checkpoint.config)
        length = longest(config, options.max_model_len)
        if options.max_model_len is None and max_tokens is not None:
            length = min(length, max_tokens)

        def load(ops: Any, checkpoint: Checkpoint) -> LoadedModel:
            if decoder is not None:
                return load_headless(ops, module, checkpoint, length)
            return module.load(ops, checkpoint, config, length)

        ops = self._new_ops(options, config)
        ops, model = self._load_model(ops, load, checkpoint, config, options.kv_dtype)
        runner = EncoderRunner(
            ops,
            model,
            max_tokens=options.max_num_batched_tokens,
            max_rows=options.max_num_seqs,
            max_model_len=length,
            kv_dtype=options.kv_dtype,
        )
        return config, length, runner

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> Any:
        """CUDA graphs are for decode steps; fp16 on a CPU means weights of fp16."""
        return new_ops(options, graphs=False, fp16_weights=options.dtype == "float16")

    def _load_model(
        self, ops: Any, load: Load, checkpoint: Checkpoint, config: ModelConfig, kv_dtype: str
    ) -> tuple[Any, LoadedModel]:
        """-> the op set of the model, and the model"""
        return ops, load(ops, checkpoint)

    def stop(self) -> None:
        """End what runs beside this process: nothing, on one device."""

    @property
    def dimensions(self) -> int:
        """The numbers of an embedding."""
        layers = [step.num_outputs for step in self.modules.steps if isinstance(step, DenseLayer)]
        return layers[-1] if layers else self.config.hidden

    def embed(self, texts: Sequence[EncodeInput]) -> list[Float32]:
        if self.num_labels:
            raise Unsupported(
                f"a `{self.config.architecture}` scores texts, and has no embeddings of them", "use score()"
            )
        return self._runner.run(texts, POOLED_TOKENS[self._pooling.mode], self._pooling)

    def score(self, pairs: Sequence[EncodeInput], sigmoid: bool | None = None) -> list[float]:
        """The relevance of pairs of texts, by a cross-encoder."""
        if self.num_labels != 1:
            raise Unsupported(
                f"the model tells {self.num_labels} classes apart, and a score is one number", "use a reranker"
            )
        if (head := self._head) is not None:
            wanted: Wanted = "all" if self.config.bidirectional else "last"
            logits = self._runner.run(pairs, wanted, lambda rows: float(head(rows)[0]))
        else:
            logits = self._runner.run(pairs, "first", lambda rows: float(rows[0, 0]))
        if self._sigmoid if sigmoid is None else sigmoid:
            return [float(1 / (1 + np.exp(-logit))) for logit in logits]
        return logits


def truncate_embedding(embedding: Float32, dimensions: int) -> Float32:
    """The first `dimensions` numbers, normalized again (Matryoshka embeddings)."""
    if not 0 < dimensions <= len(embedding):
        raise BadRequest(f"dimensions is {dimensions}", f"give 1 to {len(embedding)}", param="dimensions")
    return unit_length(embedding[:dimensions])


def _scores_through_sigmoid(config: CheckpointConfig, given: str | None) -> bool:
    """Whether scores go through a sigmoid, as in sentence-transformers, where the checkpoint names no activation."""
    activation = (
        given
        or config.section("sentence_transformers").get("activation_fn")
        or config.get("sbert_ce_default_activation_function", "Sigmoid")
    )
    name = str(activation).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise Unsupported(f"{config.source}: scores go through {name}", "supported: Sigmoid, Identity")
    return name == "Sigmoid"
