"""Sends requests at their times, and keeps what became of them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cli.bench.serve.http_client import HttpClient, LoadFailed
from quire.cli.bench.serve.stream import StreamedAnswer, read_answer

_RETRIED_LATER = (408, 429)  # a busy server, not a wrong request


class Refused(LoadFailed):
    """The server takes no such request."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. Times are time.perf_counter()."""

    index: int
    sent: float
    ended: float
    queued: float  # seconds that it waited for --max-concurrency
    answer: StreamedAnswer | None = None
    failure: str = ""


@dataclass(slots=True)
class LoadRun:
    outcomes: list[Outcome] = field(default_factory=list)  # in the order they ended
    begin: float = 0.0
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        """From the start to the end of the last answer."""
        return max((outcome.ended for outcome in self.outcomes), default=self.begin) - self.begin


async def generate_load(
    client: HttpClient,
    path: str,
    bodies: Sequence[bytes],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    stop: asyncio.Event | None = None,
    on_ended: Callable[[Outcome], object] = lambda outcome: None,
    id_prefix: str | None = None,
) -> LoadRun:
    """Until all have ended, or `stop` is set: then those in flight are dropped. Raises Refused if the first request
    is one that the server does not take."""
    run = LoadRun(begin=time.perf_counter())
    free = asyncio.Semaphore(max_concurrency or len(bodies))

    async def send(index: int, queued: float) -> None:
        sent = time.perf_counter()
        answer, failure = None, ""
        try:
            answer = await complete(client, path, bodies[index], "" if id_prefix is None else f"{id_prefix}{index}")
        except Refused as refusal:
            if index == 0:
                raise
            failure = str(refusal)
        except LoadFailed as error:
            failure = str(error)
        finally:
            free.release()
        ended = answer.ended if answer else time.perf_counter()
        run.outcomes.append(Outcome(index, sent, ended, queued, answer, failure))
        on_ended(run.outcomes[-1])

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for index, due in enumerate(times):
                await asyncio.sleep(max(0.0, run.begin + due - time.perf_counter()))
                arrived = time.perf_counter()
                await free.acquire()
                group.create_task(send(index, time.perf_counter() - arrived))

    sending = asyncio.create_task(send_all())
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
    run.interrupted = not sending.done()
    for task in (sending, stopping):
        task.cancel()
    failures = await asyncio.gather(sending, stopping, return_exceptions=True)
    if isinstance(failures[0], BaseExceptionGroup):
        raise failures[0].exceptions[0]
    return run


async def complete(client: HttpClient, path: str, body: bytes, request_id: str = "") -> StreamedAnswer:
    reply = await client.post(path, body, request_id)
    try:
        return read_answer(reply)
    except LoadFailed as failure:
        if 400 <= reply.status < 500 and reply.status not in _RETRIED_LATER:
            raise Refused(str(failure)) from None
        raise
