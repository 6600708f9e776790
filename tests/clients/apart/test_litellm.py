"""LiteLLM, by each of the names it has for a server like this one."""

import asyncio
import json
from typing import Any

import litellm
import pytest

from clients.served import SECONDS

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", autouse=True)
def by_itself() -> None:
    litellm.telemetry = False
    litellm.suppress_debug_info = True


def where(address: str, provider: str) -> dict[str, Any]:
    """Providers that speak OpenAI's API are told its version too."""
    base = address if provider in ("ollama_chat", "anthropic") else f"{address}/v1"
    known = {"model": f"{provider}/smollm2", "api_base": base, "api_key": "none", "num_retries": 0}
    return {**known, "timeout": SECONDS, "temperature": 0, "max_tokens": 12}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama_chat", "anthropic"])
def test_completion_and_stream(address: str, provider: str) -> None:
    asked = where(address, provider)
    answer = litellm.completion(messages=HELLO, **asked)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens <= 12 and answer.usage.prompt_tokens > 0
    parts = list(litellm.completion(messages=HELLO, stream=True, **asked))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_others_at_the_same_time(address: str) -> None:
    async def several() -> list[str]:
        asked = [litellm.acompletion(messages=HELLO, **where(address, "openai")) for _ in range(3)]
        return [each.choices[0].message.content for each in await asyncio.gather(*asked)]

    assert len(set(asyncio.run(several()))) == 1


def test_text_completion(address: str) -> None:
    asked = where(address, "text-completion-openai")
    answer = litellm.text_completion(prompt="The sea is", logprobs=1, **asked)
    assert answer.choices[0].text and len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens


def test_responses(address: str) -> None:
    asked = where(address, "openai")
    asked["max_output_tokens"] = asked.pop("max_tokens") + 4  # it asks for no less than 16
    response = litellm.responses(input="Say hello.", **asked)
    assert response.output_text and response.usage.output_tokens <= 16
    events = list(litellm.responses(input="Say hello.", stream=True, **asked))
    assert events[0].type == "response.created"
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )
    after = litellm.responses(input="Again.", previous_response_id=response.id, **asked)
    assert after.usage.input_tokens > response.usage.input_tokens


def test_tools_and_schemas(address: str) -> None:
    asked = {**where(address, "openai"), "max_tokens": 60}
    named = {"type": "function", "function": {"name": "weather"}}
    called = litellm.completion(messages=HELLO, tools=[WEATHER], tool_choice=named, **asked).choices[0].message
    assert json.loads(called.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER["function"]["parameters"]}}
    told = litellm.completion(messages=HELLO, response_format=form, **asked).choices[0].message.content
    assert json.loads(told)["city"] in ("Rome", "Oslo")


def test_mistakes_are_told_as_what_they_are(address: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, **{**where(address, "openai"), "temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=HELLO, **{**where(address, "openai"), "max_tokens": 100_000})
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(messages=HELLO, **{**where(address, "openai"), "model": "openai/nobody"})
