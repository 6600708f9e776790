"""How the engine is shown to the network."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.errors import BadRequest
from quire.core.watermark import DEFAULT_DELTA, DEFAULT_GAMMA, DEFAULT_KEY, Watermark
from quire.engine.options import named_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one; `serve` tells which
    uds: str | None = None  # a unix socket, instead of host and port
    models: list[str] = field(default_factory=list)  # "name=model" each, instead of one model
    max_loaded_models: int = 2  # at the same time; the one not used for longest makes room
    api_key: list[str] = field(default_factory=list)  # any of these opens the API; none: it is open to all
    keys_file: str | None = None  # more keys, with names and limits; read again on SIGHUP
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])  # of web pages that may call it
    max_body_bytes: int = 32 << 20
    max_connections: int = 4096
    receive_timeout: float = 60.0  # seconds until a request has come whole
    send_timeout: float = 60.0  # seconds that an answer may lie unread
    request_timeout: float | None = None  # seconds a request may take in all
    sse_keep_alive: float = 15.0  # seconds after which a silent stream is sent a comment; 0: never
    drain_timeout: float = 30.0  # seconds that requests under way may go on after SIGTERM
    keep_alive: int = 60  # seconds an idle connection is kept
    forwarded_allow_ips: list[str] = field(default_factory=list)  # proxies whose word on who asks is taken
    root_path: str = ""  # where a proxy in front has mounted it
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allow_pull: bool = False  # models may be fetched over HTTP
    allow_runtime_lora_updating: bool = False  # adapters may be loaded and unloaded over HTTP
    access_log: bool = False
    tool_call_parser: str = "auto"  # how tool calls are written; auto looks at the chat template
    reasoning_parser: str = "auto"  # how thoughts are marked; none: they stay in the text
    watermark_gamma: float = (
        DEFAULT_GAMMA  # of requests that want a watermark: the part of the vocabulary that is favoured,
    )
    watermark_delta: float = DEFAULT_DELTA  # by how much,
    watermark_key: int = DEFAULT_KEY  # and what the choice depends on
    otlp_traces_endpoint: str | None = None  # where spans are sent, by OTLP over HTTP

    @property
    def watermark(self) -> Watermark:
        return Watermark(self.watermark_gamma, self.watermark_delta, self.watermark_key)

    @property
    def loads_when_asked(self) -> bool:
        """No model is loaded before somebody asks for it."""
        return bool(self.models) or self.allow_pull

    def __post_init__(self) -> None:
        _ = self.watermark
        named_models(self.models)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise BadRequest(f"{name} is {value}", f"it must be at least {least}", param=name)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise BadRequest("ssl_keyfile is given, and no ssl_certfile", "TLS needs both", param="ssl_certfile")


_LEAST = {
    "port": 0,
    "max_loaded_models": 1,
    "max_body_bytes": 1,
    "max_connections": 1,
    "receive_timeout": 0.001,
    "send_timeout": 0.001,
    "request_timeout": 0.001,
    "sse_keep_alive": 0,
    "drain_timeout": 0,
    "keep_alive": 0,
}


def named_models(given: Sequence[str]) -> dict[str, str]:
    return named_values(given, "models", "MODEL")
