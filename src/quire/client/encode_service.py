"""Embeddings of texts and scores of pairs: tokenized here, encoded by the engine."""

from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores, Text, cosine
from quire.client.encoder_prompt import TRUNCATED_TOKEN_LENGTH, EncoderPrompter
from quire.client.prompt import run_in_thread_if_long
from quire.core.encode_request import EncodeInput, EncodeRequest, Task
from quire.core.errors import BadRequest
from quire.engine.messages import Ready
from quire.engine.start import score_tokens
from quire.text.tokenizers.tokenizer import Tokenizer

MAX_REQUEST_TOKENS = 300_000  # of all texts of one request; OpenAI's limit
MAX_REQUEST_CHARACTERS = 16 * MAX_REQUEST_TOKENS

Encode = Callable[[EncodeRequest, float | None], Awaitable[list["array[float]"]]]


def new_encode_service(path: Path, tokenizer: Tokenizer, ready: Ready, encode: Encode, task: str) -> "EncodeService":
    """A service of the checkpoint there, whose engine is ready. `task`: what it was started for."""
    from quire.weights.checkpoint import find_checkpoint
    from quire.weights.sentence_modules import read_sentence_modules

    modules = read_sentence_modules(find_checkpoint(path))
    asked = task == "score" and score_tokens(path, tokenizer) is not None
    sizes = ready.capacity.vocab_size, ready.capacity.max_model_len
    prompter = EncoderPrompter(tokenizer, modules, *sizes, asked=asked)
    return EncodeService(prompter, ready.task, ready.dimensions, encode)


class EncodeService:
    """The half of an `EngineClient` that serves embedding models and cross-encoders."""

    def __init__(self, prompter: EncoderPrompter, task: Task, dimensions: int, encode: Encode) -> None:
        """`encode` submits a request to the engine, with a timeout, and waits for the result of every text."""
        self._prompter, self._task, self._dimensions, self._encode = prompter, task, dimensions, encode

    async def embed(self, request: EmbedRequest) -> Embeddings:
        if request.dimensions is not None and not 0 < request.dimensions <= self._dimensions:
            raise BadRequest(f"dimensions is {request.dimensions}", f"give 1 to {self._dimensions}", param="dimensions")
        size = sum(map(len, request.texts))
        self._check_characters(sum(self._length(text, request.truncate) for text in request.texts))
        inputs = await run_in_thread_if_long(
            size, self._prompter.tokens, request.texts, request.prompt_name, request.truncate
        )
        vectors = await self._run(request.id, inputs, request.timeout, request.dimensions)
        return Embeddings(vectors, sum(len(text.ids) for text in inputs))

    async def score(self, request: ScoreRequest) -> Scores:
        size = sum(len(a) + len(b) for a, b in request.pairs)
        self._check_characters(sum(self._length(text, request.truncate) for pair in request.pairs for text in pair))
        if self._task == "score":
            inputs = await run_in_thread_if_long(size, self._prompter.pairs, request.pairs, request.truncate)
            scores = [output[0] for output in await self._run(request.id, inputs, request.timeout)]
        else:
            inputs, sides = await run_in_thread_if_long(size, self._prompter.sides, request.pairs, request.truncate)
            vectors = await self._run(request.id, inputs, request.timeout)
            scores = [cosine(vectors[a], vectors[b]) for a, b in sides]
        return Scores(scores, sum(len(text.ids) for text in inputs))

    def _length(self, text: Text, truncate: bool | int) -> int:
        """Characters that are tokenized."""
        if not isinstance(text, str):
            return 0
        return min(len(text), TRUNCATED_TOKEN_LENGTH * self._prompter.max_model_len) if truncate else len(text)

    @staticmethod
    def _check_characters(num_characters: int) -> None:
        """A query is tokenized with each document."""
        if num_characters > MAX_REQUEST_CHARACTERS:
            raise BadRequest(
                f"the texts have {num_characters} characters, and a request may have {MAX_REQUEST_CHARACTERS}",
                "send them in several requests",
                param="input",
            )

    async def _run(
        self, request_id: str, inputs: list[EncodeInput], timeout: float | None, dimensions: int | None = None
    ) -> list["array[float]"]:
        request = EncodeRequest(id=request_id, texts=inputs, dimensions=dimensions)
        if request.num_tokens > MAX_REQUEST_TOKENS:
            raise BadRequest(
                f"the texts have {request.num_tokens} tokens, and a request may have {MAX_REQUEST_TOKENS}",
                "send them in several requests",
                param="input",
            )
        return await self._encode(request, timeout) if inputs else []
