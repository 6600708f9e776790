"""Hugging Face's InferenceClient, as its users have it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from clients.served import SECONDS, served

SEA = "The sea is"


@pytest.fixture(scope="module")
def client(default_model: Path) -> Iterator[InferenceClient]:
    with InferenceClient(base_url=served(), timeout=SECONDS) as client:
        yield client


def test_text_generation(client: InferenceClient) -> None:
    greedy = client.text_generation(SEA, max_new_tokens=8)
    assert greedy and greedy == client.text_generation(SEA, max_new_tokens=8)
    assert client.text_generation(SEA, max_new_tokens=8, return_full_text=True) == SEA + greedy
    drawn = [client.text_generation(SEA, max_new_tokens=8, do_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_details(client: InferenceClient) -> None:
    output = client.text_generation(
        SEA, max_new_tokens=6, details=True, decoder_input_details=True, top_n_tokens=3, temperature=0.7, seed=3
    )
    details = output.details
    assert details is not None
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 6, 3)
    assert "".join(token.text for token in details.tokens) == output.generated_text
    assert details.prefill[0].logprob is None and all(token.logprob <= 0 for token in details.prefill[1:])
    assert details.top_tokens is not None and [len(top) for top in details.top_tokens] == [3] * 6
    for token, top in zip(details.tokens, details.top_tokens, strict=True):
        assert max(each["logprob"] for each in top) >= token.logprob  # type: ignore[index]


def test_best_of(client: InferenceClient) -> None:
    output = client.text_generation(SEA, max_new_tokens=6, best_of=2, do_sample=True, details=True)
    assert output.details is not None and output.details.best_of_sequences is not None
    [other] = output.details.best_of_sequences
    assert other.generated_tokens == 6

    def mean(tokens: list) -> float:  # type: ignore[type-arg]
        return sum(token.logprob for token in tokens) / len(tokens)

    assert mean(output.details.tokens) >= mean(other.tokens)


def test_streams(client: InferenceClient) -> None:
    whole = client.text_generation(SEA, max_new_tokens=12)
    assert "".join(client.text_generation(SEA, max_new_tokens=12, stream=True)) == whole
    *_, last = client.text_generation(SEA, max_new_tokens=12, stream=True, details=True)
    assert last.generated_text == whole and last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 12)


def test_stop_sequences(client: InferenceClient) -> None:
    whole = client.text_generation(SEA, max_new_tokens=12)
    stop = whole[10:14]
    output = client.text_generation(SEA, max_new_tokens=12, stop=[stop], details=True)
    assert output.generated_text == whole[: whole.index(stop) + len(stop)]
    assert output.details is not None and output.details.finish_reason == "stop_sequence"


def test_mistakes(client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        client.text_generation(SEA, temperature=-1.0)
    with pytest.raises(ValidationError, match="100000"):
        client.text_generation(SEA, max_new_tokens=100_000)


def test_chat_completion(client: InferenceClient) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    whole = client.chat_completion(messages, max_tokens=8, temperature=0.0)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 8
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    held = client.chat_completion(messages, max_tokens=60, temperature=0.0, response_format=form)
    assert isinstance(json.loads(held.choices[0].message.content)["yes"], bool)
    parts = client.chat_completion(messages, max_tokens=8, temperature=0.0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
