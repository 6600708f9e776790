"""Anthropic's client, as its users have it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from clients.served import SECONDS, served

MODEL = "smollm2"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(default_model: Path) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served(), api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield client


def ask(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    given = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": extra, **more}
    message: anthropic.types.Message = client.messages.create(**given)
    return message


def test_create(client: anthropic.Anthropic) -> None:
    message = ask(client)
    [block] = message.content
    assert block.type == "text" and block.text
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens <= 12
    assert message.id.startswith("msg_") and message.model == MODEL


def test_stream(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with client.messages.stream(model=MODEL, max_tokens=12, messages=HELLO, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert final.content[0].type == "text" and final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=3, messages=HELLO, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


def test_stop_sequences_and_prefill(client: anthropic.Anthropic) -> None:
    text = ask(client, max_tokens=32).content[0].text  # type: ignore[union-attr]
    stopped = ask(client, max_tokens=32, stop_sequences=[text[5:8]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[5:8])
    assert stopped.content[0].text == text[: text.index(text[5:8])]  # type: ignore[union-attr]
    begun = [*HELLO, {"role": "assistant", "content": text[:10].rstrip()}]
    assert ask(client, messages=begun).content, "the answer goes on where it was"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    usage = ask(client).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.").input_tokens != counted
    assert client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER]).input_tokens > counted


def test_tools_and_their_results(client: anthropic.Anthropic) -> None:
    asked = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "It rains."}]},
    ]
    assert ask(client, messages=asked, tools=[WEATHER]).content


def test_mistakes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        ask(client, model="nobody")
    with pytest.raises(anthropic.BadRequestError, match="Extra inputs are not permitted"):
        ask(client, extra_body={"nobody_knows": 1})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, messages=[{"role": "user", "content": "word " * 9000}])


def test_max_tokens_may_be_more_than_the_context_holds(client: anthropic.Anthropic) -> None:
    """Claude Code asks for 32000, whatever the model is."""
    assert ask(client, max_tokens=100_000, stop_sequences=["o"]).stop_reason == "stop_sequence"
