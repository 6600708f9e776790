"""How the engine is shown to the network."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one; `serve` tells which
    uds: str | None = None  # a unix socket, instead of host and port
    api_key: list[str] = field(default_factory=list)  # any of these opens the API; none: it is open to all
    keys_file: str | None = None  # more keys, with names and limits; read again on SIGHUP
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])  # of web pages that may call it
    max_body_bytes: int = 32 << 20
    request_timeout: float | None = None  # seconds a request may take in all
    sse_keep_alive: float = 15.0  # seconds after which a silent stream is sent a comment; 0: never
    drain_timeout: float = 30.0  # seconds that requests under way may go on after SIGTERM
    keep_alive: int = 60  # seconds an idle connection is kept
    root_path: str = ""  # where a proxy in front has mounted it
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    access_log: bool = False
    otlp_traces_endpoint: str | None = None  # where spans are sent, by OTLP over HTTP
