"""Plans for a server: made one at a time by a process of its own, and remembered."""

import asyncio
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict

import msgspec

from quire.client.plan_request import PlanRequest
from quire.core.errors import BadRequest, QueueFull, Unavailable

PLAN_TIMEOUT = 60.0  # seconds: the largest shapes take three on an idle machine
IDLE_SECONDS = 60.0  # after which the process ends
MAX_WAITING = 8  # plans that were not made before
MAX_PLANS = 64  # remembered


class Planner:
    """Starts its process with the first plan, and ends it when nobody has asked for a while."""

    def __init__(self) -> None:
        self._plans: OrderedDict[bytes, bytes] = OrderedDict()  # request -> JSON of the plan
        self._making: dict[bytes, asyncio.Task[bytes]] = {}
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], Planner] | None = None

    async def plan(self, request: PlanRequest) -> bytes:
        """A JSON object. Raises BadRequest with the name of the field that is wrong."""
        key = msgspec.json.encode(request)
        if (plan := self._plans.get(key)) is not None:
            self._plans.move_to_end(key)
            return plan
        if key not in self._making:
            if len(self._making) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} plans are being made, which is the limit", "try again", retry_after=1)
            self._making[key] = asyncio.create_task(self._make(key))
        return await asyncio.shield(self._making[key])  # the plan is made even if this client leaves

    async def _make(self, key: bytes) -> bytes:
        try:
            async with self._lock:
                self._stay()
                answer = await asyncio.to_thread(self._ask, key)
                self._ending = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.end)
        except asyncio.CancelledError:  # the server stops: it need not wait for the thread
            self.end()
            raise
        finally:
            del self._making[key]
        if answer.startswith(b'{"error"'):
            message, hint, field = msgspec.json.decode(answer)["error"]
            raise BadRequest(message, hint, param=field)
        self._plans[key] = answer
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return answer

    def _ask(self, line: bytes) -> bytes:
        """One line there, one line back. A process that takes too long is killed, which ends the reading."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(PLAN_TIMEOUT, process.kill)
        timer.start()
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer:
            self.end()
            raise Unavailable(f"the plan could not be made in {PLAN_TIMEOUT:g} s", "try again, or plan a smaller model")
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "quire.client.plan_process"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._finalizer = weakref.finalize(self, _end_process, process)
        self._process = process
        return process

    def _stay(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def end(self) -> None:
        """End the process; the next plan starts another."""
        self._process = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with process:  # closes its pipes and waits for it
        pass
