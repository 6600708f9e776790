"""How the events of a step become bytes on a connection."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire.core.errors import EngineFailed
from quire.server.dialects.call_events import CallFrames, consume
from quire.server.dialects.dialect import Call, Context
from quire.server.dialects.openai.chat import parse_chat
from quire.server.dialects.openai.completions import parse_completion
from quire.server.dialects.openai.shapes import WIRE
from quire.server.http.connection import STREAM
from quire.server.http.event_stream import FrameStream
from quire.text.event import TextEvent
from server.fake_service import FakeService

TEXTS = ["Hello", ' "quoted" \\ ', "\n\t\x00\x1f", "é€😀", "</script>", "\u2028", "data: x\n\n"]


class Stream:
    """A `TextStream` whose events are put by hand."""

    num_prompt_tokens, record = 3, None

    def __init__(self) -> None:
        self.prompt_ids = [1, 2, 3]
        self._ready: list[TextEvent] = []
        self.on_ready: Callable[[], object] = lambda: None
        self.listened = False

    def put(self, *events: TextEvent) -> None:
        self._ready += events
        self.on_ready()

    def listen(self, on_ready: Callable[[], object]) -> None:
        self.on_ready, self.listened = on_ready, True

    def take(self) -> list[TextEvent]:
        ready, self._ready = self._ready, []
        return ready

    async def aclose(self) -> None: ...


def call_of(path: str, **fields: Any) -> Call:
    service = FakeService()
    context = Context(service.info, service.tokenizer, model="fake")  # type: ignore[arg-type]
    body = {"stream": True, **fields}
    if path == "chat":
        body["messages"] = [{"role": "user", "content": "Hi"}]
        call: Call = parse_chat(json.dumps(body).encode(), context)
    else:
        body["prompt"] = fields.get("prompt", "Hi")
        call = parse_completion(json.dumps(body).encode(), context)
    call.begin([[1, 2, 3] for _ in call.requests])
    return call


def end_of(**fields: Any) -> TextEvent:
    return TextEvent(0, finish_reason="stop", final=True, **fields)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
@pytest.mark.parametrize("path", ["chat", "completions"])
def test_a_template_gives_the_bytes_of_the_encoder(path: str, usage: object) -> None:
    """Chunks with nothing but text are filled in; with token ids, every chunk is encoded."""
    plain, stream = call_of(path, stream_options=usage), Stream()
    encoded = call_of(path, stream_options=usage, return_token_ids=True)
    frames = CallFrames(WIRE, plain, [stream])  # type: ignore[list-item]
    for text in ["first", *TEXTS]:
        stream.put(TextEvent(0, text, [7]))
        *_, frame = frames.take().removesuffix(b"\n\n").rsplit(b"data: {", 1)
        *_, chunk = encoded.chunks(0, TextEvent(0, text, [7]))
        expected = msgspec.to_builtins(chunk)
        found = json.loads(b"{" + frame)
        for key in ("id", "created"):
            expected[key] = found[key]
        expected.pop("prompt_token_ids", None)
        for key in ("token_ids", "prompt_token_ids"):
            expected["choices"][0].pop(key, None)
        assert b"{" + frame == msgspec.json.encode(expected)


def test_what_came_before_a_failure_is_framed() -> None:
    stream = Stream()
    frames = CallFrames(WIRE, call_of("completions"), [stream])  # type: ignore[list-item]
    error = EngineFailed("it broke")
    stream.put(TextEvent(0, "a", [7]), TextEvent(0, finish_reason="error", error=error, final=True))
    assert b'"text":"a"' in frames.take()
    assert frames.ended and frames.failure is error and frames.take() == b""


def test_all_prompts_of_a_call_end_before_it_does() -> None:
    streams = [Stream(), Stream()]
    frames = CallFrames(WIRE, call_of("completions", prompt=["x", "y"]), streams)  # type: ignore[arg-type]
    streams[1].put(end_of(text="b"))
    assert b'"index":1,"text":"b"' in frames.take() and not frames.ended
    streams[0].put(end_of(text="a"))
    assert frames.take().endswith(WIRE.last) and frames.ended


def test_an_error_of_who_consumes_is_raised_once() -> None:
    async def main() -> None:
        stream = Stream()

        def refuse(prompt: int, event: TextEvent) -> None:
            raise ValueError(event.text)

        consuming = asyncio.create_task(consume([stream], refuse))  # type: ignore[list-item]
        await asyncio.sleep(0)
        stream.put(TextEvent(0, "a", [7]))
        stream.put(TextEvent(0, "b", [7]))
        with pytest.raises(ValueError, match="a"):
            await consuming
        stream.put(TextEvent(0, "c", [7]))  # it is not listened to

    asyncio.run(main())


def test_frames_are_written_at_once() -> None:
    async def main() -> None:
        stream, written, sent = Stream(), list[bytes](), list[bytes]()
        frames = CallFrames(WIRE, call_of("completions"), [stream])  # type: ignore[list-item]

        async def closed() -> None: ...

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.sleep(60)

        response = FrameStream(WIRE, frames, 0.0, closed)
        scope = {"extensions": {STREAM: written.append}}
        answering = asyncio.create_task(response(scope, receive, send))
        while not stream.listened:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(TextEvent(0, "a", [7]), TextEvent(0, "b", [8]))
        assert [part.count(b"data: ") for part in written] == [2], "one write for what came together"
        long = [TextEvent(0, "x" * 10_000, [7]) for _ in range(20)]
        stream.put(*long)
        assert len(written) == 4 and sum(part.count(b"data: ") for part in written[1:]) == 20, "much is divided"
        stream.put(end_of())
        await answering
        assert written[-1].endswith(WIRE.last) and sent[-1] == b""

    asyncio.run(main())
