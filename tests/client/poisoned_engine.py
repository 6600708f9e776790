"""The engine process, except that requests with certain tokens in their prompt end it."""

import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

from quire.core.encode_request import EncodeInput
from quire.core.plan import StepPlan
from quire.core.structured import Structured
from quire.engine import process
from quire.engine.engine import Engine
from quire.executors.encoder import EncoderExecutor
from quire.runtime.runner import Runner
from quire.text.grammar.compiler import GrammarCompiler

# Byte-level ids of the tiny model: three special tokens, then "!" and what follows it in ASCII.
ABORT, ABORT_LATE, RAISE, RAISE_IN_SUBMIT = (3 + ord(letter) - ord("!") for letter in "~^|@")
NUM_BEFORE_LATE = 5  # output tokens
POISONOUS_TEXT = 50  # a token that is no word
POISONOUS_GRAMMAR = "poison"


class PoisonedRunner(Runner):
    """A runner whose steps can be ended by what they compute."""

    def submit(self, plan: StepPlan) -> None:
        self.prompts = getattr(self, "prompts", {})
        for admission in plan.admitted:
            self.prompts[admission.row] = admission.tokens[: admission.num_prompt]
        for run in plan.runs:
            prompt = self.prompts[run.row]
            if ABORT in prompt or (ABORT_LATE in prompt and run.start + run.count == len(prompt) + NUM_BEFORE_LATE):
                os.abort()
            if RAISE in prompt:
                raise ZeroDivisionError("a mistake")
        super().submit(plan)


class PoisonedEngine(Engine):
    def submit(self, request: Any) -> None:
        if RAISE_IN_SUBMIT in request.prompt_ids:
            raise ZeroDivisionError("a mistake")
        super().submit(request)


class PoisonedCompiler(GrammarCompiler):
    def compile(self, structured: Structured, **options: Any) -> Any:
        if POISONOUS_GRAMMAR in structured.text:
            os.abort()
        return super().compile(structured, **options)


class PoisonedEncoder(EncoderExecutor):
    def embed(self, texts: Sequence[EncodeInput]) -> Any:
        if any(POISONOUS_TEXT in text.ids for text in texts):
            os.abort()
        return super().embed(texts)


if __name__ == "__main__":
    import quire.engine.engine
    import quire.executors.encoder
    import quire.executors.local

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quire.executors.local.Runner = PoisonedRunner  # type: ignore[misc]
    quire.engine.process.Engine = PoisonedEngine  # type: ignore[misc]
    quire.engine.engine.GrammarCompiler = PoisonedCompiler  # type: ignore[misc]
    quire.executors.encoder.EncoderExecutor = PoisonedEncoder  # type: ignore[misc]
    sys.exit(process.main(int(sys.argv[1]), int(sys.argv[2])))
