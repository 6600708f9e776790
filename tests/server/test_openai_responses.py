"""/v1/responses through the `openai` package."""

import asyncio
import time
from typing import Any

import openai
import pytest

from quire.server.dialects.openai.responses.journal import EventsGone, TenantJournals
from quire.server.dialects.openai.responses.shapes import ResponseObject
from quire.server.dialects.openai.responses.store import ResponseStore, StoredResponse, UnknownResponse
from quire.server.options import ServerOptions
from server.fake_service import CHATML, answer
from server.running import Running, running

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_response(client: openai.OpenAI, server: Running) -> None:
    response = client.responses.create(model="fake", input="Hello", instructions="Be short.", metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert server.service.seen[-1].messages == messages
    num_prompt = sum(len(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n") for m in messages) + 22
    assert response.status == "completed" and response.output_text == answer(0, num_prompt)
    assert response.usage.input_tokens == num_prompt and response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.total_tokens == num_prompt + response.usage.output_tokens
    assert response.metadata == {"a": "b"} and response.error is None and response.model == "fake"
    assert client.responses.retrieve(response.id) == response
    [item] = client.responses.input_items.list(response.id).data
    assert item.role == "user" and item.content[0].text == "Hello"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_the_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    asked = {"model": "fake", "instructions": "Be brief.", "input": "Hello"}
    response = client.responses.create(**asked)
    assert client.responses.input_tokens.count(**asked).input_tokens == response.usage.input_tokens
    more = client.responses.input_tokens.count(model="fake", input="And?", previous_response_id=response.id)
    assert more.input_tokens > response.usage.input_tokens - len("Be brief.")


def test_events_come_in_the_official_sequence(client: openai.OpenAI, server: Running) -> None:
    server.service.tokenizer.chat_template = CHATML + "{# </think> #}"
    server.service.says = f"<think>Hm.</think>Let me see. {CALL}"
    asked = {"model": "fake", "input": "Hello", "tools": [WEATHER]}
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    squeezed = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    assert squeezed == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == ["reasoning", "message", "function_call"]
    assert [item.status for item in added] == ["in_progress"] * 3 and added[1].content == []
    assert added[2].name == "weather" and added[2].arguments == ""
    last = events[-1].response
    assert [item.status for item in last.output] == ["completed"] * 3
    assert last.output[0].content[0].text == "Hm." and last.usage.output_tokens_details.reasoning_tokens == 3
    assert last.output_text == "Let me see." and last.output[2].arguments == '{"city": "Paris"}'
    full = client.responses.create(**asked)
    assert [item.type for item in full.output] == ["reasoning", "message", "function_call"]
    assert full.output_text == last.output_text and full.usage.output_tokens == last.usage.output_tokens
    assert client.responses.retrieve(last.id).output == last.output


def test_the_streaming_helper_folds_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="Hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text and final.status == "completed"


def test_a_response_follows_another(client: openai.OpenAI, server: Running) -> None:
    server.service.says = CALL
    first = client.responses.create(model="fake", input="Paris?", tools=[WEATHER], instructions="Only once.")
    [call] = first.output
    server.service.says = "It rains."
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        model="fake", input=[output], tools=[WEATHER], previous_response_id=first.id, tool_choice="none"
    )
    roles = [message["role"] for message in server.service.seen[-1].messages]
    assert roles == ["user", "assistant", "user"], "the instructions are not carried over"
    assert "rain" in server.service.seen[-1].messages[2]["content"]
    assert second.output_text == "It rains." and second.previous_response_id == first.id
    third = client.responses.create(model="fake", input="And now?", previous_response_id=second.id, store=False)
    assert server.service.seen[-1].messages[-2] == {"role": "assistant", "content": "It rains."}
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input="x", previous_response_id=third.id)


def test_items_are_what_they_would_be_in_a_chat(client: openai.OpenAI, server: Running) -> None:
    server.service.tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}{% endfor %}{% endfor %}"
    )
    items: list[Any] = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Paris?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    client.responses.create(model="fake", input=items)
    system, user, assistant, tool = server.service.seen[-1].messages
    assert (system["role"], user["content"], tool["content"]) == ("system", "Paris?", "rain")
    assert assistant["reasoning_content"] == "Hm." and len(assistant["tool_calls"]) == 2
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="Hello", max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.output_text == "Sam"
    *_, last = client.responses.create(model="fake", input="Hello", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"


def test_logprobs_are_included_on_demand(client: openai.OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    asked = {"model": "fake", "input": "Hello", "include": include, "top_logprobs": 2, "max_output_tokens": 3}
    part = client.responses.create(**asked).output[0].content[0]
    assert [each.token for each in part.logprobs] == list("Sam") and len(part.logprobs[0].top_logprobs) == 2
    deltas = [e for e in client.responses.create(**asked, stream=True) if e.type == "response.output_text.delta"]
    assert [logprob.token for event in deltas for logprob in event.logprobs] == list("Sam")


def test_formats_and_forced_calls_become_languages(client: openai.OpenAI, server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = client.responses.create(model="fake", input="Hello", text={"format": form})
    assert server.service.seen[-1].params.structured.kind == "json_schema"
    assert response.text.format.type == "json_schema"
    server.service.says = '{"city": "Paris"}'
    forced = client.responses.create(
        model="fake", input="Hello", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}
    )
    assert (forced.output[0].name, forced.output[0].arguments) == ("weather", server.service.says)


def wait_until(client: openai.OpenAI, name: str, *statuses: str) -> Any:
    end = time.monotonic() + 60
    while (response := client.responses.retrieve(name)).status not in statuses:
        assert time.monotonic() < end, response.status
    return response


def test_a_response_in_the_background(client: openai.OpenAI, server: Running) -> None:
    begun = client.responses.create(model="fake", input="Hello", background=True)
    assert begun.status in ("queued", "in_progress") and begun.background
    assert wait_until(client, begun.id, "completed").output_text.startswith("Sample 0")

    hanging = client.responses.create(model="fake", input="!hang", background=True)
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        client.responses.create(model="fake", input="x", previous_response_id=hanging.id)
    assert client.responses.cancel(hanging.id).status == "cancelled"
    assert client.responses.retrieve(hanging.id).status == "cancelled"
    end = time.monotonic() + 60
    while server.service.open:
        assert time.monotonic() < end, "cancelling has to end the request in the engine"

    failing = client.responses.create(model="fake", input="!fail", background=True)
    assert "failed on purpose" in wait_until(client, failing.id, "failed").error.message
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="fake", input="!full", background=True)
    foreground = client.responses.create(model="fake", input="Hello")
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(foreground.id)


def told(event: Any) -> tuple[int, str]:
    return event.sequence_number, event.type


def test_a_stream_in_the_background_goes_on_without_its_client(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="fake", input="Hello").output_text
    stream = client.responses.create(model="fake", input="Hello", background=True, stream=True)
    first = [next(stream) for _ in range(7)]
    stream.close()
    kinds = [event.type.removeprefix("response.") for event in first]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    name = first[0].response.id
    assert first[0].response.status == "queued" and first[0].response.background

    rest = list(client.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number))
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].type == "response.completed" and events[-1].response.output_text == whole
    assert client.responses.retrieve(name).output_text == whole

    again = list(client.responses.retrieve(name, stream=True))
    assert list(map(told, again)) == list(map(told, events))
    assert list(client.responses.retrieve(name, stream=True, starting_after=len(events) - 1)) == []
    with client.responses.stream(response_id=name, starting_after=5) as helper:
        assert [event.sequence_number for event in helper] == list(range(6, len(events)))
        assert helper.get_final_response().output_text == whole


def test_a_stream_in_the_background_is_cancelled_and_fails_as_events(client: openai.OpenAI, server: Running) -> None:
    stream = client.responses.create(model="fake", input="!hang", background=True, stream=True)
    name = next(stream).response.id
    while next(stream).type != "response.output_text.delta":
        pass
    done = client.responses.cancel(name)
    assert done.status == "cancelled" and done.output[0].status == "incomplete" and done.output_text
    assert [*stream][-1].type == "response.incomplete" and not server.service.open
    assert [*client.responses.retrieve(name, stream=True)][-1].response.output_text == done.output_text

    *_, last = client.responses.create(model="fake", input="!fail", background=True, stream=True)
    assert last.type == "response.failed" and "failed on purpose" in last.response.error.message
    assert client.responses.retrieve(last.response.id).status == "failed"
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="fake", input="!full", background=True, stream=True)


def test_only_streams_in_the_background_are_streamed_again(client: openai.OpenAI, server: Running) -> None:
    plain = client.responses.create(model="fake", input="Hello")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(plain.id, stream=True)
    for query, param in (("starting_after=1", "starting_after"), ("stream=maybe", "stream")):
        response = server.http.get(f"/v1/responses/{plain.id}?{query}")
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_events_that_are_kept_are_bounded() -> None:
    async def followed() -> None:
        journals = TenantJournals(max_bytes=10)
        old, new = journals.new(), journals.new()
        behind = old.follow(0)
        old.add(b"12345")
        assert await anext(behind) == b"12345"
        new.add(b"12345")
        new.add(b"6")
        assert (old.first, new.first) == (1, 0), "the one begun first forgets"
        old.add(b"67")
        assert await anext(behind) == b"67", "who has followed goes on"
        new.end()
        assert [part async for part in new.follow(0)] == [b"123456"]
        new.add(b"more than all")
        assert new.first == 3 and new.num_bytes == 0
        with pytest.raises(EventsGone, match="before 3"):
            await anext(new.follow(1))
        journals.forget(old)
        old.add(b"890")
        assert await anext(behind) == b"890"

    asyncio.run(followed())


def test_an_error_in_the_middle_of_a_stream_is_an_event(client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model="fake", input="!fail", stream=True)
    assert last.type == "error" and "failed on purpose" in last.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "files", "server_url": "http://x"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": ["everything"]}, "include[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "always"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.http.post("/v1/responses", json={"input": "Hello", **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_input_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    response = client.responses.create(model="fake", input=items)
    listed = [item.content for item in client.responses.input_items.list(response.id, limit=2, order="asc")]
    assert listed == ["0", "1", "2", "3", "4"]


def test_the_oldest_turns_are_left_out_on_demand(client: openai.OpenAI, server: Running) -> None:
    turns: list[Any] = []
    for number in range(9):
        turns += [{"role": "user", "content": f"{number}" * 500}, {"role": "assistant", "content": "Yes."}]
    asked: Any = {"model": "fake", "input": [*turns, {"role": "user", "content": "Now?"}], "instructions": "Be short."}
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**asked)
    response = client.responses.create(**asked, truncation="auto", max_output_tokens=20)
    shown = server.service.seen[-1].messages
    assert shown[0]["role"] == "system" and shown[1]["content"][0] == "2" and shown[-1]["content"] == "Now?"
    assert response.truncation == "auto" and response.usage.input_tokens + 20 <= 4096


def test_tenants_do_not_see_each_others_responses() -> None:
    with running(ServerOptions(api_key=["one", "two"])) as server:

        def get(key: str, path: str) -> int:
            return server.http.get(path, headers={"authorization": f"Bearer {key}"}).status_code

        body = {"input": "Hello"}
        made = server.http.post("/v1/responses", json=body, headers={"authorization": "Bearer one"}).json()
        assert get("one", f"/v1/responses/{made['id']}") == 200
        assert get("two", f"/v1/responses/{made['id']}") == 404


def test_the_store_is_bounded(server: Running) -> None:
    def stored(name: str, size: int = 1) -> StoredResponse:
        response = ResponseObject(
            **dict.fromkeys(ResponseObject.__struct_fields__) | {"id": name, "object": "response"}
        )
        return StoredResponse(response, [], [], size)

    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abcd":
        store.put("", stored(name))
    with pytest.raises(UnknownResponse):
        store.get("", "a")
    store.put("", stored("e", 99))
    assert store.get("", "d") and store.get("", "e")
    with pytest.raises(UnknownResponse):
        store.get("", "c")
    old = stored("old")
    store.put("", old)
    old.expires = time.monotonic() - 1
    with pytest.raises(UnknownResponse):
        store.get("", "old")
