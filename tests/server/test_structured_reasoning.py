"""Structured output over HTTP from a model that reasons: thoughts are split off, and the content is valid."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from quire.client.engine_client import EngineClient
from quire.client.one_model import OneModel
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.options import ServerOptions
from quire.text.tokenizers.tokenizer import Tokenizer
from tiny_markers import with_markers

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
BODY = {
    "messages": [{"role": "user", "content": "Where?"}],
    "thinking_token_budget": 9,
    "max_tokens": 200,
    "seed": 1,
}
CHAT = "/v1/chat/completions"

Use = Callable[[httpx.AsyncClient], Awaitable[None]]


def serve(model: Path, use: Use, config: dict[str, Any] | None = None, **options: Any) -> None:
    async def main() -> None:
        named = {"model": str(model), "served_model_name": "m", "threads": 1}
        engine_options = EngineOptions.of({**named, "structured_outputs_config": config})
        async with EngineClient(engine_options) as engine:
            app = create_app(OneModel(engine, engine.adapters), ServerOptions(**options))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as http:
                await use(http)

    asyncio.run(main())


async def message(http: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json={**BODY, **asked})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()["choices"][0]["message"]
    return result


def is_valid(text: str) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(json.loads(text))


async def streamed(http: httpx.AsyncClient, **asked: Any) -> tuple[str, str]:
    reasoning = content = ""
    async with http.stream("POST", CHAT, json={**BODY, **asked, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    reasoning += choice["delta"].get("reasoning_content") or ""
                    content += choice["delta"].get("content") or ""
    return reasoning, content


def test_thoughts_are_split_and_the_content_alone_is_valid(tiny_thinker: Path) -> None:
    async def use(http: httpx.AsyncClient) -> None:
        free = await message(http)
        held = await message(http, response_format=FORMAT)
        assert held["reasoning_content"] and is_valid(held["content"])
        assert held["reasoning_content"] == free["reasoning_content"], "nothing holds it"
        assert await streamed(http, response_format=FORMAT) == (held["reasoning_content"], held["content"])
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            called = await message(http, tools=[WEATHER], tool_choice=choice)
            assert called["reasoning_content"] and called["content"] is None
            assert is_valid(called["tool_calls"][0]["function"]["arguments"])

    serve(tiny_thinker, use)


def test_a_request_may_ask_for_the_answer_at_once(tiny_thinker: Path) -> None:
    async def use(http: httpx.AsyncClient) -> None:
        for asked in (
            {"enable_in_reasoning": True},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        ):
            held = await message(http, response_format=FORMAT, **asked)
            assert not held.get("reasoning_content") and is_valid(held["content"]), asked
        ollama = {"model": "m", "messages": BODY["messages"], "format": SCHEMA, "think": False, "stream": False}
        answer = await http.post("/api/chat", json=ollama)
        assert is_valid(answer.json()["message"]["content"]), answer.text

    serve(tiny_thinker, use)


@pytest.mark.parametrize("is_parsed", [True, False])
def test_a_server_may_hold_answers_from_the_first_token(tiny_thinker: Path, is_parsed: bool) -> None:
    """By its config, or because nothing there reads reasoning."""

    async def use(http: httpx.AsyncClient) -> None:
        held = await message(http, response_format=FORMAT)
        assert not held.get("reasoning_content") and is_valid(held["content"])
        if is_parsed:
            free = await message(http, response_format=FORMAT, enable_in_reasoning=False)
            assert free["reasoning_content"] and is_valid(free["content"])

    config = {"enable_in_reasoning": True} if is_parsed else None
    serve(tiny_thinker, use, config, reasoning_parser="auto" if is_parsed else "none")


def test_harmony_is_free_until_the_final_channel(tiny_model: Path, tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | length }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant"
        "{# <|channel|>final<|message|> #}"
    )
    markers = {"<|channel|>": True, "<|message|>": True, "final": False}
    model = with_markers(tiny_model, tmp_path / "model", template, markers)
    channel, message_id = (Tokenizer.load(model).id_of(marker) for marker in ("<|channel|>", "<|message|>"))

    async def use(http: httpx.AsyncClient) -> None:
        begins = {str(channel): 100.0}  # a header that the budget completes with the channel and its message
        answer = await message(http, response_format=FORMAT, logit_bias=begins)
        assert is_valid(answer["content"])
        at_once = await message(http, response_format=FORMAT, enable_in_reasoning=True, logit_bias=begins)
        assert is_valid(at_once["content"])
        forced = await message(http, tools=[WEATHER], tool_choice="required", logit_bias=begins)
        assert is_valid(forced["tool_calls"][0]["function"]["arguments"])
        asked = {**BODY, "response_format": FORMAT, "logit_bias": begins, "return_token_ids": True}
        tokens = (await http.post(CHAT, json=asked)).json()["choices"][0]["token_ids"]
        assert tokens[:10] == [channel] * 10 and tokens[11] == message_id, "the first one is not counted"

    serve(model, use)
