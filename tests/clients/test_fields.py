"""Every field that a client's own types have is known here: it is taken, or refused by its name. One that a new version
of a client brings fails here first."""

import dataclasses
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from huggingface_hub import ChatCompletionInput, TextGenerationInput, TextGenerationInputGenerateParameters
from ollama._types import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from quire.server.dialects.anthropic.fields import MessagesBody, PromptBody
from quire.server.dialects.ollama import call as ollama
from quire.server.dialects.ollama.embed import EmbedBody, OldEmbedBody
from quire.server.dialects.openai.chat import ChatBody
from quire.server.dialects.openai.completions import CompletionBody
from quire.server.dialects.openai.responses.body import ResponseBody
from quire.server.dialects.tgi import fields as tgi
from quire.server.routes.embeddings import EmbeddingsBody
from server.running import Running, running

HELLO = [{"role": "user", "content": "Hello"}]
ANTHROPIC = {"model": "fake", "messages": HELLO}


HEADERS = {"betas", "user_profile_id", "workspace_id"}  # what Anthropic's client does not send in the body


def of_typed(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in get_type_hints(kind)} - HEADERS


def of_dataclass(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


# path -> what reads it, the least that is served there, the fields of the client's types
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any], set[str]]] = {
    "/v1/chat/completions": (
        ChatBody,
        {"messages": HELLO},
        of_typed(
            chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming
        )
        | of_dataclass(ChatCompletionInput),
    ),
    "/v1/completions": (
        CompletionBody,
        {"prompt": "Hello"},
        of_typed(completion_create_params.CompletionCreateParamsStreaming),
    ),
    "/v1/responses": (
        ResponseBody,
        {"input": "Hello"},
        of_typed(response_create_params.ResponseCreateParamsStreaming),
    ),
    "/v1/embeddings": (EmbeddingsBody, {"input": "Hello"}, of_typed(embedding_create_params.EmbeddingCreateParams)),
    "/v1/messages": (
        MessagesBody,
        {**ANTHROPIC, "max_tokens": 4},
        of_typed(message_create_params.MessageCreateParamsStreaming, beta_create_params.MessageCreateParamsStreaming),
    ),
    "/v1/messages/count_tokens": (
        PromptBody,
        ANTHROPIC,
        of_typed(message_count_tokens_params.MessageCountTokensParams),
    ),
    "/api/generate": (
        ollama.OllamaGenerateBody,
        {"model": "fake", "prompt": "Hello"},
        set(GenerateRequest.model_fields),
    ),
    "/api/chat": (ollama.OllamaChatBody, {"model": "fake", "messages": HELLO}, set(ChatRequest.model_fields)),
    "/api/embed": (EmbedBody, {"model": "fake", "input": "Hello"}, set(EmbedRequest.model_fields)),
    "/api/embeddings": (OldEmbedBody, {"model": "fake", "prompt": "Hello"}, set(EmbeddingsRequest.model_fields)),
    "/generate": (tgi.TgiGenerateBody, {"inputs": "Hello"}, of_dataclass(TextGenerationInput)),
}


@pytest.fixture(scope="module")
def server() -> Any:
    with running() as server:
        yield server


@pytest.mark.parametrize("path", ROUTES)
def test_the_fields_of_clients(server: Running, path: str) -> None:
    body, least, fields = ROUTES[path]
    assert server.http.post(path, json={**least, "stream": False} if "stream" in fields else least).status_code == 200
    assert fields <= set(body.__struct_fields__), f"{path} does not know {fields - set(body.__struct_fields__)}"
    for field in sorted(fields):
        answer = server.http.post(path, json={**least, field: {"odd": ["value"]}})
        assert answer.status_code in (200, 400, 404, 422), answer.text
        if answer.status_code != 200:
            assert field in answer.text and f"unknown field `{field}`" not in answer.text, answer.text


def test_the_parameters_of_text_generation() -> None:
    asked = of_dataclass(TextGenerationInputGenerateParameters)
    assert asked <= set(tgi.TgiParameters.__struct_fields__)


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/v1/chat/completions", True),
        ("/v1/completions", True),
        ("/v1/responses", True),
        ("/v1/embeddings", True),
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/api/generate", False),
        ("/api/chat", False),
        ("/api/embed", False),
        ("/generate", False),
    ],
)
def test_unknown_fields_fare_as_they_do_at_the_original(server: Running, path: str, refused: bool) -> None:
    answer: httpx.Response = server.http.post(path, json={**ROUTES[path][1], "nobody_knows": 1})
    assert answer.status_code == (400 if refused else 200)
    assert not refused or "nobody_knows" in answer.text
