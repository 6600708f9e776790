"""What consumers of a stream are told, and when, with an engine that says what it is given."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.client.inflight import GenerateStream
from quire.core.errors import EngineFailed
from quire.core.params import SamplingParams
from quire.core.request import SequenceEvent
from quire.engine.messages import Cancel, FromEngine, Ready, Start, StepDone, ToEngine
from quire.engine.options import EngineOptions
from quire.executors.protocol import Capacity
from quire.ipc.active_work import RequestSample

CAPACITY = Capacity(
    num_blocks=64, num_host_blocks=0, vocab_size=128, max_model_len=512, weight_bytes=1, cache_bytes=1 << 16
)


class ScriptedEngine:
    """Implements `EngineLink`."""

    pid, was_killed = 0, False

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self._batches: asyncio.Queue[list[FromEngine]] = asyncio.Queue()

    async def start(self, message: Start) -> None:
        self._batches.put_nowait([Ready(CAPACITY)])

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def say(self, *messages: FromEngine) -> None:
        """All of them arrive together, and have been dealt with then."""
        self._batches.put_nowait(list(messages))
        await self._batches.join()

    async def messages(self) -> AsyncIterator[list[FromEngine]]:
        while True:
            yield await self._batches.get()
            self._batches.task_done()

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    def death(self) -> EngineFailed:
        return EngineFailed("it ended")

    def active_samples(self) -> set[RequestSample]:
        return set()


async def submit(client: EngineClient, name: str, **params: object) -> GenerateStream:
    sampling = SamplingParams(max_tokens=20, **params)  # type: ignore[arg-type]
    return await client.submit(GenerateRequest(id=name, params=sampling, prompt_ids=[5, 6]))


def test_steps_that_come_together_are_told_once(tiny_model: Path) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with EngineClient(EngineOptions(model=str(tiny_model)), spawn=lambda: engine) as client:
            one, other = await submit(client, "one"), await submit(client, "other")
            told: list[tuple[str, list[list[int]]]] = []
            for stream in (one, other):
                stream.listen(lambda s=stream: told.append((s.id, [event.token_ids for event in s.take()])))
            await engine.say(StepDone([], None, {"one": [7], "other": [8]}))
            assert told == [("one", [[7]]), ("other", [[8]])], "neither waits for the next step"
            told.clear()
            last = SequenceEvent(request_id="other", index=0, tokens=[10], finish_reason="length", final=True)
            await engine.say(StepDone([], None, {"one": [9], "other": [9]}), StepDone([last], None, {"one": [10]}))
            assert told == [("one", [[9], [10]]), ("other", [[9], [10]])]
            assert other.record is not None and other.record.num_output_tokens == 3
            await one.aclose()

    asyncio.run(main())


def test_tokens_are_the_same_text_as_events(tiny_model: Path) -> None:
    """One request is told its tokens as a table, the other as events, also where a stop string ends it."""

    async def main() -> None:
        engine = ScriptedEngine()
        async with EngineClient(EngineOptions(model=str(tiny_model)), spawn=lambda: engine) as client:
            ids = list(range(40, 60))
            stop = client.tokenizer.decode(ids[12:14])
            for stops in ([], [stop]):
                name = f"stops {len(stops)}"
                table, events = [await submit(client, f"{name} {kind}", stop=stops) for kind in ("table", "events")]
                for number, token in enumerate(ids):
                    ends = number + 1 == len(ids)
                    event = SequenceEvent(request_id=events.id, index=0, tokens=[token], final=ends)
                    last = SequenceEvent(request_id=table.id, index=0, tokens=[token], final=ends)
                    if ends:
                        event.finish_reason = last.finish_reason = "length"
                    await engine.say(
                        StepDone([event, last] if ends else [event], None, {} if ends else {table.id: [token]})
                    )
                one, other = table.take(), events.take()
                assert one == other and one[-1].final
                assert one[-1].finish_reason == ("stop" if stops else "length")
                cancelled = {message.request_id for message in engine.sent if isinstance(message, Cancel)}
                assert cancelled == ({table.id, events.id} if stops else set())

    asyncio.run(main())
