"""Several models behind one address, loaded on demand; the least recently used is unloaded to make room."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.client.live_client import LiveClient
from quire.client.one_model import no_sleep, unknown_model
from quire.client.pulls import Pulls
from quire.client.service import ModelInfo, Observer, PullProgress, ResolvedModel, ServedModel, State, TextStream
from quire.core.errors import BadRequest, DoesNotFit, QueueFull, QuireError, Unavailable
from quire.engine.option import named_values
from quire.engine.options import EngineOptions
from quire.engine.start import task_of
from quire.hub import resolve_model
from quire.runtime.available_memory import available_memory
from quire.text.tokenizers.tokenizer import Tokenizer

Observe = Callable[[str], Observer]  # the observer of a model, by its name

log = logging.getLogger("quire.engine")

WEIGHTS = {".safetensors", ".gguf", ".bin"}


class ManyModels:
    """Implements `Models`. An async context manager, or `start` and `stop`."""

    def __init__(
        self,
        options: Mapping[str, EngineOptions],
        max_loaded: int,
        observe: Observe | None = None,
        idle_seconds: float | None = None,  # a model that is not used for so long is unloaded; None: never
        may_sleep: bool = False,
    ) -> None:
        assert options and max_loaded >= 1
        if len(options) > 1 and any(each.kv_events for each in options.values()):
            raise BadRequest(
                f"{len(options)} models would publish KV events on one endpoint",
                "serve each with a `quire serve` of its own, with a gateway before them",
                param="kv_events_config",
            )
        self._slots = {name: Slot(self, name, each) for name, each in options.items()}
        self._max_loaded = max_loaded
        self._observe = observe
        self._changing = asyncio.Lock()  # one model is loaded or unloaded at a time
        self._pulls = Pulls(self._add)
        self._state: State = "starting"
        self._idle_seconds, self._may_sleep = idle_seconds, may_sleep
        self._asleep: list[Slot] | None = None  # what is loaded on waking up; None: awake
        self._unloading: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        stalled = any(slot.state == "stalled" for slot in self._slots.values())
        if self._state == "ready" and self._asleep is not None:
            return "asleep"
        return "stalled" if self._state == "ready" and stalled else self._state

    async def __aenter__(self) -> "ManyModels":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Find the files of all models and load the first, so that mistakes are known now."""
        for slot in self._slots.values():
            await asyncio.to_thread(slot.find_files)
        await next(iter(self._slots.values())).loaded()
        self._state = "ready"
        if self._idle_seconds is not None:
            self._unloading = asyncio.create_task(self._unload_idle(self._idle_seconds))

    async def _unload_idle(self, idle_seconds: float) -> None:
        while True:
            await asyncio.sleep(max(min(idle_seconds / 4, 1.0), 0.05))
            for slot in self._loaded():
                if slot.busy:
                    slot.last_used = time.monotonic()
                elif time.monotonic() - slot.last_used >= idle_seconds:
                    async with self._changing:
                        if slot.client is not None and not slot.busy:
                            await slot.unload()

    async def stop(self) -> None:
        self._state = "stopped"
        if self._unloading is not None:
            self._unloading.cancel()
            await asyncio.gather(self._unloading, return_exceptions=True)
        await self._pulls.stop()
        for slot in self._slots.values():
            await slot.stop()

    def offers(self) -> list[ServedModel]:
        served = []
        for name, slot in self._slots.items():
            info = slot.info if slot.client else None
            served += [
                ServedModel(name, info),
                *(ServedModel(adapter, info, adapter_of=name) for adapter in slot.adapters),
            ]
        return served

    async def find(self, name: str | None) -> ResolvedModel:
        adapter = ""
        if name is None:
            slot = next(iter(self._slots.values()))
        elif name in self._slots:
            slot = self._slots[name]
        elif (owner := self._with_adapter(name)) is not None:
            slot, adapter = owner, name
        else:
            raise unknown_model(name, [offer.name for offer in self.offers()])
        await slot.loaded()
        return ResolvedModel(slot, adapter)

    async def load_adapter(self, name: str, path: str, in_place: bool = False, base: str | None = None) -> None:
        able = {slot.name: slot for slot in self._slots.values() if slot.options.num_loras}
        if base not in able and (base is not None or len(able) != 1):
            what = "it is not said of which model the adapter is" if base is None else f"`{base}` takes no adapters"
            names = ", ".join(able) or "none, without --enable-lora"
            raise BadRequest(what, f"models that take adapters: {names}", param="base_model_name")
        slot = able[base] if base is not None else next(iter(able.values()))
        owner = self._with_adapter(name)
        if name in self._slots or owner not in (None, slot):
            raise BadRequest(f"`{name}` is the name of another", "call the adapter something else", param="lora_name")
        await slot.load_adapter(name, path, in_place)

    async def unload_adapter(self, name: str) -> None:
        if (slot := self._with_adapter(name)) is None:
            raise unknown_model(name, [offer.name for offer in self.offers() if offer.adapter_of], "adapter")
        await slot.unload_adapter(name)

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        if name in (offer.name for offer in self.offers()):
            yield PullProgress()
            return
        async with aclosing(self._pulls.pull(name)) as pull:
            async for progress in pull:
                yield progress

    async def sleep(self) -> None:
        if not self._may_sleep:
            raise no_sleep()
        if self._asleep is None:
            self._asleep = self._loaded()
        await self._unload_all()

    async def wake_up(self) -> None:
        if not self._may_sleep:
            raise no_sleep()
        slots, self._asleep = self._asleep, None
        try:
            for slot in slots or ():
                await slot.loaded()
        except BaseException:
            self._asleep = slots
            await self._unload_all()
            raise

    async def _unload_all(self) -> None:
        async with self._changing:
            await asyncio.gather(*(slot.unload() for slot in self._loaded()))

    def check_awake(self) -> None:
        if self._asleep is not None:
            raise Unavailable("the server is asleep", "POST /wake_up, or ask another one")

    async def _add(self, name: str, path: str) -> None:
        """Serve a pulled model, with the options that hold for all models."""
        options = next(iter(self._slots.values())).options
        options = replace(options, model=path, served_model_name=name, lora_modules=(), task="auto")
        slot = Slot(self, name, replace(options, revision=None, tokenizer=None))
        await asyncio.to_thread(slot.find_files)
        self._slots[name] = slot
        log.info("`%s` has been pulled, and is served", name)

    def _with_adapter(self, name: str) -> "Slot | None":
        return next((slot for slot in self._slots.values() if name in slot.adapters), None)

    async def drain(self) -> None:
        self._state = "draining"
        await asyncio.gather(*(slot.drain() for slot in self._slots.values()))

    async def load(self, slot: "Slot") -> None:
        """Start its engine, when others have made room for it."""
        async with self._changing:
            if self.state in ("draining", "stopped"):
                raise Unavailable("the server is shutting down", "ask another one")
            while len(others := self._loaded()) >= self._max_loaded or (others and not slot.fits()):
                await self._least_recently_used(others).unload()
            while True:
                try:
                    return await slot.start(self._observe(slot.name) if self._observe else None)
                except DoesNotFit:
                    if not (others := self._loaded()):
                        raise
                    await self._least_recently_used(others).unload()

    def _loaded(self) -> list["Slot"]:
        return [slot for slot in self._slots.values() if slot.client is not None]

    @staticmethod
    def _least_recently_used(slots: list["Slot"]) -> "Slot":
        """An idle one, if there is any: it can be unloaded at once."""
        return min(slots, key=lambda slot: (slot.busy, slot.last_used))


class Slot:
    """A name, and its engine while it is loaded. Implements `Service`: any request loads it."""

    info: ModelInfo
    tokenizer: Tokenizer

    def __init__(self, models: ManyModels, name: str, options: EngineOptions) -> None:
        self.name, self.options = name, options
        self.client: EngineClient | None = None
        self.adapters = named_values(options.lora_modules, "lora_modules", "PATH")  # name -> path
        self.last_used = 0.0
        self._models = models
        self._loading: asyncio.Task[None] | None = None
        self._waiting = 0  # requests for which it is being loaded
        self._users = 0  # calls on their way into the engine
        self._unused = asyncio.Event()
        self._unused.set()
        self._num_bytes = 0

    @property
    def state(self) -> State:
        return self.client.state if self.client else "starting"

    @property
    def busy(self) -> bool:
        return self._users > 0 or (self.client is not None and self.client.busy)

    async def submit(self, request: GenerateRequest) -> TextStream:
        async with self._use() as client:
            return await client.submit(request)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        async with self._use() as client:
            return await client.embed(request)

    async def score(self, request: ScoreRequest) -> Scores:
        async with self._use() as client:
            return await client.score(request)

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        return self.client is None or await self.client.reset_prefix_cache(tenant)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[LiveClient]:
        """Watching does not keep it from being unloaded."""
        client = await self.loaded()
        async with client.watch() as live_client:
            yield live_client

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        async with self._use() as client:
            await client.adapters.load(name, path, in_place)
            self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]
        if self.client is not None:
            await self.client.adapters.unload(name)

    async def drain(self) -> None:
        await self._unused.wait()
        if self.client is not None:
            await self.client.drain()

    async def loaded(self) -> EngineClient:
        """The model's engine, when it runs. At most max_queued_requests wait for that."""
        self._models.check_awake()
        if self.client is not None and self.client.state == "stopped":  # the engine died too often
            self.client = None
        if self.client is None:
            if self._waiting > self.options.max_queued_requests:
                raise QueueFull(f"{self._waiting} requests wait until `{self.name}` is loaded", "try again later")
            if self._loading is None or self._loading.done():
                self._loading = asyncio.create_task(self._models.load(self))
            self._waiting += 1
            try:
                await asyncio.shield(self._loading)  # a request that is cancelled does not stop it for the others
            finally:
                self._waiting -= 1
            if self.client is None:  # the model was unloaded again at once
                return await self.loaded()
        self.last_used = time.monotonic()
        return self.client

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[EngineClient]:
        client = await self.loaded()
        self._users += 1
        self._unused.clear()
        try:
            yield client
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    # -- asked by ManyModels ---------------------------------------------------------------------------------------

    def find_files(self) -> None:
        path = resolve_model(self.options.model, revision=self.options.revision).path
        loras, speculation = self.options.num_loras and not self.adapters, self.options.speculation
        if (loras or speculation) and task_of(path, self.options) != "generate":  # they are for models that generate
            self.options = replace(self.options.without_speculation(), enable_lora=False)
        files = [path] if path.is_file() else [file for file in Path(path).iterdir() if file.suffix in WEIGHTS]
        self._num_bytes = sum(file.stat().st_size for file in files)

    def fits(self) -> bool:
        """Whether its weights and the KV cache that was asked for fit into free main memory."""
        return self._num_bytes + (self.options.kv_cache_memory_bytes or 0) <= available_memory()

    async def start(self, observer: Observer | None) -> None:
        client, begin = EngineClient(self.options, observer), time.monotonic()
        await client.start()
        await self._sync_adapters(client)
        log.info("`%s` is loaded, after %.1f s", self.name, time.monotonic() - begin)
        self.client, self.info, self.tokenizer = client, client.info, client.tokenizer
        if observer is not None:
            observer.loaded()

    async def _sync_adapters(self, client: EngineClient) -> None:
        """Load and unload what has changed since it was loaded before. An adapter that is gone is reported and
        skipped."""
        for name in client.adapters.names():
            if name not in self.adapters:
                await client.adapters.unload(name)
        for name, path in list(self.adapters.items()):
            try:
                if name not in client.adapters.names():
                    await client.adapters.load(name, path)
            except QuireError as error:
                log.error("adapter `%s` of `%s` could not be loaded again: %s", name, self.name, error)
                self.adapters.pop(name, None)

    async def unload(self) -> None:
        """Let requests in flight finish, and end the engine. Later requests wait until it is loaded again."""
        client, self.client = self.client, None
        assert client is not None
        try:
            await self._unused.wait()
            await client.drain()
        finally:
            await client.stop()
        log.info("`%s` is unloaded", self.name)
        if client.observer is not None:
            client.observer.unloaded()

    async def stop(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self.client is not None:
            await self.client.stop()
