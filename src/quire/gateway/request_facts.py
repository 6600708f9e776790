"""What the gateway reads of a body: the model, whether it streams, how large it is. All else stays bytes."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from quire.core.errors import BadRequest
from quire.gateway.routes import path_model
from quire.gateway.usage import TokenUsage
from quire.server.http.json_size import check_json_size

BYTES_PER_TOKEN = 4  # of English text; tokens of a prompt are estimated before a worker has counted them
DEFAULT_OUTPUT_TOKENS = 256  # that a request without a limit is expected to take
PROMPT_FIELDS = ("messages", "prompt", "input", "inputs", "text_input", "documents", "system", "content", "query")
LIMIT_FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "num_predict",
    "n_predict",
)
SCHEMA_FIELDS = ("response_format", "structured_outputs", "guided_json", "format")
MAX_PRIORITY = 1000
MAX_COUNT = 1 << 24  # tokens or completions: more is as much, to a gateway; the worker refuses it
MAX_MODEL_NAME = 512  # characters

_items = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class RequestFacts:
    model: str | None = None
    stream: bool = False
    has_tools: bool = False
    has_schema: bool = False
    n: int = 1  # completions of all prompts
    max_tokens: int | None = None
    user: str = ""
    cache_salt: str = ""
    previous: str = ""  # the stored response that it goes on from
    priority: int = 0  # what it asks for: lower is served earlier
    prompt: bytes = b""  # as JSON
    fields: dict[str, Any] = field(default_factory=dict)  # name -> JSON

    @property
    def prompt_tokens(self) -> int:
        """Estimated."""
        return len(self.prompt) // BYTES_PER_TOKEN + 1

    @property
    def output_tokens(self) -> int:
        """Expected, of all completions."""
        return self.n * (DEFAULT_OUTPUT_TOKENS if self.max_tokens is None else self.max_tokens)

    def at_most(self, context: int, num_body_bytes: int) -> TokenUsage:
        """What it can take of a model with such a context. A token has a byte at least; what was stored is not seen."""
        prompt = num_body_bytes + (context if self.previous else 0)
        return TokenUsage(prompt, 0, self.n * (context if self.max_tokens is None else self.max_tokens))


def read_facts(path: str, body: bytes) -> RequestFacts:
    """Raises BadRequest for a body that is no JSON object. Fields of a wrong type are for the worker to refuse."""
    check_json_size(body)
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error}", "send JSON") from None
    model = (
        unquote(path_model(path) or "")
        or _text(fields, "model")
        or (_text(fields, "name") if path == "/api/show" else None)
    )
    if model is not None and len(model) > MAX_MODEL_NAME:
        raise BadRequest(f"the model's name has {len(model)} characters", f"at most {MAX_MODEL_NAME}", param="model")
    if doubled := [name for name in fields if name != "model" and name.casefold() == "model"]:
        # Go's servers take it for `model`, so a key could name two models.
        raise BadRequest(f"the field `{doubled[0]}` is not `model`, and some workers take it for that", param="model")
    places = (fields, _nested(fields, "options"), _nested(fields, "parameters"))  # of Ollama; of TGI and KServe
    limits = [_count(where, name) for where in places for name in LIMIT_FIELDS if name in where]
    return RequestFacts(
        model=model,
        stream=_streams(path, fields),
        has_tools=_given(fields, "tools"),
        has_schema=any(_given(fields, name) for name in SCHEMA_FIELDS if name in fields),
        n=max(_count(fields, "n") or 1, _count(fields, "best_of") or 1) * _num_prompts(fields),
        max_tokens=max((limit for limit in limits if limit is not None), default=None),  # which counts, a worker knows
        user=_text(fields, "user") or "",
        cache_salt=_text(fields, "cache_salt") or "",
        previous=_text(fields, "previous_response_id") or "",
        priority=min(_count(fields, "priority") or 0, MAX_PRIORITY),
        prompt=b"".join(bytes(fields[name]) for name in PROMPT_FIELDS if name in fields),
        fields=fields,
    )


def with_fields(facts: RequestFacts, changes: dict[str, Any]) -> bytes:
    """The body with some fields changed or added."""
    return msgspec.json.encode({**facts.fields, **changes})


def _streams(path: str, fields: dict[str, Any]) -> bool:
    if path.endswith("/generate_stream"):
        return True
    if path in ("/api/chat", "/api/generate"):  # Ollama's stream unless told otherwise
        return bytes(fields.get("stream", b"true")).strip() != b"false"
    return bytes(fields.get("stream", b"")).strip() == b"true"


def _num_prompts(fields: dict[str, Any]) -> int:
    """A list of texts, or of lists of token ids, is several prompts."""
    raw = bytes(fields.get("prompt", b""))
    if raw[:1] != b"[" or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    try:
        return min(len(_items.decode(raw)), MAX_COUNT)
    except (msgspec.MsgspecError, RecursionError):
        raise _unreadable("prompt") from None


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = _value(fields, name)
    return value if isinstance(value, str) and value else None


def _count(fields: dict[str, Any], name: str) -> int | None:
    value = _value(fields, name)
    return min(value, MAX_COUNT) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _nested(fields: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        return _fields.decode(fields[name]) if name in fields else {}
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _value(fields: dict[str, Any], name: str) -> Any:
    """A scalar; None where there is none. Raises BadRequest for one that cannot be read."""
    if name not in fields:
        return None
    raw = bytes(fields[name])
    if raw[:1] in (b"{", b"["):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # a number beyond 64 bits, half a surrogate pair
        raise _unreadable(name) from None


def _unreadable(name: str) -> BadRequest:
    return BadRequest(
        f"the field `{name}` cannot be read", "numbers have up to 64 bits, and text is Unicode", param=name
    )


def _given(fields: dict[str, Any], name: str) -> bool:
    return name in fields and bytes(fields[name]).strip() not in (b"null", b"[]", b'""', b"{}")
