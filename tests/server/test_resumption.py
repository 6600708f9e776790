"""A stream goes on behind tokens that another server has delivered. tests/gateway/test_serving.py has real engines."""

import json

import httpx
import pytest

from quire.client.inflight import GenerateStream
from quire.core.params import SamplingParams
from quire.core.request import Request, SequenceEvent
from server.fake_service import ByteTokenizer
from server.running import Running

BODY = {"prompt": "Hello", "max_tokens": 6, "stream": True}


def resume(server: Running, body: object, *, path: str = "/v1/completions", **changed: object) -> httpx.Response:
    resumption = {"id": "a" * 32, "created": 77, "seed": 5, "events": [], **changed}
    wrapped = {"resume": resumption, "body": body}
    return server.http.post(path, json=wrapped, headers={"x-quire-resume": "1"})


def test_tokens_are_told_and_id_and_time_are_kept(server: Running) -> None:
    answer = resume(server, BODY)
    assert answer.headers["x-quire-resume"] == "1"
    lines = answer.text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("cmpl-" + "a" * 32, 77)}
    told = [int(token) for line in lines if line.startswith(": quire ") for token in line[8:].split(",")]
    assert len(told) == 5, "all but those of the last event, which nothing follows"
    plain = server.http.post("/v1/completions", json={**BODY, "seed": 5})
    assert ": quire" not in plain.text and "x-quire-resume" not in plain.headers
    plain_chunks = [json.loads(line[6:]) for line in plain.text.splitlines() if line.startswith("data: {")]
    assert [chunk["choices"] for chunk in chunks] == [chunk["choices"] for chunk in plain_chunks], "the gateway's seed"


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": 1}, {"mirostat": 2}, {"prompt": ["a", "b"]}])
def test_what_cannot_be_resumed_tells_nothing_and_goes_on_nowhere(server: Running, fields: dict[str, object]) -> None:
    answer = resume(server, {**BODY, **fields})
    assert answer.status_code == 200 and ": quire" not in answer.text and "x-quire-resume" not in answer.headers
    refused = resume(server, {**BODY, **fields}, events=[[5]])
    assert refused.status_code == 400 and "cannot be resumed" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "changed", [{"id": "../x"}, {"seed": -1}, {"events": [[]]}, {"events": [["a"]]}, {"events": 1}, {"more": 1}]
)
def test_a_wrong_wrapper_is_refused(server: Running, changed: dict[str, object]) -> None:
    assert resume(server, BODY, **changed).status_code == 400
    assert server.http.post("/v1/completions", json=BODY, headers={"x-quire-resume": "1"}).status_code == 400


def test_ready_says_that_streams_can_be_resumed(server: Running) -> None:
    assert server.http.get("/ready").headers["x-quire-resume"] == "1"


def test_what_was_delivered_is_replayed_and_submitted() -> None:
    """In the same events, with the same text; half a character waits for its other half, as it did the first time."""
    import asyncio

    async def replayed() -> None:
        request = Request(id="r", prompt_ids=[65], params=SamplingParams(max_tokens=9, seed=1))
        stream = GenerateStream(request, ByteTokenizer(), Owner())  # type: ignore[arg-type]
        for tokens in ([72, 105], [0xC3], [0xA9]):
            stream.replay(tokens)
        [submit] = stream.submission()
        assert submit.request.resumed == [[72, 105, 0xC3, 0xA9]]  # type: ignore[union-attr]
        stream.push(SequenceEvent(request_id="r", index=0, tokens=[33], finish_reason="length", final=True))
        assert [event.text async for event in stream] == ["Hi", "", "é", "!"]

    class Owner:
        observer = None

        def request_started(self, request: object) -> None: ...

        def request_ended(self, request: object) -> None: ...

        def cancel(self, request: object) -> None: ...

    asyncio.run(replayed())
