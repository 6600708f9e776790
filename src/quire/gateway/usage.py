"""How many tokens a response took, read from what workers of all dialects say in it."""

import msgspec

MARKS = (b'"usage"', b'"eval_count"', b'"tokens_predicted"', b'"generated_tokens"')  # a body without any says nothing


class TokenUsage(msgspec.Struct):
    prompt: int = 0
    cached: int = 0
    output: int = 0

    def merge(self, other: "TokenUsage") -> None:
        """Counts in a stream only grow: the largest of each holds."""
        self.prompt = max(self.prompt, other.prompt)
        self.cached = max(self.cached, other.cached)
        self.output = max(self.output, other.output)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """OpenAI's two kinds, and Anthropic's, whose `input_tokens` are those that were not cached."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


class _Details(msgspec.Struct):
    generated_tokens: int | None = None
    prefill: list[msgspec.Raw] | None = None


class _Nested(msgspec.Struct):
    message: _WithUsage | None = None
    response: _WithUsage | None = None


class _Flat(msgspec.Struct):
    usage: _Usage | None = None
    details: _Details | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None


_flat = msgspec.json.Decoder(_Flat)
_nested = msgspec.json.Decoder(_Nested)


def read_usage(body: bytes) -> TokenUsage | None:
    """The usage in a whole response, or in one event of a stream; None if it has none."""
    if not any(mark in body for mark in MARKS):
        return None
    try:
        flat = _flat.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    usage = flat.usage
    if usage is None:
        try:
            nested = _nested.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            nested = _Nested()
        inner = nested.message or nested.response
        usage = inner.usage if inner else None
    if usage is not None:
        return _of(usage)
    details = flat.details or _Details()
    prompt = flat.prompt_eval_count or flat.tokens_evaluated or len(details.prefill or ())
    output = flat.eval_count or flat.tokens_predicted or details.generated_tokens or 0
    return TokenUsage(max(prompt, 0), 0, max(output, 0)) if prompt or output else None


def _of(usage: _Usage) -> TokenUsage:
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Cached()
    cached = details.cached_tokens or usage.cache_read_input_tokens or 0
    prompt = usage.prompt_tokens or (usage.input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    output = usage.completion_tokens or usage.output_tokens or 0
    return TokenUsage(max(prompt, 0), max(min(cached, prompt), 0), max(output, 0))
