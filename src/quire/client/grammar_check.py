"""Whether a language can be used, found out where it can harm nobody: in processes of their own.

References that recurse by the thousand overflow the stack of whoever compiles them, and nested alternatives take years.
What passes here is compiled again by the engine; the same library with the same limits comes to the same end."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from quire.core.errors import BadRequest, QueueFull, Unavailable
from quire.core.structured import Structured

WALL_SECONDS = 30.0  # to be ready, and for one language: a machine may have little time for it
MAX_WAITING = 32  # languages that nobody has seen before; those that are known do not wait
VERDICTS = 1024  # remembered

Verdict = tuple[str, str] | None  # what is wrong, and what to do about it


class GrammarCheck:
    """Starts its process with the first language. One language at a time."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._arguments = (str(tokenizer), str(vocab_size))
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Verdict]] = {}

    @property
    def started(self) -> bool:
        return self._process is not None

    async def check(self, structured: Structured) -> None:
        """Raises BadRequest if no answer can be given in this language."""
        key = blake2b(f"{structured.kind} {structured.text}".encode(errors="surrogatepass")).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            verdict = self._verdicts[key]
        else:
            verdict = await asyncio.shield(self._begin(key, structured))  # it goes on if this client leaves
        if verdict is not None:
            message, hint = verdict
            raise BadRequest(message, hint, param="structured")

    async def stop(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        await self._end_process()

    def _begin(self, key: bytes, structured: Structured) -> "asyncio.Task[Verdict]":
        if key not in self._under_way:
            if len(self._under_way) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} languages wait to be compiled, which is the limit", "try again")
            self._under_way[key] = asyncio.create_task(self._judge(key, structured))
        return self._under_way[key]

    async def _judge(self, key: bytes, structured: Structured) -> Verdict:
        try:
            async with self._turn:
                verdict = self._verdicts[key] = await self._ask(structured)
        finally:
            del self._under_way[key]
        if len(self._verdicts) > VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, structured: Structured) -> Verdict:
        try:
            async with asyncio.timeout(WALL_SECONDS):
                process = self._process or await self._start()
            assert process.stdin is not None and process.stdout is not None
            async with asyncio.timeout(WALL_SECONDS):
                process.stdin.write(json.dumps(asdict(structured)).encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except (TimeoutError, ConnectionError):
            answer = b""
        except asyncio.CancelledError:
            await self._end_process()
            raise
        if not answer:
            await self._end_process()
            raise Unavailable("the language of the answer could not be checked in time", "try again")
        problem = json.loads(answer)
        return None if problem is None else (problem[0], problem[1])

    async def _start(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire.client.grammar_process",
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a stack overflow or a lack of memory is told in many words
            start_new_session=True,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        return process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
