"""The model's own answers: made by the engine batch by batch, and kept in a file that a stopped run goes on with."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

from quire.api.llm import LLM
from quire.core.params import SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.train.options import SELF, TrainError, TrainOptions
from quire.train.self_prompts import SelfPrompts
from quire.train.texts import Example, read_examples, read_prompts

ANSWERS = "answers.jsonl"
BATCH = {"cpu": 64, "cuda": 512}  # prompts that are answered together
ENGINE: dict[str, dict[str, Any]] = {  # options of the engine that answers
    "cpu": {"device": "cpu"},
    "cuda": {"device": "cuda", "max_num_seqs": 512, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.5},
}
SEED_STRIDE = 1_000_003
MIN_TEXTS = 2
MAX_EMPTY = 8  # batches without a prompt that was not there before
MIN_ANSWER = 3  # tokens: with fewer there is no draft to verify


class Progress(Protocol):
    def update(self, phase: str, done: float, total: float) -> None: ...

    def note(self, text: str) -> None:
        """A line that stays."""


class TrainingStopped(KeyboardInterrupt):
    """Ctrl-C was noted, and what is done is kept."""


@dataclass(frozen=True, slots=True)
class Answers:
    examples: list[Example]
    held_out: list[Example]

    @property
    def num_tokens(self) -> int:
        return sum(len(example.ids) - example.start for example in self.examples)


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """`deadline`: of time.monotonic(); no batch begins behind it."""

    model: Path
    options: TrainOptions
    device: str
    folder: Path
    progress: Progress
    stop: Callable[[], bool]
    deadline: float = float("inf")

    def answers(self, key: str) -> Answers:
        """`key`: of all that the answers depend on."""
        if not self.options.generate:
            return self._texts()
        file = AnswerFile(self.folder / ANSWERS, key)
        batches = file.read()
        if not self._is_enough(batches):
            llm = LLM(self.model, max_model_len=self.options.max_length, **ENGINE[self.device])
            try:
                self._answer(llm, file, batches)
            finally:
                llm.engine.stop()
                del llm
                gc.collect()
        first, *others = batches or [[]]
        return self._divided(first, [example for batch in others for example in batch])

    def _texts(self) -> Answers:
        path, limit = Path(self.options.data), self.options.answers + self.options.held_out
        examples = read_examples(path, Tokenizer.load(self.model), self.options.max_length)
        read = list(islice(examples, limit))
        return self._divided(read[: self.options.held_out], read[self.options.held_out :])

    def _divided(self, first: Sequence[Example], others: Sequence[Example]) -> Answers:
        """Divide examples: of the first ones, as many are held out as make a tenth of all at most."""
        first, others = ([e for e in some if len(e.ids) - e.start >= MIN_ANSWER] for some in (first, others))
        total = len(first) + len(others)
        if total < MIN_TEXTS:
            raise TrainError(
                f"--data {self.options.data} gives {total} texts, and {MIN_TEXTS} are the least: one to train with "
                "and one to measure with",
                "give more texts",
            )
        num_held = min(len(first), max(total // 10, 1))
        return Answers([*others, *first[num_held:]], list(first[:num_held]))

    def _is_enough(self, batches: Sequence[Sequence[Example]]) -> bool:
        return sum(map(len, batches)) >= self.options.answers + self.options.held_out

    def _answer(self, llm: LLM, file: "AnswerFile", batches: list[list[Example]]) -> None:
        wanted = self.options.answers + self.options.held_out
        seen = {tuple(example.ids[: example.start]) for batch in batches for example in batch}
        for number, prompts in self._prompts(llm, len(batches)):
            done = sum(map(len, batches))
            self.progress.update("answering", done, wanted)
            if done >= wanted or (len(batches) > 1 and time.monotonic() > self.deadline):
                break
            new = [prompt for prompt in dict.fromkeys(map(tuple, prompts)) if prompt not in seen][: wanted - done]
            seen.update(new)
            examples = self._answered(llm, new, number)
            file.append(examples)
            batches.append(examples)
            if self.stop():
                raise TrainingStopped
            if not any(batches[-MAX_EMPTY:]):
                break
        self.progress.update("answering", wanted, wanted)

    def _prompts(self, llm: LLM, num_done: int) -> Iterator[tuple[int, list[list[int]]]]:
        """(number of the first, prompts) of each batch that is not done. The first batch is the one held out."""
        options, room = self.options, self.options.max_length - self.options.answer_tokens
        made = SelfPrompts(llm, options.seed * SEED_STRIDE, room)
        read = None if options.data == SELF else read_prompts(Path(options.data), llm.tokenizer, room)
        number = 0
        for index in count():
            size = BATCH[self.device] if index else options.held_out
            prompts = list(islice(read, size)) if read is not None else []
            if read is not None and not prompts:
                return
            if index >= num_done:
                yield number, made.prompts(number, size) if read is None else prompts
            number += size

    def _answered(self, llm: LLM, prompts: Sequence[Sequence[int]], number: int) -> list[Example]:
        """Held-out answers (number 0) are greedy; of the others, every second one is sampled."""
        options = self.options
        params = [
            SamplingParams(
                temperature=options.temperature if number and offset % 2 else 0.0,
                max_tokens=options.answer_tokens,
                seed=options.seed * SEED_STRIDE + number + offset,
            )
            for offset in range(len(prompts))
        ]
        asked: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [
            Example([*prompt, *output.outputs[0].token_ids], len(prompt))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


class AnswerFile:
    """One JSON list a batch, behind a line with the key; what another key left is dropped."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key

    def read(self) -> list[list[Example]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        batches: list[list[Example]] = []
        if lines and lines[0] == self._key:
            for line in lines[1:]:
                try:
                    batches.append([Example(ids, start) for start, ids in json.loads(line)])
                except ValueError:  # the last line of a process that was killed
                    break
        kept = [self._key, *(self._line(batch) for batch in batches)]
        self._path.write_text("".join(f"{line}\n" for line in kept))
        return batches

    def append(self, examples: Sequence[Example]) -> None:
        with self._path.open("a") as file:
            file.write(f"{self._line(examples)}\n")

    def _line(self, examples: Sequence[Example]) -> str:
        return json.dumps([[example.start, example.ids] for example in examples])
