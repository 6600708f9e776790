"""What `quire train-head` does: answers, training, the output."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire.core.errors import Unsupported
from quire.models.llama import LlamaConfig
from quire.quantize.plan import source_state
from quire.train.acceptance import Acceptance
from quire.train.answers import AnswerRun, Answers, Progress
from quire.train.eagle3 import DEFAULT_VOCABULARY, Eagle3Head, aux_layers, state_scales
from quire.train.medusa import MedusaHeads
from quire.train.options import SELF, TrainError, TrainOptions
from quire.train.output import PartialHead
from quire.train.state import STATE
from quire.train.target import TargetModel, target_config
from quire.train.trainable_head import TextBatch, TrainableHead, coverage, frequent_tokens
from quire.train.trainer import Trainer
from quire.weights.checkpoint import find_checkpoint, open_checkpoint

ANSWER_SHARE = 0.35  # of --minutes
SCALED_TEXTS = 16  # whose states say how large the columns of states are
ANSWER_OPTIONS = ("data", "generate", "answers", "answer_tokens", "max_length", "temperature", "held_out", "seed")


@dataclass(frozen=True, slots=True)
class TrainResult:
    out: Path
    nbytes: int
    acceptance: Acceptance
    training: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"output": str(self.out), "bytes": self.nbytes, **self.acceptance.as_json(), **self.training}


@dataclass(frozen=True, slots=True)
class TrainRun:
    source: Path  # a directory or a GGUF file
    name: str  # of the target, for the config of the head
    out: Path
    options: TrainOptions
    device: str = "auto"

    def run(self, progress: Progress, stop: Callable[[], bool]) -> TrainResult:
        self.options.check()
        device = resolve_device(self.device)
        checkpoint = open_checkpoint(self.source)
        config = target_config(checkpoint)
        layers = self._check(config)
        began = time.monotonic()
        with PartialHead(self.out, self.source) as partial:
            answers_key = self._answers_key(device)
            answers = self._answer_run(device, partial.folder, progress, stop, began).answers(answers_key)
            if device == "cuda":
                torch.cuda.empty_cache()  # the engine's
            answered = time.monotonic()
            target = TargetModel(checkpoint, device, self.options.max_length)
            head = self._head(target, layers, answers)
            deadline = None if self.options.minutes is None else began + 60 * self.options.minutes
            key = _digest([answers_key, repr(self.options), device])
            path = partial.folder / STATE
            trainer = Trainer(head, target, answers, self.options, path, key, progress, stop, deadline)
            acceptance = trainer.run()
            training = self._training(trainer, answered - began, time.monotonic() - answered)
            described = {**acceptance.as_json(), **training}
            size = partial.finish(self.options.method, head, head.config(self.name), described)
        return TrainResult(self.out, size, acceptance, training)

    def _check(self, config: LlamaConfig) -> tuple[int, ...]:
        """What does not fit the model is refused before the work. -> the auxiliary layers"""
        if self.options.max_length > config.max_length:
            raise TrainError(
                f"--max-length is {self.options.max_length}, and the model's context holds {config.max_length} tokens",
                f"give at most {config.max_length}",
            )
        if (self.options.draft_vocab_size or 0) > config.vocab:
            raise TrainError(
                f"--draft-vocab-size is {self.options.draft_vocab_size}, and the model has {config.vocab} tokens",
                f"give at most {config.vocab}",
            )
        if self.options.method == "medusa":
            return ()
        if config.head_dim % 2:
            raise Unsupported(f"an EAGLE-3 head for heads of {config.head_dim} columns", "use medusa")
        return aux_layers(self.options.aux_layers, config.layers)

    def _answers_key(self, device: str) -> str:
        data = [] if self.options.data == SELF else _file_state(Path(self.options.data))
        options = {name: getattr(self.options, name) for name in ANSWER_OPTIONS}
        return _digest([source_state(find_checkpoint(self.source)), data, options, device])

    def _answer_run(
        self, device: str, folder: Path, progress: Progress, stop: Callable[[], bool], began: float
    ) -> AnswerRun:
        minutes = self.options.minutes
        deadline = float("inf") if minutes is None else began + 60 * ANSWER_SHARE * minutes
        return AnswerRun(self.source, self.options, device, folder, progress, stop, deadline)

    def _head(self, target: TargetModel, layers: tuple[int, ...], answers: Answers) -> TrainableHead:
        options, vocab = self.options, target.config.vocab
        default = min(DEFAULT_VOCABULARY, vocab) if options.method == "eagle3" else vocab
        vocabulary = frequent_tokens(answers.examples, options.draft_vocab_size or default, vocab)
        if options.method == "medusa":
            return MedusaHeads(target, vocabulary, options.drafts)
        scales = state_scales(target, layers, TextBatch.of(answers.examples[:SCALED_TEXTS], target.device))
        return Eagle3Head(target, vocabulary, layers, options.drafts, scales, options.intermediate_size, options.seed)

    def _training(self, trainer: Trainer, answer_seconds: float, train_seconds: float) -> dict[str, Any]:
        return {
            "method": self.options.method,
            "steps": trainer.step,
            "resumed_steps": trainer.resumed,
            "answers": len(trainer.answers.examples),
            "answer_tokens": trainer.answers.num_tokens,
            "held_out_answers": len(trainer.answers.held_out),
            "weights": sum(weight.numel() for weight in trainer.head.weights.values()),
            "draft_vocab_size": len(trainer.head.vocabulary),
            "draft_vocab_coverage": round(coverage(trainer.answers.held_out, trainer.head.vocabulary.tolist()), 4),
            "loss": round(trainer.mean_loss, 4),
            "answer_seconds": round(answer_seconds, 1),
            "train_seconds": round(train_seconds, 1),
            "device": trainer.target.device,
            "options": asdict(self.options),
        }


def resolve_device(asked: str) -> str:
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise TrainError("--device is cuda, and torch has no GPU here", "use --device cpu")
    return asked if asked != "auto" else "cuda" if there else "cpu"


def _file_state(path: Path) -> list[Any]:
    try:
        stat = path.stat()
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror}", "name a .txt or .jsonl file, or `self`") from error
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
