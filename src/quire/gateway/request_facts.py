"""What the gateway reads of a body: the model, whether it streams, how large it is. All else stays bytes."""

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
SGLANG_PROMPTS = ("text", "input_ids")  # of its /generate
ADAPTER_PATHS = ("/generate", "/generate_stream", "/")  # of SGLang and TGI, whose bodies name an adapter apart
NESTED_FIELDS = ("options", "parameters", "sampling_params")  # of Ollama; of TGI and KServe; of SGLang: limits in them
RARE_SCALARS = ("n", "best_of", "priority", "user", "cache_salt", "previous_response_id")
RARE_FIELDS = frozenset({"tools", *SCHEMA_FIELDS, *RARE_SCALARS})
SCALARS = frozenset({"model", *LIMIT_FIELDS, *RARE_SCALARS})
MAX_PRIORITY = 1000
MAX_COUNT = 1 << 24  # tokens or completions: more is as much, to a gateway; the worker refuses it
MAX_MODEL_NAME = 512  # characters

_items = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_listed = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class RequestFacts(msgspec.Struct):
    model: str | None = None  # or an adapter of one
    model_field: str = "model"  # where it stands, unless the path names it
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
    fields: dict[str, Any] = {}  # name -> JSON

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
    values = {name: _value(name, raw) for name, raw in fields.items() if name in SCALARS}
    named = path_model(path)
    model, model_field = (unquote(named), "model") if named else _model(path, fields, values)
    if model is not None and len(model) > MAX_MODEL_NAME:
        raise BadRequest(f"the model's name has {len(model)} characters", f"at most {MAX_MODEL_NAME}", param="model")
    if doubled := [name for name in fields if name.casefold() == "model" and name != "model"]:
        # Go's servers take it for `model`, so a key could name two models.
        raise BadRequest(f"the field `{doubled[0]}` is not `model`, and some workers take it for that", param="model")
    streams = _streams(path, fields)
    facts = RequestFacts(model, model_field, streams, max_tokens=_max_tokens(fields, values), fields=fields)
    facts.prompt = b"".join([fields[name] for name in PROMPT_FIELDS if name in fields])
    if "prompt" in fields:
        facts.n = _num_prompts(fields["prompt"])
    if path == "/generate":
        _read_sglang(facts, fields)
    if not fields.keys().isdisjoint(RARE_FIELDS):
        _read_rare(facts, fields, values)
    return facts


def _model(path: str, fields: dict[str, Any], values: dict[str, Any]) -> tuple[str | None, str]:
    """The model that a body names, or the adapter, which counts where both are named; and the field it stands in."""
    if path in ADAPTER_PATHS and (adapter := _adapter(fields)) is not None:
        return adapter
    if "model" not in fields and "name" in fields and path == "/api/show":
        return _text({"name": _value("name", fields["name"])}, "name"), "name"
    return _text(values, "model"), "model"


def _adapter(fields: dict[str, Any]) -> tuple[str, str] | None:
    """The adapter of a body, in SGLang's words or in those of TGI, and the field it stands in."""
    given = {"lora_path": fields["lora_path"]} if "lora_path" in fields else {}
    for nested in _nested(fields["parameters"]) if "parameters" in fields else []:
        given |= {"parameters": nested["adapter_id"]} if "adapter_id" in nested else {}
    named = [(name, field) for field, raw in given.items() for name in _names(field, raw)]
    if len({name for name, _ in named}) > 1:  # a key may be allowed one of them
        raise BadRequest("the body names several adapters", "send a request for each", param="lora_path")
    return next(((name, field) for name, field in named if name), None)


def _names(field: str, raw: msgspec.Raw) -> list[str]:
    """The adapter of all prompts, or of each; "": the base model."""
    values = [_value(field, each) for each in (_items.decode(raw) if bytes(raw)[:1] == b"[" else [raw])]
    return [value if isinstance(value, str) else "" for value in values]


def _read_sglang(facts: RequestFacts, fields: dict[str, Any]) -> None:
    prompts = [fields[name] for name in SGLANG_PROMPTS if name in fields]
    facts.prompt += b"".join(prompts)
    facts.n *= max(map(_num_prompts, prompts), default=1)
    if "sampling_params" in fields:
        params = _nested(fields["sampling_params"])
        facts.n *= max([_count({"n": _value("n", each["n"])}, "n") or 1 for each in params if "n" in each], default=1)


def _max_tokens(fields: dict[str, Any], values: dict[str, Any]) -> int | None:
    """The largest of its limits: which of them counts, a worker knows."""
    limits = [_count(values, name) for name in LIMIT_FIELDS if name in values]
    for nested in [each for name in NESTED_FIELDS if name in fields for each in _nested(fields[name])]:
        inner = {name: _value(name, nested[name]) for name in LIMIT_FIELDS if name in nested}
        limits += [_count(inner, name) for name in inner]
    return max([limit for limit in limits if limit is not None], default=None)


def _read_rare(facts: RequestFacts, fields: dict[str, Any], values: dict[str, Any]) -> None:
    """Read the fields that most requests do not have."""
    facts.has_tools = "tools" in fields and _is_given(fields["tools"])
    facts.has_schema = any(_is_given(fields[name]) for name in SCHEMA_FIELDS if name in fields)
    facts.n *= max(_count(values, "n") or 1, _count(values, "best_of") or 1)
    facts.user = _text(values, "user") or ""
    facts.cache_salt = _text(values, "cache_salt") or ""
    facts.previous = _text(values, "previous_response_id") or ""
    facts.priority = min(_count(values, "priority") or 0, MAX_PRIORITY)


def renamed(facts: RequestFacts, model: str) -> dict[str, Any]:
    """The change of the body that names another model."""
    if facts.model_field == "parameters":
        [parameters] = _nested(facts.fields["parameters"])
        return {"parameters": {**parameters, "adapter_id": model}}
    return {facts.model_field: model}


def with_fields(facts: RequestFacts, changes: dict[str, Any]) -> bytes:
    """The body with some fields changed or added."""
    return msgspec.json.encode({**facts.fields, **changes})


def _streams(path: str, fields: dict[str, Any]) -> bool:
    if path.endswith("/generate_stream"):
        return True
    if path in ("/api/chat", "/api/generate"):  # Ollama's stream unless told otherwise
        return bytes(fields.get("stream", b"true")).strip() != b"false"
    return "stream" in fields and bytes(fields["stream"]).strip() == b"true"


def _num_prompts(prompt: msgspec.Raw) -> int:
    """A list of texts, or of lists of token ids, is several prompts."""
    raw = bytes(prompt)
    if raw[:1] != b"[" or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    try:
        return min(len(_items.decode(raw)), MAX_COUNT)
    except (msgspec.MsgspecError, RecursionError):
        raise _unreadable("prompt") from None


def _text(values: dict[str, Any], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) and value else None


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return min(value, MAX_COUNT) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _nested(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """The fields of an object, or of each in a list of them."""
    try:
        return _listed.decode(raw) if bytes(raw)[:1] == b"[" else [_fields.decode(raw)]
    except (msgspec.MsgspecError, RecursionError):
        return []


def _value(name: str, raw: msgspec.Raw) -> Any:
    """A scalar; None where it is none. Raises BadRequest for one that cannot be read."""
    try:
        return None if bytes(raw)[:1] in (b"{", b"[") else msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # a number beyond 64 bits, half a surrogate pair
        raise _unreadable(name) from None


def _unreadable(name: str) -> BadRequest:
    return BadRequest(
        f"the field `{name}` cannot be read", "numbers have up to 64 bits, and text is Unicode", param=name
    )


def _is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw).strip() not in (b"null", b"[]", b'""', b"{}")
