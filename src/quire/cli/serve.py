"""`quire serve`: a model behind HTTP."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from quire.cli.flags import About, add_flags, read_flags
from quire.cli.parser import Parser, UsageError
from quire.client.engine_process import EngineProcess
from quire.engine.options import EngineOptions
from quire.hub import model_name
from quire.server.options import ServerOptions, named_models
from quire.text.reasoning import FORMATS as REASONING_FORMATS
from quire.text.tools import FORMATS as TOOL_FORMATS

EXAMPLES = """\
  quire serve                                         the default model on http://127.0.0.1:8000
  quire serve ./model.gguf --port 8080 --max-model-len 4k
  quire serve Qwen/Qwen2.5-0.5B-Instruct --kv-cache-memory-bytes 2GiB
  quire serve --host 0.0.0.0 --api-key "$KEY"         reachable from other machines
  quire serve --keys-file keys.toml --ssl-certfile cert.pem --ssl-keyfile key.pem --access-log
  quire serve --models chat=smollm2,embed=./all-MiniLM-L6-v2
  quire serve ./llama --lora-modules sql=./sql-lora   requests for the model `sql` use the adapter
  quire serve --max-wait 10 --request-timeout 120     refuse early what would be late
  QUIRE_PORT=9000 QUIRE_THREADS=4 quire serve         every flag is also an environment variable
"""

LOG_LEVELS = ("debug", "info", "warning", "error")

SERVER_FLAGS: About = {
    "host": {
        "metavar": "ADDRESS",
        "help": "address to listen on. 127.0.0.1 is this machine alone: whoever reaches the port can use the model, "
        "so opening it to others (0.0.0.0) is for you to say",
    },
    "port": {"help": "port to listen on; 0 takes any free one"},
    "uds": {"metavar": "PATH", "help": "listen on this unix socket instead"},
    "models": {
        "metavar": "NAME=MODEL",
        "help": "serve several models, each loaded when it is first asked for; several in one go: a=MODEL,b=MODEL",
    },
    "max_loaded_models": {"help": "models loaded at the same time; the one not used for longest makes room"},
    "api_key": {"metavar": "KEY", "help": "answer only who sends it (as `Authorization: Bearer KEY`)"},
    "keys_file": {
        "metavar": "FILE",
        "help": "more keys (JSON or TOML), each with a name, limits, a priority and the models it may use; "
        "read again on SIGHUP",
    },
    "allowed_origins": {"metavar": "ORIGIN", "help": "web pages that may call it"},
    "max_body_bytes": {"unit": "bytes", "help": "longest request body; a longer one is answered with 413"},
    "max_connections": {"help": "connections at the same time; one more is answered with 503"},
    "receive_timeout": {
        "metavar": "SECONDS",
        "help": "how long a client may take to send a request; then it is answered with 408",
    },
    "send_timeout": {
        "metavar": "SECONDS",
        "help": "how long a client may leave its answer unread; then it is disconnected, and its request cancelled",
    },
    "request_timeout": {
        "metavar": "SECONDS",
        "help": "how long a request may take in all; one that does not end in time is answered with 504",
    },
    "sse_keep_alive": {
        "metavar": "SECONDS",
        "help": "send a comment on a stream that was silent for so long, so that proxies keep it; 0: never",
    },
    "drain_timeout": {"metavar": "SECONDS", "help": "how long requests under way may go on after SIGTERM or Ctrl-C"},
    "keep_alive": {"metavar": "SECONDS", "help": "how long an idle connection is kept"},
    "forwarded_allow_ips": {
        "metavar": "ADDRESS",
        "help": "a proxy whose X-Forwarded-For is believed, in the log for one; * is any",
    },
    "root_path": {"metavar": "PATH", "help": "where a proxy in front has mounted it"},
    "ssl_keyfile": {"metavar": "FILE", "help": "private key (PEM), for HTTPS"},
    "ssl_certfile": {"metavar": "FILE", "help": "certificate (PEM), for HTTPS; read again on SIGHUP"},
    "tool_call_parser": {
        "choices": ("auto", *TOOL_FORMATS),
        "help": "how the model writes tool calls; auto tells it from the chat template",
    },
    "reasoning_parser": {
        "choices": ("auto", "none", *REASONING_FORMATS),
        "help": "how the model marks its thoughts, which are split from the answer; none leaves them in it",
    },
    "allow_pull": {
        "help": "let clients fetch models as `quire pull` does (Ollama's /api/pull): whoever reaches the port can then "
        "fill this machine's disk"
    },
    "allow_runtime_lora_updating": {
        "help": "let clients load and unload LoRA adapters: whoever reaches the port can then make the server read any "
        "directory of this machine as one"
    },
    "watermark_gamma": {"help": "part of the vocabulary that a watermark favours"},
    "watermark_delta": {"help": "how much it favours it, added to logits"},
    "watermark_key": {"help": "whoever knows it can find watermarks, and remove them: choose your own"},
    "access_log": {"help": "log every request with its model, tenant, tokens and times"},
    "otlp_traces_endpoint": {"metavar": "URL", "help": "send OpenTelemetry spans there (needs quire[otel])"},
}


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse(argv)
    if hasattr(arguments, "named"):
        if hasattr(arguments, "model"):
            raise UsageError(f"two models are named, {arguments.named} and {arguments.model}", "leave --model out")
        arguments.model = arguments.named
    engine_options = read_flags(EngineOptions, arguments)
    server_options = read_flags(ServerOptions, arguments, about=SERVER_FLAGS)
    names = list(named_models(server_options.models)) if server_options.models else []
    if names and (hasattr(arguments, "model") or engine_options.served_model_name):
        raise UsageError("models are named with --models, and another way too", "name all of them with --models")
    name = names[0] if names else engine_options.served_model_name or model_name(engine_options.model)

    with nullcontext() if server_options.loads_when_asked else EngineProcess() as spawned:
        from quire.server.launch import launch
        from quire.server.observe.logs import set_up_logging

        set_up_logging(arguments.log_level, arguments.log_format)

        def ready(address: str) -> None:
            print(announcement(address, names or [name], server_options), file=sys.stderr, flush=True)

        launch(engine_options, server_options, on_ready=ready, spawned=spawned)
    return 0


def make_parser() -> Parser:
    parser = Parser("serve [MODEL]", "Serve a model over HTTP until SIGTERM or Ctrl-C.", EXAMPLES)
    parser.add_argument(
        "named", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model MODEL"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="how much to log (default: info)")
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: an object a line (default: text)"
    )
    add_flags(parser, EngineOptions, "engine")
    add_flags(parser, ServerOptions, "server", about=SERVER_FLAGS)
    return parser


def announcement(address: str, models: Sequence[str], options: ServerOptions) -> str:
    """The address, and a line to paste into another terminal."""
    messages = [{"role": "user", "content": "Hello!"}]
    body = json.dumps({"model": models[0], "max_tokens": 64, "messages": messages}, ensure_ascii=False)
    words = ["curl"]
    url = address
    if options.uds is not None:
        words.append(f"--unix-socket {_quoted(options.uds)}")
        url = "http://localhost"
    url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # every address is none to call
    words += [f"{url}{options.root_path}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if options.ssl_certfile:
        words.append(f"--cacert {_quoted(options.ssl_certfile)}")
    if options.api_key or options.keys_file:
        words.append("-H 'Authorization: Bearer '\"$QUIRE_API_KEY\"")  # a key is not for the log
    words.append(f"-d {_quoted(body)}")
    return f"serving {', '.join(models)} on {address}\n  {' '.join(words)}"


def _quoted(text: str) -> str:
    from shlex import quote

    return quote(text)
