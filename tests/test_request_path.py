"""The way of one streamed chat request, traced: which functions its forms pass through, from HTTP to the forward pass
and back.

A function is on the way if one of its arguments, or what it returns, is a form of the request. Both processes of a
server run here as threads, so that one profiler sees them."""

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import uvicorn

import quire
from quire.client.engine_client import EngineClient
from quire.client.engine_process import EngineProcess
from quire.client.generate_request import GenerateRequest
from quire.client.one_model import OneModel
from quire.core.plan import Admission, Run, SampledRow, StepOutput, StepPlan
from quire.core.request import Request, SequenceEvent
from quire.core.sequence import Sequence
from quire.core.sequence_group import SequenceGroup
from quire.engine import process
from quire.engine.messages import StepDone, Submit
from quire.engine.options import EngineOptions
from quire.ipc.active_work import ActiveWork, shared_file
from quire.ipc.channel import Channel
from quire.ops.opset import StepBatch
from quire.runtime.batch import BatchedStep
from quire.server.app import create_app
from quire.server.dialects.openai.chat import ChatBody
from quire.server.dialects.openai.shapes import CompletionObject
from quire.server.http.tcp_socket import bind, listen
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.serve import configuration
from quire.text.answer_parser import AnswerDelta
from quire.text.event import TextEvent

ROOT = f"{Path(quire.__file__).parent}/"

# One line a form: what stands in one line is the same form, alone, in a list or in its envelope.
FORMS: dict[str, tuple[type, ...]] = {
    "body": (ChatBody,),
    "request with its prompt as text": (GenerateRequest,),
    "request with its prompt as ids": (Request, Submit),
    "sequence": (SequenceGroup, Sequence),
    "plan": (StepPlan, Run, Admission),
    "arrays": (StepBatch, BatchedStep),
    "sampled tokens, by row": (StepOutput, SampledRow),
    "sampled tokens, by request": (SequenceEvent, StepDone),
    "text": (TextEvent,),
    "answer, parsed": (AnswerDelta,),
    "chunk": (CompletionObject,),
}


class Tracer:
    """A profiler that notes which functions the forms pass through."""

    def __init__(self) -> None:
        self.on = False
        self.functions: dict[CodeType, str] = {}
        self.forms: set[str] = set()

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if not self.on or event not in ("call", "return") or not code.co_filename.startswith(ROOT):
            return
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals[name] for name in names if name not in ("self", "cls") and name in frame.f_locals]
        else:
            values = [value]
        if forms := {form for value in values for form in forms_in(value)}:
            self.forms |= forms
            if not code.co_name.startswith("<"):
                self.functions[code] = f"{code.co_filename.removeprefix(ROOT)}: {code.co_qualname}"

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}


def forms_in(value: Any) -> set[str]:
    if isinstance(value, list | tuple) and value:
        value = value[-1]
    if isinstance(value, dict) and value:
        value = next(iter(value.values()))
    if isinstance(value, list) and value:
        value = value[0]
    return {form for form, types in FORMS.items() if isinstance(value, types)}


class EngineThread(EngineProcess):
    """The engine process as a thread of this one."""

    def __init__(self, tracer: Tracer) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._tracer = tracer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.process = self  # type: ignore[assignment]
        self.returncode = 0

    def _serve(self) -> None:
        sys.setprofile(self._tracer)
        channel = Channel(self._theirs)
        server = process._Server(channel)
        start = server.receive(None)
        assert isinstance(start, process.Start)
        with shared_file() as work_file:
            process._load_and_serve(start, server, ActiveWork(work_file))
        channel.close()

    @property
    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        self._thread.join()

    def kill(self) -> None:
        """It ends with the socket."""


def trace_chat(model: Path) -> Tracer:
    """One streamed chat, the second of a server: what happens once is over by then."""
    tracer = Tracer()

    def chat(port: int) -> str:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": "tiny", "stream": True, "max_tokens": 5, "temperature": 0, "messages": messages}
        return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).text

    async def main() -> None:
        engine = EngineOptions(model=str(model), served_model_name="tiny")
        async with EngineClient(engine, process=EngineThread(tracer)) as client:
            options, metrics = ServerOptions(), Metrics()
            listener = listen(bind("127.0.0.1", 0))
            port = listener.getsockname()[1]
            server = uvicorn.Server(configuration(create_app(OneModel(client), options, metrics), options, metrics))
            serving = asyncio.create_task(server.serve([listener]))
            first = await asyncio.to_thread(chat, port)
            sys.setprofile(tracer)
            tracer.on = True
            second = await asyncio.to_thread(chat, port)
            tracer.on = False
            sys.setprofile(None)
            assert "[DONE]" in first and "[DONE]" in second
            server.should_exit = True
            await serving

    asyncio.run(main())
    return tracer


def test_the_way_of_a_request_is_as_short_as_it_was(tiny_model: Path) -> None:
    tracer = trace_chat(tiny_model)
    for function in tracer.functions.values():
        print(function)
    print(f"{len(tracer.functions)} functions in {len(tracer.files)} files, {len(tracer.forms)} forms")
    assert len(tracer.functions) <= 106 and len(tracer.files) <= 36 and len(tracer.forms) <= 11
