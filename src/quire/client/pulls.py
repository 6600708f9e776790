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
LONGEST_NAME = 300  # letters
TOLD_EVERY = 0.2  # seconds


class PullFailed(QuireError):
    """What the process said."""

    def __init__(self, code: str, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint, param="model")
        self.code, self.status = code, status


class Pull:
    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.coming = PullProgress()
        self.num_waiting = 0


class Pulls:
    """Who asks for a model that is on its way waits with the others. When nobody waits any more it is given up; what
    has come of it stays, and the next one goes on from there."""

    def __init__(self, add: Callable[[str, str], Awaitable[None]]) -> None:
        """`add` is called with the name of a model that has come, and its path."""
        self._add = add
        self._turn = asyncio.Lock()
        self._under_way: dict[str, Pull] = {}

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        pull = self._under_way.get(name) or self._begin(name)
        pull.num_waiting += 1
        told = None
        try:
            while not pull.task.done():
                if told != pull.coming:
                    yield (told := pull.coming)
                await asyncio.wait({pull.task}, timeout=TOLD_EVERY)
            if told != pull.coming:
                yield pull.coming
            await pull.task
        finally:
            pull.num_waiting -= 1
            if not pull.num_waiting:
                pull.task.cancel()

    async def stop(self) -> None:
        tasks = [pull.task for pull in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, name: str) -> Pull:
        wanted = source(name)
        if len(self._under_way) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} models wait to be fetched, which is the limit", "try again later")
        self._under_way[name] = pull = Pull()
        pull.task = asyncio.create_task(self._run(name, wanted, pull))
        return pull

    async def _run(self, name: str, wanted: str, pull: Pull) -> None:
        try:
            async with self._turn:
                await self._add(name, await _fetched(wanted, pull))
        finally:
            del self._under_way[name]


async def _fetched(name: str, pull: Pull) -> str:
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
                case coming:
                    pull.coming = PullProgress(**coming)
        raise DownloadFailed(f"the process that was fetching `{name}` ended", "the server's log may say why")
    finally:
        with contextlib.suppress(ProcessLookupError):  # pip, which it may have started, is of the same group
            os.killpg(process.pid, signal.SIGTERM)
        await process.wait()


def source(name: str) -> str:
    """What `quire pull` would be told: a short name, or a repository. Ollama's users write `smollm2:360m` for
    `smollm2-360m`, and `hf.co/` before a repository. Raises UnknownModel for what can be neither."""
    for host in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(host)
    short = name.lower().replace(":", "-")
    if short in ALIASES:
        return short
    if is_repo_id(name.partition(":")[0]) and name.isprintable() and len(name) <= LONGEST_NAME:
        return name
    hint = f"give a repository of the hub, owner/name, or one of {', '.join(ALIASES)}"
    raise UnknownModel(f"no model `{name[:LONGEST_NAME]}`", hint, param="model")
