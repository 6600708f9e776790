"""Several engines of one model behind one service: decode engines that answer, and prefill engines that compute
prompts for them. Which engine computes a prompt is the decode engines' affair: here they are only started."""

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.client.live_client import LiveClient
from quire.client.prefill_engine import PrefillEngine
from quire.client.service import ModelInfo, Observer, State, TextStream
from quire.core.errors import BadRequest, QuireError, Unsupported
from quire.core.transfer_config import UNIX
from quire.engine.options import EngineOptions
from quire.engine.start import uses_gpu
from quire.hub import resolve_model
from quire.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("quire.engine")

ObserveEngine = Callable[[int], Observer]  # the observer of an engine, by its number


class EngineGroup:
    """Implements `Service`. An async context manager, or `start` and `stop`."""

    info: ModelInfo
    tokenizer: Tokenizer

    def __init__(self, options: EngineOptions, num_prefill: int, num_decode: int) -> None:
        assert num_prefill >= 1 and num_decode >= 1
        _check(options)
        self.options = options
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # of sockets; only this user may enter it
        addresses = [f"{UNIX}{self._folder}/prefill-{number}" for number in range(num_prefill)]
        parallel = num_prefill + num_decode
        shares = _share_cpus(parallel, options.threads)

        def with_role(role: str, peers: list[str]) -> EngineOptions:
            config = {"kv_role": role, "kv_peers": peers, "kv_parallel_size": parallel}
            given = replace(options, kv_transfer_config=json.dumps(config))
            if role == "kv_consumer":
                return given
            return replace(given, speculative_config=None, spec_method=None, spec_tokens=None)  # prompts need no drafts

        self.prefill = [
            PrefillEngine(with_role("kv_producer", [address]), shares.pop(0) if shares else ()) for address in addresses
        ]
        self.decode = [
            EngineClient(with_role("kv_consumer", addresses), cpus=shares.pop(0) if shares else ())
            for _ in range(num_decode)
        ]
        self.adapters = GroupAdapters(self.decode, self.prefill)

    # -- starting and stopping

    async def __aenter__(self) -> "EngineGroup":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all engines at the same time; raise if one cannot be started."""
        files = await asyncio.to_thread(resolve_model, self.options.model, revision=self.options.revision)
        first = self.decode[0]
        await first.adapters.find_given()
        given = first.adapters.named
        starts = [*(engine.start(files.path, given) for engine in self.prefill), *(e.start() for e in self.decode)]
        try:
            results = await asyncio.gather(*starts, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.stop()
            raise
        log.info("%d prefill engines and %d decode engines are ready", len(self.prefill), len(self.decode))
        self.tokenizer = first.tokenizer
        num_requests = sum(client.info.max_requests for client in self.decode)
        self.info = replace(first.info, max_requests=num_requests)

    async def stop(self) -> None:
        await asyncio.gather(*(client.stop() for client in self.decode))
        await asyncio.gather(*(engine.stop() for engine in self.prefill))
        shutil.rmtree(self._folder, ignore_errors=True)

    def observe(self, observer: ObserveEngine) -> None:
        for number, client in enumerate(self.decode):
            client.observer = observer(number)
        for number, engine in enumerate(self.prefill, len(self.decode)):
            engine.observer = observer(number)

    async def drain(self) -> None:
        await asyncio.gather(*(client.drain() for client in self.decode))

    @property
    def state(self) -> State:
        """That of the best decode engine: it takes the requests."""
        states = [client.state for client in self.decode]
        return "ready" if "ready" in states else states[0]

    # -- requests

    async def submit(self, request: GenerateRequest) -> TextStream:
        return await self._least_busy().submit(request)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self.decode[0].embed(request)

    async def score(self, request: ScoreRequest) -> Scores:
        return await self.decode[0].score(request)

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        decode = [client.reset_prefix_cache(tenant) for client in self.decode]
        prefill = [engine.reset_prefix_cache(tenant) for engine in self.prefill]
        return all(await asyncio.gather(*decode, *prefill))

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[LiveClient]:
        """The first decode engine."""
        async with self.decode[0].watch() as live_client:
            yield live_client

    def _least_busy(self) -> EngineClient:
        return min(self.decode, key=lambda client: (client.state != "ready", client.num_in_flight))


class GroupAdapters:
    """Implements `AdapterRegistry`: every engine of a group has the same LoRA adapters."""

    def __init__(self, decode: Sequence[EngineClient], prefill: Sequence[PrefillEngine]) -> None:
        self._decode, self._prefill = decode, prefill

    def names(self) -> list[str]:
        return self._decode[0].adapters.names()

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        loaded: list[EngineClient] = []
        try:
            for client in self._decode:
                await client.adapters.load(name, path, in_place)
                loaded.append(client)
        except QuireError:
            for client in loaded:
                await client.adapters.unload(name)
            raise
        finally:
            self._tell_prefill_engines()

    async def unload(self, name: str) -> None:
        for client in self._decode:
            await client.adapters.unload(name)
        self._tell_prefill_engines()

    def _tell_prefill_engines(self) -> None:
        for engine in self._prefill:
            engine.set_adapters(self._decode[0].adapters.named)


def _check(options: EngineOptions) -> None:
    if options.kv_transfer_config is not None:
        raise BadRequest(
            "kv_transfer_config is given, and prefill_engines too",
            "prefill_engines are on this machine; leave one of both out",
            param="kv_transfer_config",
        )
    if uses_gpu(options.device):
        raise Unsupported(
            "prefill_engines are for CPUs, and this model would be on a GPU",
            "use device cpu, or start two servers, each with a GPU and a kv_transfer_config",
        )


def _share_cpus(num_engines: int, threads: int | None) -> list[list[int]]:
    """The CPUs of each engine, the first get one more; none where they cannot be divided, or threads are given."""
    if threads is not None or not hasattr(os, "sched_getaffinity"):
        return []
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < num_engines:
        log.warning("%d engines share %d CPUs: prompts will disturb answers", num_engines, len(cpus))
        return []
    each, more = divmod(len(cpus), num_engines)
    sizes = [each + (number < more) for number in range(num_engines)]
    starts = [sum(sizes[:number]) for number in range(num_engines)]
    return [cpus[start : start + size] for start, size in zip(starts, sizes, strict=True)]
