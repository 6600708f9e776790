"""Every option of the server, once. The flags and environment variables of `quire serve` come from here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import BadRequest
from quire.core.watermark import DEFAULT_DELTA, DEFAULT_GAMMA, DEFAULT_KEY, Watermark
from quire.engine.option import check_bounds, named_values, option
from quire.text.reasoning import NAMES as REASONING_PARSERS
from quire.text.tools.formats import NAMES as TOOL_PARSERS

# Variables of a chat template that the server sets, or that have a field of their own.
TEMPLATE_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """cli/flags.py lists the keys of a field's metadata."""

    host: str = option(
        "127.0.0.1",
        "address to listen on. 127.0.0.1 is this machine alone: every client that reaches the port can use the model, "
        "so opening it to other machines (0.0.0.0) is your decision",
        metavar="ADDRESS",
    )
    port: int = option(8000, "port to listen on; 0 takes any free one", minimum=0, maximum=65535)
    uds: str | None = option(None, "listen on this unix socket instead", metavar="PATH")
    models: list[str] = field(
        default_factory=list,
        metadata={
            "help": "serve several models, each loaded by its first request; several in one flag: a=MODEL,b=MODEL",
            "metavar": "NAME=MODEL",
        },
    )
    max_loaded_models: int = option(
        2, "models loaded at the same time; the least recently used one is unloaded first", minimum=1
    )
    sleep_idle_seconds: float = option(
        -1.0,
        "unload a model that no request has used for so long; the next request for it loads it again; -1: never",
        metavar="SECONDS",
        minimum=-1,
    )
    prefill_engines: int = option(
        0,
        "engine processes that compute prompts alone, so that these do not delay the answers of the others; the CPUs "
        "are divided among all engines",
        minimum=0,
    )
    decode_engines: int = option(1, "with --prefill-engines: engine processes that answer", minimum=1)
    ray_discovery: bool = option(
        False, "tell the gateways of the Ray cluster (RAY_ADDRESS) that this server is there (needs quire[ray])"
    )
    api_key: list[str] = field(
        default_factory=list,
        metadata={
            "help": "require this key (as `Authorization: Bearer KEY`); without keys the API is open",
            "metavar": "KEY",
        },
    )
    keys_file: str | None = option(
        None,
        "more keys (JSON or TOML), each with a name, limits, a priority and the models it may use; reloaded on SIGHUP",
        metavar="FILE",
    )
    allowed_origins: list[str] = field(
        default_factory=lambda: ["*"],
        metadata={"help": "origins of web pages that may call the API", "metavar": "ORIGIN"},
    )
    max_body_bytes: int = option(
        32 << 20, "longest request body; a longer one is answered with 413", unit="bytes", minimum=1
    )
    max_connections: int = option(4096, "connections at the same time; one more is answered with 503", minimum=1)
    receive_timeout: float = option(
        60.0,
        "how long a client may take to send a request; then it is answered with 408",
        metavar="SECONDS",
        minimum=0.001,
    )
    send_timeout: float = option(
        60.0,
        "how long a client may leave its response unread; then it is disconnected, and its request cancelled",
        metavar="SECONDS",
        minimum=0.001,
    )
    request_timeout: float | None = option(
        None,
        "how long a request may take in all; one that does not end in time is answered with 504",
        metavar="SECONDS",
        minimum=0.001,
    )
    sse_keep_alive: float = option(
        15.0,
        "send a comment on a stream that was silent for so long, so that proxies keep it open; 0: never",
        metavar="SECONDS",
        minimum=0,
    )
    drain_timeout: float = option(
        30.0, "how long requests in flight may go on after SIGTERM or Ctrl-C", metavar="SECONDS", minimum=0
    )
    keep_alive: int = option(60, "how long an idle connection is kept open", metavar="SECONDS", minimum=0)
    forwarded_allow_ips: list[str] = field(
        default_factory=list,
        metadata={
            "help": "a proxy whose X-Forwarded-For is trusted, for example in the log; * is any",
            "metavar": "ADDRESS",
        },
    )
    root_path: str = option("", "the path that a proxy in front serves it under", metavar="PATH")
    ssl_keyfile: str | None = option(None, "private key (PEM), for HTTPS", metavar="FILE")
    ssl_certfile: str | None = option(None, "certificate (PEM), for HTTPS; reloaded on SIGHUP", metavar="FILE")
    allow_pull: bool = option(
        False,
        "let clients download models as `quire pull` does (Ollama's /api/pull): every client that reaches the port can "
        "then fill this machine's disk",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "let clients load and unload LoRA adapters: every client that reaches the port can then make the server read "
        "any directory of this machine as one",
    )
    access_log: bool = option(False, "log every request with its model, tenant, tokens and times")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto detects it from the chat template",
        choices=("auto", *TOOL_PARSERS),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning, which is split from the answer; none leaves it in",
        choices=("auto", "none", *REASONING_PARSERS),
    )
    reasoning_budget: int = option(
        -1,
        "tokens of reasoning at most, where a chat does not say (thinking_token_budget); -1: as many as it takes",
        minimum=-1,
    )
    chat_template_kwargs: str | None = option(
        None, 'variables of the chat template unless a request sets them: {"enable_thinking": false}', metavar="JSON"
    )
    trust_request_chat_template: bool = option(
        False,
        "let requests bring a `chat_template` of their own: a template is a program, which runs in a sandbox",
    )
    watermark_gamma: float = option(DEFAULT_GAMMA, "fraction of the vocabulary that a watermark favours")
    watermark_delta: float = option(DEFAULT_DELTA, "what a watermark adds to the logits of favoured tokens")
    watermark_key: int = option(
        DEFAULT_KEY, "the key of watermarks: with it they can be found and removed, so choose your own"
    )
    otlp_traces_endpoint: str | None = option(
        None, "send OpenTelemetry spans there, by OTLP over HTTP (needs quire[otel])", metavar="URL"
    )

    @property
    def watermark(self) -> Watermark:
        return Watermark(self.watermark_gamma, self.watermark_delta, self.watermark_key)

    @property
    def loads_on_demand(self) -> bool:
        """Models come and go with the requests for them."""
        return bool(self.models) or self.allow_pull or self.sleep_idle_seconds >= 0

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Variables of the chat template that requests may override."""
        try:
            given = json.loads(self.chat_template_kwargs or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict) or TEMPLATE_FIELDS & given.keys():
            raise BadRequest(
                f"chat_template_kwargs is `{self.chat_template_kwargs}`",
                f"give a JSON object without {', '.join(sorted(TEMPLATE_FIELDS))}",
                param="chat_template_kwargs",
            )
        return given

    def __post_init__(self) -> None:
        _ = self.watermark, self.template_defaults  # raise where they are wrong
        named_models(self.models)
        check_bounds(self)
        if self.decode_engines > 1 and not self.prefill_engines:
            raise BadRequest(
                f"decode_engines is {self.decode_engines}, and there are no prefill engines",
                "give prefill_engines, too",
                param="decode_engines",
            )
        if self.prefill_engines and self.loads_on_demand:
            raise BadRequest(
                "prefill_engines are for one model that stays: models, allow_pull, sleep_idle_seconds load on demand",
                "serve one model, and let it stay",
                param="prefill_engines",
            )
        if self.ray_discovery and self.uds is not None:
            raise BadRequest(
                "ray_discovery is for other machines, and the server listens on a unix socket",
                "leave one of both out",
                param="ray_discovery",
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise BadRequest("ssl_keyfile is given, and no ssl_certfile", "TLS needs both", param="ssl_certfile")


def named_models(given: Sequence[str]) -> dict[str, str]:
    return named_values(given, "models", "MODEL")
