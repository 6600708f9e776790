"""Engines in processes of their own for a script that waits: `LLM` with data_parallel_size."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from quire.client.engine_group import EngineGroup
from quire.client.generate_request import GenerateRequest
from quire.client.inflight import GenerateStream
from quire.client.live_request import LiveRequest
from quire.core.errors import QuireError
from quire.engine.options import EngineOptions
from quire.text.event import TextEvent

T = TypeVar("T")
NO_LIMIT = 2**31  # a script may ask for any number of prompts at once


class GroupRunner:
    """An `EngineGroup` on an event loop in a thread. Its methods are for one other thread."""

    def __init__(self, options: EngineOptions) -> None:
        self._events: SimpleQueue[tuple[LiveRequest, TextEvent | QuireError]] = SimpleQueue()
        self._streams: dict[str, GenerateStream] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        itl = 0 if options.target_itl_ms is None else options.target_itl_ms  # as in `LLM`: the limit is for streams
        self.group = EngineGroup(replace(options, max_queued_requests=NO_LIMIT, target_itl_ms=itl))
        try:
            self._call(self.group.start())
        except BaseException:
            self._end_loop()
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            self._call(self.group.stop())
            self._end_loop()

    def submit(self, request: GenerateRequest) -> LiveRequest:
        return self._call(self._begin(request))

    def step(self, live: Mapping[str, LiveRequest]) -> list[tuple[LiveRequest, TextEvent]]:
        """Wait for events, and return those of the requests in `live`. Raises if one of these has failed."""
        arrived = [self._events.get()]
        while not self._events.empty():
            arrived.append(self._events.get())
        texts = []
        for owner, event in arrived:
            if live.get(owner.request.id) is owner:  # others were cancelled
                if isinstance(event, QuireError):
                    raise event
                texts.append((owner, event))
        return texts

    def cancel(self, request_id: str) -> None:
        self._call(self._cancel(request_id))

    def load_adapter(self, name: str, path: str) -> None:
        if name not in self.group.adapters.names():
            self._call(self.group.adapters.load(name, path))

    def reset_prefix_cache(self) -> bool:
        return self._call(self.group.reset_prefix_cache())

    # -- on the loop

    async def _begin(self, request: GenerateRequest) -> LiveRequest:
        stream = self._streams[request.id] = await self.group.submit(request)
        task = asyncio.create_task(self._read(stream))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return stream.live

    async def _read(self, stream: GenerateStream) -> None:
        try:
            async for event in stream:
                self._events.put((stream.live, event))
        except QuireError as error:
            self._events.put((stream.live, error))
        finally:
            self._streams.pop(stream.id, None)

    async def _cancel(self, request_id: str) -> None:
        if (stream := self._streams.pop(request_id, None)) is not None:
            await stream.aclose()

    # -- the thread

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
