"""OpenAI's own package, as its users have it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from clients.served import SECONDS, served

MODEL = "smollm2"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
ENDS: Any = [{"role": "user", "content": "What is 2+2? Say the number only."}]  # an answer that ends by itself
SHORT: Any = {"model": MODEL, "temperature": 0}

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome for the next 3 days?"}]


class Mood(BaseModel):
    happy: bool
    reason: str | None


@pytest.fixture(scope="module")
def client(default_model: Path) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served()}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield client


def test_chat_and_stream_and_async(client: openai.OpenAI) -> None:
    full = client.chat.completions.create(**SHORT, messages=HELLO, max_tokens=12)
    text = full.choices[0].message.content
    assert text and full.usage and full.usage.completion_tokens <= 12
    parts = client.chat.completions.create(**SHORT, messages=HELLO, max_tokens=12, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    with client.chat.completions.stream(**SHORT, messages=ENDS) as stream:
        told = "".join(event.delta for event in stream if event.type == "content.delta")
        assert told == stream.get_final_completion().choices[0].message.content

    async def several() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as several:
            asked = [several.chat.completions.create(**SHORT, messages=HELLO, max_tokens=12) for _ in range(4)]
            return [each.choices[0].message.content for each in await asyncio.gather(*asked)]

    assert asyncio.run(several()) == [text] * 4


def test_a_required_call(client: openai.OpenAI) -> None:
    asked = {**SHORT, "messages": ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        given = json.loads(call.function.arguments)
        assert call.function.name == "weather" and given["city"] in ("Rome", "Oslo") and 1 <= given["days"] <= 9
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed and [call.function.arguments for call in streamed] == [
        call.function.arguments for call in choice.message.tool_calls
    ]


def test_a_named_call_and_its_result(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    message = (
        client.chat.completions.create(**SHORT, messages=ASK, tools=[WEATHER], tool_choice=named, max_tokens=60)
        .choices[0]
        .message
    )
    [call] = message.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "It will rain."}
    after = client.chat.completions.create(
        **SHORT, messages=[*ASK, message, result], tools=[WEATHER], tool_choice="none", max_tokens=24
    )
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls


def test_parse_gives_an_instance(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "How do you feel today? Answer in JSON."}]
    parsed = client.chat.completions.parse(
        **SHORT, messages=asked, response_format=Mood, max_tokens=100, frequency_penalty=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Mood)
    response = client.responses.parse(
        **SHORT, input=asked, text_format=Mood, max_output_tokens=100, extra_body={"frequency_penalty": 1}
    )
    assert isinstance(response.output_parsed, Mood)


@pytest.mark.parametrize(
    ("extra", "holds"),
    [
        ({"guided_choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
    ],
)
def test_vllms_ways_to_hold_an_answer_to_a_language(client: openai.OpenAI, extra: Any, holds: Any) -> None:
    for create, asked in (
        (client.chat.completions.create, {"messages": HELLO}),
        (client.completions.create, {"prompt": "Q:"}),
    ):
        choice = create(**SHORT, **asked, max_tokens=16, extra_body=extra).choices[0]
        assert holds(choice.message.content if hasattr(choice, "message") else choice.text)


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(**SHORT, input="My name is Ada. Say hello.", max_output_tokens=12)
    assert first.output_text and first.usage and first.usage.input_tokens > 12
    then = client.responses.create(
        **SHORT, input="What is my name?", previous_response_id=first.id, max_output_tokens=12
    )
    assert then.usage and then.usage.input_tokens > first.usage.total_tokens, "it follows the whole conversation"
    with client.responses.stream(**SHORT, input="My name is Ada. Say hello.", max_output_tokens=12) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert told == first.output_text
    begun = client.responses.create(
        **SHORT, input="On and on", background=True, max_output_tokens=4000, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_completions(client: openai.OpenAI) -> None:
    prompts = ["The sea is", "One, two, three,"]
    full = client.completions.create(**SHORT, prompt=prompts, max_tokens=6, echo=True, logprobs=2)
    assert [choice.text.startswith(prompt) for choice, prompt in zip(full.choices, prompts, strict=True)] == [True] * 2
    for choice in full.choices:
        assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.token_logprobs[0] is None
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(**SHORT, prompt="def f(", suffix="return x")
    drawn: dict[str, Any] = {"model": MODEL, "prompt": "The", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    best = client.completions.create(**drawn, temperature=1, n=2, best_of=5)
    assert len(best.choices) == 2 and best.usage is not None and best.usage.completion_tokens == 20
