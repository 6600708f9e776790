"""One engine on a node of a Ray cluster, or on several, from the outside. Its messages are those of one machine, over
TCP. Of several stages it has the last one, and connects to the others as to those of `quire stage`."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire import __version__
from quire.client.engine_channel import EngineChannel
from quire.client.engine_process import KILLS, STOP_TIMEOUT, engine_death
from quire.client.ray_actor import EngineEnd, NodeFacts, decode_end, decode_facts
from quire.client.ray_cluster import Placement, RayCluster, result_of
from quire.core.errors import DoesNotFit, EngineFailed, QuireError, Unsupported
from quire.engine.messages import Encode, ErrorInfo, Failed, FromEngine, Start, Submit, ToEngine
from quire.ipc.active_work import RequestSample
from quire.ipc.tcp import TokenListener

log = logging.getLogger("quire.engine")

PLACE_TIMEOUT = 60.0  # seconds that Ray may take to place the first engine of a server
SAME_CLOCK = 0.1  # seconds by which two readings of one clock may differ


class RayEngine:
    """Implements `EngineLink`. What goes wrong before there is an engine is told by `messages`."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._placement: Placement | None = None
        self._facts: NodeFacts | None = None
        self._channel: EngineChannel | None = None
        self._end: asyncio.Future[EngineEnd | None] | None = None  # None: nothing is known, its node is gone
        self._error: QuireError | None = None
        self._clock_offset = 0.0  # what the node's clock is ahead of this one
        self.pid = 0  # on its node

    async def start(self, message: Start) -> None:
        try:
            await self._start(message)
        except QuireError as error:
            self._error = error
        except BaseException:
            await self.stop()
            raise

    async def _start(self, message: Start) -> None:
        await self._cluster.join()
        self._placement = self._cluster.place()
        *stages, self._actor = self._placement.actors
        *others, facts = await self._prepared(message)
        self._facts = facts
        for each in (*others, facts):
            _check_node(each)
        threads = message.options.threads or self._cluster.cpus
        options = replace(message.options, threads=threads, data_parallel_size=self._cluster.stages_per_node)
        with TokenListener(self._cluster.address) as listener:
            try:
                listening = [
                    result_of(actor.listen.remote(each.path, threads))
                    for actor, each in zip(stages, others, strict=True)
                ]
                if addresses := await asyncio.gather(*listening):
                    options = replace(options, pipeline_stages=",".join(addresses))
                self.pid = await result_of(self._actor.start.remote(listener.host, listener.port, listener.token))
                end = await asyncio.wait_for(listener.accept(), STOP_TIMEOUT)
            except QuireError:
                raise
            except Exception as error:  # Ray's own errors, and those of the actor
                raise EngineFailed(f"an engine could not be started on {facts.host}: {_sentence(error)}") from None
        self._channel = EngineChannel(end)
        self._end = asyncio.ensure_future(self._wait())
        self._channel.send(msgspec.structs.replace(message, path=facts.path, options=options))

    async def _prepared(self, message: Start) -> list[NodeFacts]:
        """Wait for nodes: at the first start for a minute at most, later until there are some. -> of each stage"""
        model = message.options.model
        if Path(message.path).exists() and Path(model).expanduser().exists():
            model = str(Path(message.path).absolute())
        assert self._placement is not None
        actors = self._placement.actors
        answers = [asyncio.ensure_future(self._facts_of(actor, model, message.options.revision)) for actor in actors]
        try:
            _, waiting = await asyncio.wait(answers, timeout=PLACE_TIMEOUT)
            if waiting:
                self._check_may_wait(message)
            return await asyncio.gather(*answers)
        except QuireError:
            raise
        except Exception as error:  # Ray's own
            raise EngineFailed(
                f"an engine could not be placed on the Ray cluster: {_sentence(error)}",
                "install the same version of Quire on all nodes",
            ) from None
        finally:
            for answer in answers:
                answer.cancel()  # nothing happens if it is there

    async def _facts_of(self, actor: Any, model: str, revision: str | None) -> NodeFacts:
        asked = time.monotonic()
        facts = decode_facts(await result_of(actor.prepare.remote(model, revision)))
        offset = facts.now - time.monotonic()
        if actor is self._actor and abs(offset) > SAME_CLOCK + time.monotonic() - asked:
            self._clock_offset = offset
        return facts

    def _check_may_wait(self, message: Start) -> None:
        if not message.restarted:
            raise DoesNotFit(
                f"no node of the Ray cluster had {self._needs} free for {PLACE_TIMEOUT:.0f} s",
                "end what runs there, or give fewer threads",
            )
        log.warning("an engine waits for a node of the Ray cluster with %s free", self._needs)

    @property
    def _needs(self) -> str:
        cpus, num_stages = self._cluster.cpus, self._cluster.num_stages
        return f"{cpus} CPUs" if num_stages == 1 else f"{cpus} CPUs for each of {num_stages} stages"

    async def _wait(self) -> EngineEnd | None:
        """Until the engine has ended, or its node has left."""
        try:
            return decode_end(await result_of(self._actor.wait.remote()))
        except Exception:  # Ray's errors: the actor died, or its node
            return None
        finally:
            if self._channel is not None:
                self._channel.end()

    def send(self, message: ToEngine) -> None:
        if self._channel is None:
            return
        if self._clock_offset and isinstance(message, Submit | Encode) and message.request.deadline is not None:
            deadline = message.request.deadline + self._clock_offset
            message = msgspec.structs.replace(message, request=replace(message.request, deadline=deadline))
        self._channel.send(message)

    async def messages(self) -> AsyncIterator[list[FromEngine]]:
        if self._channel is None:
            assert self._error is not None
            yield [Failed(ErrorInfo.of(self._error))]
            return
        async for messages in self._channel.messages():
            yield messages

    async def stop(self) -> None:
        """Ask the process to end, and give its place on the node back."""
        try:
            if self._channel is not None and self._end is not None:
                self._channel.finish()
                await asyncio.wait((self._end,), timeout=STOP_TIMEOUT)
        finally:
            if self._placement is not None:
                self.kill()
                self._placement.end()
                self._placement = None
            if self._channel is not None:
                self._channel.close()

    def kill(self) -> None:
        if self._placement is not None and self._channel is not None:
            with contextlib.suppress(Exception):
                self._actor.kill.remote()

    @property
    def _known_end(self) -> EngineEnd | None:
        end = self._end
        return end.result() if end is not None and end.done() and not end.cancelled() else None

    @property
    def was_killed(self) -> bool:
        """An engine whose node is gone was killed; one that could not be placed was not."""
        if self._channel is None:
            return False
        end = self._known_end
        return end is None or (-end.status in KILLS and not (end.out_of_memory and -end.status == signal.SIGKILL))

    def death(self) -> EngineFailed:
        host = self._facts.host if self._facts else "a node"
        if (end := self._known_end) is None:
            return EngineFailed(f"the engine on {host} is gone: its node has left the Ray cluster, or its actor died")
        return engine_death(end.status, f" on {host}")

    def active_samples(self) -> set[RequestSample]:
        end = self._known_end
        return set(end.active) if end is not None else set()


def _check_node(facts: NodeFacts) -> None:
    if facts.version != __version__:
        raise Unsupported(
            f"Quire {facts.version} is installed on the Ray node {facts.host}, and {__version__} here",
            "install the same version on all nodes",
        )
    if facts.error is not None:
        raise facts.error.exception()


def _sentence(error: BaseException) -> str:
    """The end of a traceback says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
