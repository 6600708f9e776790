"""A service without a model: bytes are tokens, and the answer is a function of the prompt and the parameters.

Words in the prompt make it misbehave: !full, !down, !crash, !fail (in the middle), !hang (after two
tokens), !slow, !burst (all events are there at the same time)."""

import asyncio
import math
import time
from array import array
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import ClassVar

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.generate_request import GenerateRequest
from quire.client.generation_config import GenerationConfig
from quire.core.errors import BadRequest, EngineFailed, PromptTooLong, QueueFull, Unavailable
from quire.core.records import RequestRecord
from quire.core.request import DraftUsage, IdLogprob, SequenceEvent
from quire.core.structured_defaults import STRUCTURED_DEFAULTS
from quire.text.chat.chat_template import ChatTemplate
from quire.text.event import TextEvent
from quire.text.stream import CompletionText
from quire.text.tokenizers.tokenizer import WholeTexts

BOS, EOS = 256, 257

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    vocab_size = 258
    bos_id = BOS
    eos_ids = (EOS,)
    bos_token = "<s>"
    eos_token = "</s>"
    special_tokens: ClassVar[dict[str, str]] = {"bos_token": "<s>", "eos_token": "</s>"}
    chat_template = CHATML
    special_ids = frozenset({BOS, EOS})
    strips_space = False

    def __init__(self) -> None:
        self.whole_texts = {True: WholeTexts(self, self.special_ids), False: WholeTexts(self, frozenset())}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(
            b"" if token >= BOS and skip_special_tokens else self.token_bytes(token) for token in ids
        ).decode("utf-8", errors="replace")

    def id_of(self, token: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(token)

    def token_name(self, token: int) -> str:
        return self.token_text(token).replace(" ", "Ġ")

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token) or bytes([token])


def answer(index: int, num_prompt: int) -> str:
    """What sample `index` says to a prompt of that many tokens, before its end-of-text token."""
    return f"Sample {index} read {num_prompt} tokens — and stops here. "


class FakeStream:
    def __init__(self, service: "FakeService", request: GenerateRequest, ids: list[int], text: str) -> None:
        self.num_prompt_tokens = len(ids)
        self.prompt_ids = ids
        self._service, self._request, self._text = service, request, text
        self._closed = asyncio.Event()
        self.id = request.id
        self.record: RequestRecord | None = None
        self._arrival, self._first, self._count = time.monotonic(), None, 0
        self._ready: list[TextEvent] = []
        self._pumping: asyncio.Task[None] | None = None

    def listen(self, on_ready: Callable[[], object]) -> None:
        self._on_ready = on_ready
        self._pumping = self._pumping or asyncio.create_task(self._pump())

    def take(self) -> list[TextEvent]:
        ready, self._ready = self._ready, []
        return ready

    async def _pump(self) -> None:
        async for event in self:
            self._ready.append(event)
            if "!burst" not in self._text or event.final:
                self._on_ready()

    async def aclose(self) -> None:
        self._closed.set()
        self._end("cancelled")

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        params = self._request.params
        samples = {i: CompletionText(self._service.tokenizer, params, self.prompt_ids) for i in range(params.n)}
        says = self._service.says
        scripts = [[*(says or answer(i, len(self.prompt_ids))).encode(), EOS] for i in range(params.n)]
        if params.prompt_logprobs is not None:
            for at in range(1, len(self.prompt_ids), 5):  # as chunked prefill would
                part = [_choices(token, params.prompt_logprobs) for token in self.prompt_ids[at : at + 5]]
                yield samples[0].push(SequenceEvent(request_id=self.id, index=0, prompt_logprobs=part))
        position = 0
        while samples:
            await asyncio.sleep(0.01 if "!slow" in self._text else 0)
            if "!hang" in self._text and position >= 2:
                await self._closed.wait()
                yield TextEvent(0, finish_reason="cancelled", reason="it was cancelled", final=True)
                return
            for index, sample in list(samples.items()):
                out = sample.push(self._event(index, scripts[index], position))
                self._count += len(out.token_ids)
                self._first = self._first or time.monotonic()
                if out.finish_reason:
                    del samples[index]
                out.final = not samples
                out.drafts = self._service.drafts
                out.error = EngineFailed(out.reason) if out.finish_reason == "error" else None
                yield out
            position += 1
        self._end("stop")

    def _most_tokens(self) -> float:
        asked, window = self._request.params.max_tokens, self._request.window
        room = math.inf if window is None else window - len(self.prompt_ids)
        return room if asked is None else min(asked, room)

    def _end(self, reason: str) -> None:
        self._service.open.pop(self.id, None)
        self.record = self.record or RequestRecord(
            id=self.id,
            finish_reason=reason,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=4,
            num_output_tokens=self._count,
            num_samples=self._request.params.n,
            max_tokens=self._request.params.max_tokens,
            arrival=self._arrival,
            admitted=self._arrival,
            first_token=self._first,
            last_token=self._first,
            finished=time.monotonic(),
        )

    def _event(self, index: int, script: list[int], position: int) -> SequenceEvent:
        params = self._request.params
        token = script[position % len(script)] if params.ignore_eos else script[min(position, len(script) - 1)]
        event = SequenceEvent(request_id=self.id, index=index, tokens=[token], num_cached=4)
        if params.logprobs is not None:
            listed = [IdLogprob(each, -9.0, 200) for each in params.logprob_token_ids or ()]
            event.logprobs = [_choices(token, params.logprobs) + listed]
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            event.finish_reason, event.stop_token = "stop", token
        elif position + 1 >= self._most_tokens():
            event.finish_reason = "length"
        if "!fail" in self._text and position == 3:
            event.finish_reason, event.reason = "error", "the engine failed on purpose"
        return event


def _choices(token: int, count: int) -> list[IdLogprob]:
    itself = IdLogprob(token, -0.25, 1)
    return [
        itself,
        *([itself] if count else []),
        *(IdLogprob((token + k) % 256, -1.0 - k, k + 1) for k in range(1, count)),
    ]


class FakeService:
    def __init__(self) -> None:
        self.info = SimpleNamespace(
            name="fake",
            max_model_len=512,
            vocab_size=258,
            weight_bytes=0,
            cache_bytes=0,
            num_blocks=8,
            block_size=16,
            task="generate",
            quantization=None,
            kv_cache_dtype="auto",
            on_gpu=False,
            path="",
            dimensions=4,
            generation=GenerationConfig(),
            max_requests=2048,
            structured_defaults=STRUCTURED_DEFAULTS,
        )
        self.tokenizer = ByteTokenizer()
        self.state = "ready"
        self.open: dict[str, FakeStream] = {}
        self.seen: list[GenerateRequest] = []
        self.reset_tenants: list[str] = []  # whose prefixes were to be forgotten
        self.says: str | None = None  # the answer to everything, where that is easier
        self.drafts: DraftUsage | None = None  # of every request

    async def submit(self, request: GenerateRequest) -> FakeStream:
        self.seen.append(request)
        text, ids = request.prompt, request.prompt_ids
        if request.messages is not None:
            template = request.chat_template or self.tokenizer.chat_template
            text = ChatTemplate(template).render(request.messages, **request.template_options)
        if ids is None:
            special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
            ids = self.tokenizer.encode(text, add_special_tokens=special)
        if kept := request.truncate_prompt_tokens:
            ids = ids[:kept] if request.truncate_end else ids[-kept:]
        for token in [*ids, *request.params.logit_bias, *request.params.stop_token_ids]:
            if not 0 <= token < self.info.vocab_size:
                raise BadRequest(f"token id {token}, and the vocabulary has {self.info.vocab_size}", param="prompt")
        text = self.tokenizer.decode(ids)
        if self.state != "ready" or "!down" in text:
            raise Unavailable("the engine is restarting", "try again in a moment")
        if "!full" in text:
            raise QueueFull("8 requests wait, and 8 may", "try again later", retry_after=7)
        if "!crash" in text:
            raise RuntimeError("a bug with a secret in its message")
        if not ids:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if len(ids) >= self.info.max_model_len:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, and the context {self.info.max_model_len}")
        self.open[request.id] = stream = FakeStream(self, request, ids, text)
        return stream

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        self.reset_tenants.append(tenant)
        return not self.open

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """[tokens, 1, 0.5, 0.25] of each text."""
        sizes = [len(self.tokenizer.encode(text) if isinstance(text, str) else text) for text in request.texts]
        vectors = [array("f", [size, 1.0, 0.5, 0.25][: request.dimensions]) for size in sizes]
        return Embeddings(vectors, sum(sizes))

    async def score(self, request: ScoreRequest) -> Scores:
        """How many letters the two texts have in common."""
        scores = [float(len(set(a) & set(b))) for a, b in request.pairs]
        return Scores(scores, sum(len(a) + len(b) for a, b in request.pairs))

    async def drain(self) -> None:
        self.state = "draining"
        while self.open:
            await asyncio.sleep(0.01)
