"""`AsyncEngine`: many requests at once from asyncio code, the model in a process of its own.

engine = AsyncEngine("smollm2")
async for output in engine.generate("A quire is", SamplingParams(max_tokens=32), request_id="1"):
    print(output.outputs[0].text)
await engine.shutdown()
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any
from uuid import uuid4

from quire.api.engine_args import engine_args
from quire.api.outputs import RequestOutput
from quire.client.engine_group import new_service
from quire.client.generate_request import LoRARequest, Prompt, request_for
from quire.client.sleep_mode import check_level, check_tags
from quire.core.errors import Unavailable
from quire.core.params import SamplingParams
from quire.engine.options import EngineOptions
from quire.hub import DEFAULT_MODEL
from quire.text.tokenizers.tokenizer import Tokenizer


class AsyncEngine:
    """Starts with the first request. Keywords are those of `EngineOptions`."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.client = new_service(engine_args(model, **options))
        self._starting: asyncio.Task[None] | None = None
        self._asleep = False
        self._streams: dict[str, Any] = {}

    @classmethod
    def from_engine_args(cls, options: EngineOptions) -> "AsyncEngine":
        engine = cls()
        engine.client = new_service(options)
        return engine

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, each time it has grown. Leaving the loop early, or `abort`, cancels the request. Without
        `sampling_params`, the model's advice decides."""
        await self.start()
        request_id = request_id or uuid4().hex
        params = sampling_params or await self.get_default_sampling_params()
        wanted = request_for(prompt, id=request_id, params=params, priority=priority)
        if sampling_params is None:  # a default of max_tokens is cut to what the context holds
            wanted.window = self.client.info.max_model_len
        if lora_request is not None:
            if lora_request.lora_name not in self.client.adapters.names():
                await self.client.adapters.load(lora_request.lora_name, lora_request.lora_path)
            wanted.adapter = lora_request.lora_name
        stream = await self.client.submit(wanted)
        self._streams[request_id] = stream
        output = RequestOutput.of(stream.live.request, wanted.prompt)
        try:
            async for event in stream:
                output.add(event)
                output.metrics = stream.live.record
                yield output
        finally:
            del self._streams[request_id]
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish_reason "cancelled". One that has ended is no error."""
        if stream := self._streams.get(request_id):
            await stream.aclose()

    async def sleep(self, level: int = 1) -> None:
        """End the engine, as soon as requests in flight have ended, which gives all of its memory back. Levels 1 and 2
        are the same here: weights are read again from their files."""
        check_level(level)
        if self._asleep:
            return
        self._asleep = True
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
            await self.client.drain()
            await self.client.stop()

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Start the engine again. If this raises, it is still asleep."""
        check_tags(tags)
        if not self._asleep:
            return
        client = new_service(self.client.options)
        starting = asyncio.ensure_future(client.start())
        await starting
        self.client, self._starting, self._asleep = client, starting, False

    async def is_sleeping(self) -> bool:
        return self._asleep

    async def start(self) -> None:
        if self._asleep:
            raise Unavailable("the engine is asleep", "call wake_up() first")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.client.start())
        await asyncio.shield(self._starting)

    async def get_tokenizer(self) -> Tokenizer:
        await self.start()
        return self.client.tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """The `SamplingParams` that the model advises."""
        await self.start()
        return self.client.info.generation.params()

    async def reset_prefix_cache(self) -> bool:
        """Forget the KV cache of all prompts. -> whether nothing is left: requests in flight keep theirs"""
        await self.start()
        return await self.client.reset_prefix_cache()

    async def check_health(self) -> None:
        """Raises where no engine runs, and none is being started."""
        await self.start()
        if self.client.state == "stopped":
            raise Unavailable("the engine has stopped", "make another one")

    async def is_tracing_enabled(self) -> bool:
        return False

    async def shutdown(self) -> None:
        if self._starting is not None and not self._asleep:
            await asyncio.gather(self._starting, return_exceptions=True)
            await self.client.stop()
