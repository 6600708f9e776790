"""Which paths pass through the gateway, and what each is: a call of a model, or a question that any worker answers."""

import re
from enum import Enum


class RouteKind(Enum):
    GENERATE = "generate"  # output tokens: admitted, metered, routed by model
    ENCODE = "encode"  # embeddings and scores: the same, without output tokens
    TOKENS = "tokens"  # tokenizers and templates of a model: routed by model, not metered
    STORED = "stored"  # a stored response: goes to the worker that has it
    ANY = "any"  # a question that any worker answers


# fmt: off
GENERATE_PATHS = [
    "/v1/chat/completions", "/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/invocations", "/generate", "/generate_stream", "/", "/api/chat",
    "/api/generate", "/completion", "/infill",
]
ENCODE_PATHS = [
    "/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking",
    "/reranking", "/v1/score", "/score", "/api/embed", "/api/embeddings",
    "/embedding", "/pooling",
]
TOKENS_PATHS = [
    "/tokenize", "/detokenize", "/chat_tokenize", "/apply-template", "/api/show",
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/tokenize", "/v1/detokenize",
]
ANY_PATHS = [
    "/info", "/props", "/tokenizer_info", "/api/version", "/api/ps",
    "/v2", "/v2/health/live", "/v2/health/ready", "/get_model_info", "/model_info",
    "/get_server_info", "/server_info", "/health_generate",
]
# fmt: on

_POSTED = (
    dict.fromkeys(GENERATE_PATHS, RouteKind.GENERATE)
    | dict.fromkeys(ENCODE_PATHS, RouteKind.ENCODE)
    | dict.fromkeys(TOKENS_PATHS, RouteKind.TOKENS)
)
_KSERVE = re.compile(r"/v2/models/(?P<model>.+?)(?:/versions/1)?/(?P<verb>generate|generate_stream|infer)")
_STORED = re.compile(r"/v1/responses/(?P<id>[\x21-\x7e]{1,128}?)(?:/cancel|/input_items)?")

# Bodies of these paths have OpenAI's fields: `stream_options` and `cache_salt` may be added to them.
OPENAI_STREAMS = frozenset({"/v1/chat/completions", "/chat/completions", "/v1/completions"})
SALTED = OPENAI_STREAMS | {"/v1/responses"}


def route_kind(method: str, path: str) -> RouteKind | None:
    """None: the gateway does not pass it on. Paths that change a worker (adapters, pulls, caches, sleep)
    are never passed."""
    if method == "POST" and (kind := _POSTED.get(path)) is not None:
        return kind
    if method == "POST" and _KSERVE.fullmatch(path):
        return RouteKind.GENERATE
    if stored_id(path) and (method in ("GET", "DELETE") or (method == "POST" and path.endswith("/cancel"))):
        return RouteKind.STORED
    if method == "OPTIONS":  # of a browser, before a request of a page from elsewhere: the worker says who may
        return RouteKind.ANY if path in _POSTED or path in ANY_PATHS or stored_id(path) or path_model(path) else None
    return RouteKind.ANY if method == "GET" and path in ANY_PATHS else None


def path_model(path: str) -> str | None:
    """The model that a path names."""
    match = _KSERVE.fullmatch(path) if path.startswith("/v2/") else None
    return match["model"] if match else None


def stored_id(path: str) -> str | None:
    match = _STORED.fullmatch(path) if path.startswith("/v1/responses/") else None
    return match["id"] if match and path != "/v1/responses/input_tokens" else None


def route_label(path: str) -> str:
    """For metrics: clients cannot make up values."""
    if path in _POSTED or path in ANY_PATHS:
        return path
    return "/v2/models/{model}" if path_model(path) else "/v1/responses/{id}" if stored_id(path) else "other"
