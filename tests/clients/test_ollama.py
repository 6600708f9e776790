"""Ollama's client, as its users have it."""

from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from clients.served import SECONDS, served

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def client(default_model: Path) -> Iterator[ollama.Client]:
    with ollama.Client(served(), timeout=SECONDS) as client:
        yield client


def options(**more: object) -> dict[str, object]:
    return {"num_predict": 12, "temperature": 0, **more}


def test_chat(client: ollama.Client) -> None:
    reply = client.chat(MODEL, HELLO, options=options())
    assert reply.message.role == "assistant" and reply.message.content
    assert reply.done and reply.done_reason in ("stop", "length")
    assert reply.eval_count and reply.prompt_eval_count and reply.total_duration
    assert 0 < (reply.eval_duration or 0) <= reply.total_duration
    parts = list(client.chat(MODEL, HELLO, options=options(), stream=True))
    assert "".join(part.message.content or "" for part in parts) == reply.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate(client: ollama.Client) -> None:
    reply = client.generate(MODEL, "Say hello.", options=options())
    assert reply.response == client.chat(MODEL, HELLO, options=options()).message.content
    raw = client.generate(MODEL, "The sea is", raw=True, options=options(), stream=True)
    assert "".join(part.response or "" for part in raw).strip()
    drawn = [client.generate(MODEL, "A tale:", options=options(temperature=1, seed=s)).response for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_logprobs(client: ollama.Client) -> None:
    reply = client.chat(MODEL, HELLO, options=options(num_predict=3), logprobs=True, top_logprobs=2)
    assert reply.logprobs is not None and len(reply.logprobs) == 3
    assert reply.logprobs[0].top_logprobs is not None and len(reply.logprobs[0].top_logprobs) == 2


def test_tools(client: ollama.Client) -> None:
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name
        """
        return city

    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    asked = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "It rains in Rome."},
    ]
    assert client.chat(MODEL, asked, tools=[weather], options=options()).message.content


def test_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"] and shown.template
    details = client.list().models[0].details
    assert (details.format, details.family, details.quantization_level) == ("gguf", "llama", "Q4_1")
    assert details.parameter_size == "134.52M" and shown.modelinfo["llama.context_length"] == 8192
    assert [progress.status for progress in client.pull(MODEL, stream=True)][-1] == "success"
    assert client.pull(MODEL).status == "success"


def test_mistakes(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("nobody", HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="suffix"):
        client.generate(MODEL, "x", suffix="y")
    with pytest.raises(ollama.ResponseError, match="--allow-pull"):
        list(client.pull("nobody", stream=True))
