"""How the engine is shown to the network."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one; `serve` tells which
    uds: str | None = None  # a unix socket, instead of host and port
    api_key: list[str] = field(default_factory=list)  # any of these opens the API; none: it is open to all
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])  # of web pages that may call it
    max_body_bytes: int = 32 << 20
    drain_timeout: float = 30.0  # seconds that requests under way may go on after SIGTERM
    keep_alive: int = 60  # seconds an idle connection is kept
    root_path: str = ""  # where a proxy in front has mounted it
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    access_log: bool = False
    tool_call_parser: str = "auto"  # how tool calls are written; auto looks at the chat template
    reasoning_parser: str = "auto"  # how thoughts are marked; none: they stay in the text
