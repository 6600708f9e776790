"""Several engines of one model behind one service. Each answers (data parallel), or some only compute prompts for those
that do: which prefill engine computes a prompt is the affair of the engines that answer.

A request goes to the engine that has most of its prompt cached, unless that one is far busier than the others. When an
engine dies, its requests go on at the others, with the tokens that they would have had; and one that waits at a full
engine goes to another that has room: all engines share one queue."""

import asyncio
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.engine_client import EngineClient
from quire.client.engine_process import EngineLink, EngineProcess
from quire.client.engine_router import EngineRouter
from quire.client.generate_request import GenerateRequest
from quire.client.group_adapters import GroupAdapters
from quire.client.inflight import GenerateStream
from quire.client.live_client import LiveClient
from quire.client.machine_shares import cpu_shares, gpu_shares, num_gpus
from quire.client.prefill_engine import PrefillEngine
from quire.client.service import ModelInfo, Observer, State
from quire.client.tasks import check_task
from quire.core.errors import BadRequest, Unavailable, Unsupported
from quire.core.transfer_config import UNIX
from quire.engine.options import EngineOptions
from quire.engine.start import uses_gpu
from quire.hub import resolve_model
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.client.ray_cluster import RayCluster

log = logging.getLogger("quire.engine")

ObserveEngine = Callable[[int], Observer]  # the observer of an engine, by its number
SECONDS_BETWEEN_CHECKS = 1.0  # for engines that do not answer


class EngineGroup:
    """Implements `Service`. An async context manager, or `start` and `stop`."""

    info: ModelInfo
    tokenizer: Tokenizer

    def __init__(self, options: EngineOptions, num_prefill: int = 0, num_decode: int | None = None) -> None:
        """`num_decode`: engines that answer; None: as many as `data_parallel_size`."""
        num_decode = options.data_parallel_size if num_decode is None else num_decode
        assert num_prefill >= 0 and num_decode >= 1
        _check(options, num_prefill)
        self.options = options
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # of sockets; only this user may enter it
        addresses = [f"{UNIX}{self._folder}/prefill-{number}" for number in range(num_prefill)]
        parallel = num_prefill + num_decode
        self._cluster: RayCluster | None = None
        spawns = self._spawns(parallel)

        def with_role(role: str, peers: list[str]) -> EngineOptions:
            config = {"kv_role": role, "kv_peers": peers, "kv_parallel_size": parallel}
            given = replace(options, kv_transfer_config=json.dumps(config))
            if role == "kv_consumer":
                return given
            return given.without_speculation()  # prompts need no drafts

        self.prefill = [PrefillEngine(with_role("kv_producer", [address]), spawns.pop(0)) for address in addresses]
        given = with_role("kv_consumer", addresses) if addresses else options
        self.decode = [EngineClient(given, spawn=spawn) for spawn in spawns]
        self.adapters = GroupAdapters(self.decode, self.prefill)
        self._router = EngineRouter(self.decode)
        self._checking: asyncio.Task[None] | None = None

    def _spawns(self, count: int) -> list[Callable[[], EngineLink]]:
        """What starts each engine: with its share of the CPUs, with a GPU of its own, or on a node of a cluster."""
        options = self.options
        if options.distributed_executor_backend == "ray":
            from quire.client.ray_cluster import RayCluster
            from quire.client.ray_engine import RayEngine

            self._cluster = RayCluster(count, options)
            return [partial(RayEngine, self._cluster)] * count
        if uses_gpu(options.device):
            return [partial(EngineProcess, (), environment) for environment in gpu_shares(count, num_gpus(options))]
        return [partial(EngineProcess, cpus) for cpus in cpu_shares(count, options.threads)]

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
        kinds = f"{len(self.prefill)} prefill engines and {len(self.decode)} decode engines"
        log.info("%s are ready", kinds if self.prefill else f"{len(self.decode)} engines")
        self.tokenizer = first.tokenizer
        num_requests = sum(client.info.max_requests for client in self.decode)
        self.info = replace(first.info, max_requests=num_requests)
        self._router.started()
        self._checking = asyncio.create_task(self._kill_stalled())

    async def stop(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(*(client.stop() for client in self.decode))
        await asyncio.gather(*(engine.stop() for engine in self.prefill))
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._cluster is not None:
            await self._cluster.leave()

    def observe(self, observer: ObserveEngine) -> None:
        for number, client in enumerate(self.decode):
            client.observer = observer(number)
        for number, engine in enumerate(self.prefill, len(self.decode)):
            engine.observer = observer(number)

    async def drain(self) -> None:
        await asyncio.gather(*(client.drain() for client in self.decode))

    @property
    def state(self) -> State:
        """The state of the group is that of the best engine that answers, since this one takes the requests."""
        states = self.engine_states
        return "ready" if "ready" in states else states[0]

    @property
    def engine_states(self) -> list[State]:
        """The states of the engines that answer; prefill engines are left out."""
        return [client.state for client in self.decode]

    async def _kill_stalled(self) -> None:
        """An engine that does not answer is killed where others do: its requests go on there."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
            for client in self.decode:
                if client.state == "stalled" and "ready" in self.engine_states:
                    log.error("an engine has not answered for too long: it is killed")
                    client.kill_engine()

    # -- requests

    async def submit(self, request: GenerateRequest) -> GenerateStream:
        check_task(self.info, "generate")
        if any(request.id in client.in_flight for client in self.decode):
            raise BadRequest(f"a request with id {request.id} is in flight", "give each request an id of its own")
        first = next((client for client in self.decode if client.state != "stopped"), None)
        if first is None or first.state == "draining":
            raise Unavailable("the server is shutting down", "ask another one")
        prepared = await first.prepare(request)
        return await self._router.pick(prepared, request.adapter).submit(request, prepared)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self._router.least_busy().embed(request)

    async def score(self, request: ScoreRequest) -> Scores:
        return await self._router.least_busy().score(request)

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        decode = [client.reset_prefix_cache(tenant) for client in self.decode]
        prefill = [engine.reset_prefix_cache(tenant) for engine in self.prefill]
        return all(await asyncio.gather(*decode, *prefill))

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[LiveClient]:
        """The first engine that answers."""
        async with self.decode[0].watch() as live_client:
            yield live_client


def new_service(options: EngineOptions) -> EngineClient | EngineGroup:
    """The engine of these options, or the engines."""
    return EngineGroup(options) if options.is_group else EngineClient(options)


def _check(options: EngineOptions, num_prefill: int) -> None:
    option = "prefill_engines" if num_prefill else "data_parallel_size"
    if options.kv_transfer_config is not None:
        raise BadRequest(
            f"kv_transfer_config is given, and {option} too",
            f"{option} are on this machine; leave one of both out" if num_prefill else "leave one of both out",
            param="kv_transfer_config",
        )
    if num_prefill and options.distributed_executor_backend == "ray":
        raise Unsupported(
            "prefill_engines are on this machine, and distributed_executor_backend is ray",
            "use data_parallel_size with ray",
        )
    if num_prefill and options.data_parallel_size > 1:
        raise BadRequest(
            f"data_parallel_size is {options.data_parallel_size}, and prefill_engines is {num_prefill}",
            "beside prefill engines, the number of engines that answer is decode_engines",
            param="data_parallel_size",
        )
    if options.stage_addresses and (num_prefill or options.data_parallel_size > 1):
        raise BadRequest(
            f"pipeline_stages are the stages of one engine, and {option} asks for several",
            "start a server with its own stages for each engine, and `quire gateway` before them; or let Ray place the "
            "stages: distributed_executor_backend ray, with pipeline_parallel_size",
            param="pipeline_stages",
        )
    if options.kv_events is not None and options.data_parallel_size > 1:
        raise BadRequest(
            f"{options.data_parallel_size} engines would publish KV events on one endpoint",
            "leave kv_events_config out: requests go where their prefix is without it",
            param="kv_events_config",
        )
    if num_prefill and uses_gpu(options.device):
        raise Unsupported(
            "prefill_engines are for CPUs, and this model would be on a GPU",
            "use device cpu, or start two servers, each with a GPU and a kv_transfer_config",
        )
