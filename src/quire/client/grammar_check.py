"""Whether a grammar can be compiled, tried in processes of its own before the engine compiles it.

References that recurse by the thousand overflow the compiler's stack, and nested alternatives take years. A grammar
that passes here is compiled again by the engine: the same library with the same limits gives the same result."""

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

CHECK_TIMEOUT = 30.0  # seconds to start, and for one grammar, on a busy machine
MAX_WAITING = 32  # grammars not seen before; others do not wait
MAX_VERDICTS = 1024  # remembered

Verdict = tuple[str, str] | None  # what is wrong, and what to do about it


class GrammarCheck:
    """Starts its process with the first grammar. One grammar at a time."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._arguments = (str(tokenizer), str(vocab_size))
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._checking: dict[bytes, asyncio.Task[Verdict]] = {}

    @property
    def started(self) -> bool:
        return self._process is not None

    async def check(self, structured: Structured) -> None:
        """Raises BadRequest if the grammar cannot be used."""
        key = blake2b(repr(structured).encode(errors="surrogatepass")).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            verdict = self._verdicts[key]
        else:
            verdict = await asyncio.shield(self._start_check(key, structured))  # the check outlives this client
        if verdict is not None:
            message, hint = verdict
            raise BadRequest(message, hint, param="structured")

    async def stop(self) -> None:
        for task in self._checking.values():
            task.cancel()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)
        await self._end_process()

    def _start_check(self, key: bytes, structured: Structured) -> "asyncio.Task[Verdict]":
        if key not in self._checking:
            if len(self._checking) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} grammars wait to be compiled, which is the limit", "try again")
            self._checking[key] = asyncio.create_task(self._check_one(key, structured))
        return self._checking[key]

    async def _check_one(self, key: bytes, structured: Structured) -> Verdict:
        try:
            async with self._lock:
                verdict = self._verdicts[key] = await self._ask(structured)
        finally:
            del self._checking[key]
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, structured: Structured) -> Verdict:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                process = self._process or await self._start()
            assert process.stdin is not None and process.stdout is not None
            async with asyncio.timeout(CHECK_TIMEOUT):
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
            raise Unavailable("the grammar could not be checked in time", "try again")
        failure = json.loads(answer)
        return None if failure is None else (failure[0], failure[1])

    async def _start(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire.client.grammar_process",
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # stack overflows and lack of memory print a lot
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
