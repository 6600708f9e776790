"""A server started as guides of other engines start theirs, and asked as they ask it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import InferenceClient
from ollama import Client
from openai import OpenAI

from clients.served import started
from quire.cli.serve import QUESTION

COMMANDS = {
    "vllm": "--model {model} --served-model-name smollm2 --tensor-parallel-size 1 --dtype bfloat16 --quantization gguf "
    "--disable-log-requests --trust-remote-code --enable-chunked-prefill --gpu-memory-utilization 0.9",
    "llama-server": "-m {model} -a smollm2 -c 2048 -np 4 -ngl 99 --jinja",
}


@pytest.fixture(scope="module", params=COMMANDS)
def address(request: pytest.FixtureRequest, default_model: Path) -> Iterator[str]:
    with started(*COMMANDS[request.param].format(model=default_model).split()) as address:
        yield address


def test_first_pages(address: str) -> None:
    question = [{"role": "user", "content": QUESTION}]
    with OpenAI(base_url=f"{address}/v1", api_key="EMPTY") as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        answer = client.chat.completions.create(model="smollm2", messages=question, max_tokens=16, seed=1)  # type: ignore[arg-type]
        assert "Paris" in (answer.choices[0].message.content or "")
        completion = client.completions.create(model="smollm2", prompt="The capital of France is", temperature=0)
        assert "Paris" in completion.choices[0].text

    with InferenceClient(base_url=address) as hugging_face:
        text = hugging_face.text_generation("The capital of France is", max_new_tokens=8)
    assert "Paris" in text

    with Client(address) as ollama:
        reply = ollama.chat("smollm2", question, options={"num_predict": 16})
    assert "Paris" in (reply.message.content or "")

    body = {"text_input": "The capital of France is", "parameters": {"temperature": "0", "max_tokens": 8}}
    assert "Paris" in httpx.post(f"{address}/v2/models/smollm2/generate", json=body).json()["text_output"]


def test_the_default_model_answers_well_by_default() -> None:
    """The line that `quire serve` prints gave nonsense while its temperature was 1."""
    with started() as address:
        question = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        for seed in range(5):
            answer = httpx.post(f"{address}/v1/chat/completions", json={**question, "seed": seed}, timeout=60).json()
            assert "Paris" in answer["choices"][0]["message"]["content"]
        [card] = httpx.get(f"{address}/v1/models").json()["data"]
        assert card["default_sampling_params"] == {"temperature": 0.2, "top_p": 0.9}
