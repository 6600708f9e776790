"""Models that are fetched while others are served: one at a time, each by a process of its own."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Awaitable, Callable

from quire.client.service import PullProgress
from quire.core.errors import QueueFull, QuireError, UnknownModel
from quire.hub import ALIASES, DownloadFailed
from quire.hub.huggingface import is_repo_id

MAX_WAITING = 8  # models
MAX_NAME_LENGTH = 300  # characters
REPORT_INTERVAL = 0.2  # seconds


class PullFailed(QuireError):
    """The error that the process reported."""

    def __init__(self, code: str, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint, param="model")
        self.code, self.status = code, status


class Pull:
    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.progress = PullProgress()
        self.num_waiting = 0


class Pulls:
    """Callers that pull the same model share one download. It is cancelled when the last of them leaves; what has been
    downloaded stays, and the next pull resumes it."""

    def __init__(self, add: Callable[[str, str], Awaitable[None]]) -> None:
        """`add` is called with the name and the path of a model that has been downloaded."""
        self._add = add
        self._lock = asyncio.Lock()
        self._pulls: dict[str, Pull] = {}  # those that may be joined
        self._tasks: set[asyncio.Task[None]] = set()  # also of pulls that are being cancelled

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        pull = self._pulls.get(name) or self._start(name)
        pull.num_waiting += 1
        reported = None
        try:
            while not pull.task.done():
                if reported != pull.progress:
                    yield (reported := pull.progress)
                await asyncio.wait({pull.task}, timeout=REPORT_INTERVAL)
            if reported != pull.progress:
                yield pull.progress
            await pull.task
        finally:
            pull.num_waiting -= 1
            if not pull.num_waiting:
                self._forget(name, pull)  # cancelling takes a while, and a caller who comes meanwhile must not join it
                pull.task.cancel()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, name: str) -> Pull:
        wanted = source(name)
        if len(self._pulls) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} models wait to be fetched, which is the limit", "try again later")
        self._pulls[name] = pull = Pull()
        pull.task = asyncio.create_task(self._run(name, wanted, pull))
        self._tasks.add(pull.task)
        pull.task.add_done_callback(self._tasks.discard)
        return pull

    async def _run(self, name: str, wanted: str, pull: Pull) -> None:
        try:
            async with self._lock:
                await self._add(name, await _fetch(wanted, pull))
        finally:
            self._forget(name, pull)

    def _forget(self, name: str, pull: Pull) -> None:
        if self._pulls.get(name) is pull:
            del self._pulls[name]


async def _fetch(name: str, pull: Pull) -> str:
    """The path of its files."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quire.client.pull_process", name, stdout=PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            match json.loads(line):
                case {"path": path}:
                    return str(path)
                case {"error": [code, status, message, hint]}:
                    raise PullFailed(code, status, message, hint)
                case progress:
                    pull.progress = PullProgress(**progress)
        raise DownloadFailed(f"the process that was fetching `{name}` ended", "the server's log may say why")
    finally:
        with contextlib.suppress(ProcessLookupError):  # with pip, if it has started that
            os.killpg(process.pid, signal.SIGTERM)
        await process.wait()


def source(name: str) -> str:
    """The argument of `quire pull`: a short name, or a repository. Ollama's users write `smollm2:360m` for
    `smollm2-360m`, and `hf.co/` before a repository. Raises UnknownModel for what can be neither."""
    for host in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(host)
    short = name.lower().replace(":", "-")
    if short in ALIASES:
        return short
    if is_repo_id(name.partition(":")[0]) and name.isprintable() and len(name) <= MAX_NAME_LENGTH:
        return name
    hint = f"give a repository of the hub, owner/name, or one of {', '.join(ALIASES)}"
    raise UnknownModel(f"no model `{name[:MAX_NAME_LENGTH]}`", hint, param="model")
