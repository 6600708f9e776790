"""Whether a language can be compiled, found out where it can harm nobody: in a process of its own.

References that recurse by the thousand overflow the stack of whoever compiles them, and nested alternatives take years.
What passes here is compiled again by the engine; the same library with the same limits comes to the same end."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path

from quire.core.errors import BadRequest, QueueFull
from quire.core.structured import Structured
from quire.engine.grammar_process import CPU_SECONDS

WALL_SECONDS = 30.0  # to be ready, and for one language: a machine may have little time for it
MAX_WAITING = 32  # languages that nobody has seen before; those that are known do not wait
VERDICTS = 1024  # remembered


class GrammarCheck:
    """Starts its process with the first language. One at a time."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._arguments = (str(tokenizer), str(vocab_size))
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._verdicts: OrderedDict[Structured, BadRequest | None] = OrderedDict()

    async def check(self, structured: Structured) -> None:
        """Raises BadRequest if no answer can be given in this language."""
        if structured not in self._verdicts:
            if self._num_waiting >= MAX_WAITING:
                raise QueueFull(f"{self._num_waiting} languages wait to be compiled, which is the limit", "try again")
            self._num_waiting += 1
            try:
                async with self._turn:
                    if structured not in self._verdicts:
                        self._verdicts[structured] = await self._judge(structured)
            finally:
                self._num_waiting -= 1
        self._verdicts.move_to_end(structured)
        if len(self._verdicts) > VERDICTS:
            self._verdicts.popitem(last=False)
        if problem := self._verdicts[structured]:
            raise BadRequest(problem.message, problem.hint, param=problem.param)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _judge(self, structured: Structured) -> BadRequest | None:
        try:
            async with asyncio.timeout(WALL_SECONDS):
                process = self._process or await self._start()
            assert process.stdin is not None and process.stdout is not None
            async with asyncio.timeout(WALL_SECONDS):
                with contextlib.suppress(ConnectionError):  # it has died: nothing can be read either
                    process.stdin.write(json.dumps(asdict(structured)).encode() + b"\n")
                    await process.stdin.drain()
                answer = await process.stdout.readline()
                status = 0 if answer else await process.wait()
        except TimeoutError:
            await self.stop()
            return _too_complex(structured, f"it takes more than {WALL_SECONDS:.0f} s")
        except asyncio.CancelledError:  # the client has left, and what it asked for may go on for a while
            await self.stop()
            raise
        if not answer:
            self._process = None
            why = f"it takes more than {CPU_SECONDS:.0f} s" if status == -signal.SIGPROF else "it is nested too deeply"
            return _too_complex(structured, why)
        problem = json.loads(answer)
        return None if problem is None else BadRequest(*problem, param="structured")

    async def _start(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire.engine.grammar_process",
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a stack overflow or a lack of memory is told in many words
            start_new_session=True,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        return process


def _too_complex(structured: Structured, why: str) -> BadRequest:
    return BadRequest(
        f"the {structured.kind} of the answer cannot be compiled: {why}",
        "ask for something simpler: fewer alternatives, references and repetitions",
        param="structured",
    )
