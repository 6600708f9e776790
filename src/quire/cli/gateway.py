"""`quire gateway`: one address in front of many engines."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from quire.cli.parser import Parser, UsageError
from quire.cli.router_flags import check_flags
from quire.core.errors import QuireError
from quire.gateway.config import (
    GatewayConfig,
    GatewayKey,
    PolicyName,
    WorkerEntry,
    check_config,
)
from quire.gateway.config_file import explained, parse_config, read_config

EXAMPLES = """\
  quire gateway --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002 --port 8080
  quire gateway --worker http://gpu-1:8000 --worker http://gpu-2:8000 --policy cache_aware
  quire gateway --config gateway.toml                 keys, budgets, aliases, fallbacks; read again on SIGHUP
  quire gateway --config gateway.toml --check         say what is wrong with the file, and start nothing
  quire gateway --new-key alice >> gateway.toml       a key for alice, which is shown once
  quire gateway --from-litellm config.yaml > gateway.toml
  curl http://127.0.0.1:8081/workers                  the admin listener: workers, keys, metrics
"""

LOG_LEVELS = ("debug", "info", "warning", "error")


def run(argv: Sequence[str]) -> int:
    check_flags(argv)
    arguments = make_parser().parse(argv)
    if arguments.urls:
        raise UsageError(f"`{arguments.urls[0]}` stands without a flag", f"write --worker {arguments.urls[0]}")
    if arguments.from_litellm:
        return _print_from_litellm(Path(arguments.from_litellm))
    if arguments.new_key:
        return _print_new_key(arguments.new_key)

    def configured() -> GatewayConfig:
        config = read_config(Path(arguments.config)) if arguments.config else GatewayConfig()
        config = _with_flags(config, arguments)
        check_config(config, arguments.config or "the command line")
        return config

    config = configured()
    if arguments.check:
        counts = f"{_counted(len(config.workers), 'worker')}, {_counted(len(config.keys), 'key')}"
        print(f"{arguments.config or 'the command line'} is good: {counts}")
        return 0
    if not config.workers and not arguments.config:
        raise UsageError("no worker is named", "give --worker http://HOST:PORT, or --config FILE")
    from quire.gateway.serve import run_gateway
    from quire.server.observe.logs import set_up_logging

    set_up_logging(arguments.log_level, arguments.log_format)

    def ready(address: str, admin: str) -> None:
        workers = _counted(len(config.workers), "worker")
        print(f"gateway of {workers} on {address}\n  curl {admin}/workers", file=sys.stderr, flush=True)

    run_gateway(config, reload=configured, on_ready=ready)
    return 0


def make_parser() -> Parser:
    parser = Parser("gateway", "One address in front of many engines, until SIGTERM or Ctrl-C.", EXAMPLES)
    add = parser.add_argument
    add("--config", metavar="FILE", help="the configuration (TOML); flags override it; read again on SIGHUP")
    add("urls", nargs="*", help=argparse.SUPPRESS)
    add("--worker", action="append", default=[], metavar="URL", help="an engine; may be given several times")
    add("--worker-urls", nargs="+", default=[], metavar="URL", help="the same, several in one flag, as in sgl-router")
    add("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, metavar="N", help="port to listen on; 0 takes any free one (default: 8080)")
    add("--admin-host", metavar="ADDRESS", help="address of the admin listener (default: 127.0.0.1)")
    add("--admin-port", type=int, metavar="N", help="port of the admin listener (default: 8081)")
    add("--policy", choices=get_args(PolicyName), help="which of several workers is chosen (default: power_of_two)")
    add("--api-key", action="append", default=[], metavar="KEY", help="require this key; may be given several times")
    add("--check", action="store_true", help="check the configuration, and start nothing")
    add("--new-key", metavar="NAME", help="print a new key, and the lines of the configuration for it")
    add(
        "--from-litellm", metavar="FILE", help="print what a config.yaml of LiteLLM is here, and what is left out of it"
    )
    add("--log-level", choices=LOG_LEVELS, default="info", help="how much to log (default: info)")
    add("--log-format", choices=("text", "json"), default="text", help="json: an object a line (default: text)")
    return parser


def _print_new_key(name: str) -> int:
    """The configuration has the digest only: the key itself is told on stderr."""
    import secrets

    from quire.server.access.keys import key_digest

    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        msgspec.convert({"name": name, "key": key}, GatewayKey)
    except msgspec.ValidationError:
        raise UsageError(
            f"`{name}` is no name of a key", "1 to 64 printable ASCII characters, without spaces"
        ) from None
    print(f"the key of {name}, which is shown this once: {key}", file=sys.stderr)
    print(f"\n[[keys]]\nname = {json.dumps(name)}\nsha256 = {json.dumps(key_digest(key.encode()).hex())}")
    return 0


def _print_from_litellm(path: Path) -> int:
    from quire.gateway.litellm_config import read_litellm

    converted = read_litellm(path)
    print(converted.text, end="")
    for note in converted.notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        parse_config(converted.text.encode(), "what was printed")
    except QuireError as error:
        print(f"note: {error.message}", file=sys.stderr)
    return 0


def _with_flags(config: GatewayConfig, arguments: argparse.Namespace) -> GatewayConfig:
    names = ("host", "port", "admin_host", "admin_port", "policy")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    workers = [*config.workers, *(WorkerEntry(url=url) for url in (*arguments.worker, *arguments.worker_urls))]
    keys = [*config.keys, *(GatewayKey(name=f"key-{index}", key=key) for index, key in enumerate(arguments.api_key))]
    try:
        msgspec.convert(given, GatewayConfig)
    except msgspec.ValidationError as error:
        raise UsageError(explained(error)[0], "see `quire gateway --help`") from None
    return msgspec.structs.replace(config, workers=workers, keys=keys, **given)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" + "s" * (count != 1)
