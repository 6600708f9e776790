"""The server of a load: is it there, which model does it have, and what does it take?"""

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from quire.cli.bench.serve.flags import SAMPLING, DatasetFlags, LoadFlags, ServerFlags, given, pairs
from quire.cli.bench.serve.generator import Refused, complete
from quire.cli.bench.serve.http_client import HttpClient, LoadFailed, Unreachable
from quire.cli.bench.serve.prompt_tokens import PromptTokens
from quire.cli.bench.serve.stream import error_message
from quire.cli.parser import UsageError

T = TypeVar("T")
SECONDS_BETWEEN_TRIES = 0.5
PROBE = [1, 2, 3, 4]  # too short for any prefix cache


def connect(flags: ServerFlags) -> HttpClient:
    headers = pairs("--header", flags.header, "=")
    if key := flags.api_key or os.environ.get("OPENAI_API_KEY"):
        headers = {"Authorization": f"Bearer {key}", **headers}
    for name, value in headers.items():
        if not f"{name}{value}".isascii() or not f"{name}{value}".isprintable() or " " in name or ":" in name:
            raise UsageError(f"the header `{name}` has characters that no header may have", "write NAME=VALUE")
    return HttpClient(flags.url, headers, verify=not flags.insecure)


async def find_model(client: HttpClient, flags: ServerFlags) -> str:
    """The one that is asked for, else the first that the server lists."""
    if name := flags.served_model_name or flags.model:
        return name

    async def first() -> str:
        reply = await client.get("/v1/models")
        if reply.status != 200:
            raise LoadFailed(f"GET /v1/models: status {reply.status}: {error_message(reply.body)}")
        try:
            return str(msgspec.json.decode(reply.body)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise UsageError(f"{client.url}/v1/models lists no model", "give --model") from None

    return await when_ready(first, flags.ready_check_timeout_sec)


async def takes_ids(client: HttpClient, flags: ServerFlags, body: "Body", tokens: PromptTokens) -> bool:
    """Whether prompts may be token ids. Raises UsageError with the server's message if it takes no text either."""

    async def ask(prompt: str | list[int]) -> None:
        await complete(client, flags.path, body.encode(prompt, 1))

    if not flags.is_chat:
        try:
            await when_ready(lambda: ask(tokens.ids(PROBE)), flags.ready_check_timeout_sec)
            return True
        except UsageError as refusal:
            if not isinstance(refusal.__cause__, Refused):
                raise
    await when_ready(lambda: ask(tokens.text(PROBE)), flags.ready_check_timeout_sec)
    return False


async def when_ready(call: Callable[[], Awaitable[T]], timeout: float) -> T:
    """Calls until the server answers. Raises UsageError with what is wrong after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        try:
            return await call()
        except Refused as refusal:
            raise refused(refusal) from refusal
        except LoadFailed as failure:
            if time.monotonic() >= end:
                raise UsageError(str(failure), _hint(failure)) from failure
        await asyncio.sleep(SECONDS_BETWEEN_TRIES)


def refused(refusal: Refused) -> UsageError:
    hint = "change what is asked: --model, --api-key, lengths, --tokenizer or --extra-body"
    return UsageError(f"the server refuses the first request: {refusal}", hint)


def _hint(failure: LoadFailed) -> str:
    if "certificate" in str(failure).lower():
        return "--insecure takes any certificate"
    what = "start one, or give --base-url" if isinstance(failure, Unreachable) else "see the server's log"
    return f"{what}; --ready-check-timeout-sec 60 waits for it"


def assign_adapters(flags: ServerFlags, count: int, seed: int) -> list[str | None]:
    """Which adapter each request asks for; None: the model itself."""
    names = flags.lora_modules
    if not names:
        return [None] * count
    if flags.lora_assignment == "round-robin":
        return [names[index % len(names)] for index in range(count)]
    rng = random.Random(seed)
    return [rng.choice(names) for _ in range(count)]


class Body:
    """The JSON of a request."""

    def __init__(self, server: ServerFlags, dataset: DatasetFlags, load: LoadFlags, model: str) -> None:
        self._is_chat = server.is_chat
        self._fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._fields |= given(load, SAMPLING)
        made_up = dataset.dataset in ("random", "burstgpt", "simulated", "trace")
        if load.ignore_eos or (load.ignore_eos is None and made_up):
            self._fields["ignore_eos"] = True
        if load.logprobs is not None:
            more: dict[str, Any] = {"logprobs": True, "top_logprobs": load.logprobs}
            self._fields |= more if self._is_chat else {"logprobs": load.logprobs}
        self._extra = _object("--extra-body", server.extra_body)

    def encode(self, prompt: str | list[int], num_output: int, model: str | None = None) -> bytes:
        """`model`: an adapter that is asked for instead."""
        named = {"model": model} if model else {}
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._is_chat else {"prompt": prompt}
        return msgspec.json.encode({**self._fields, **named, **asked, "max_tokens": num_output, **self._extra})


def _object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} is not JSON: {error}", """write {"min_tokens": 1}""") from None
    if not isinstance(value, dict):
        raise UsageError(f"{flag} is not a JSON object", """write {"min_tokens": 1}""")
    return value
