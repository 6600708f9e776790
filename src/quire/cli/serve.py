"""`quire serve`: serve a model over HTTP."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from quire.cli.config_file import add_config_file
from quire.cli.flags import add_flags, add_model_argument, read_flags, with_model_argument
from quire.cli.parser import Parser, UsageError
from quire.cli.peer_flags import add_peer_flags
from quire.client.engine_process import EngineProcess
from quire.engine.options import EngineOptions
from quire.hub import model_name
from quire.server.options import ServerOptions, named_models

EXAMPLES = """\
  quire serve                                         the default model on http://127.0.0.1:8000
  quire serve ./model.gguf --port 8080 --max-model-len 4k
  quire serve Qwen/Qwen2.5-0.5B-Instruct --kv-cache-memory-bytes 2GiB
  quire serve --host 0.0.0.0 --api-key "$KEY"         reachable from other machines
  quire serve --keys-file keys.toml --ssl-certfile cert.pem --ssl-keyfile key.pem --access-log
  quire serve --models chat=smollm2,embed=./all-MiniLM-L6-v2
  quire serve ./llama --lora-modules sql=./sql-lora   requests for the model `sql` use the adapter
  quire serve --prefill-engines 1 --decode-engines 1  prompts are computed beside the answers, not between them
  quire serve --data-parallel-size 2                  two engines, each with half of the CPUs, share one queue
  quire serve --config serve.yaml                     flags from a file: `max-model-len: 4096` a line
  quire serve --max-wait 10 --request-timeout 120     refuse early what would be late
  QUIRE_PORT=9000 QUIRE_THREADS=4 quire serve         every flag is also an environment variable
"""

QUESTION = "What is the capital of France, and what is it known for?"  # the default model answers it well

LOG_LEVELS = ("debug", "info", "warning", "error")


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse(argv)
    if hasattr(arguments, "config"):
        add_config_file(parser, arguments)
    with_model_argument(arguments)
    engine_options = read_flags(EngineOptions, arguments)
    server_options = read_flags(ServerOptions, arguments)
    names = list(named_models(server_options.models)) if server_options.models else []
    if names and (hasattr(arguments, "model") or engine_options.served_model_name):
        raise UsageError("models are named with --models, and another way too", "name all of them with --models")
    name = names[0] if names else engine_options.served_model_name or model_name(engine_options.model)

    loads_on_demand = server_options.loads_on_demand or engine_options.enable_sleep_mode
    one_engine = not (loads_on_demand or server_options.prefill_engines or engine_options.is_group)
    with EngineProcess() if one_engine else nullcontext() as spawned:
        from quire.server.launch import launch
        from quire.server.observe.logs import set_up_logging

        set_up_logging(getattr(arguments, "log_level", "info"), getattr(arguments, "log_format", "text"))

        def ready(address: str) -> None:
            print(announcement(address, names or [name], server_options), file=sys.stderr, flush=True)

        launch(engine_options, server_options, on_ready=ready, spawned=spawned)
    return 0


def make_parser() -> Parser:
    parser = Parser("serve [MODEL]", "Serve a model over HTTP until SIGTERM or Ctrl-C.", EXAMPLES)
    add_model_argument(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="take what is not given here from this file (YAML or TOML): the flags without their dashes, and `model`",
    )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default=argparse.SUPPRESS, help="how much to log (default: info)"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=argparse.SUPPRESS,
        help="json: an object a line (default: text)",
    )
    add_flags(parser, EngineOptions, "engine")
    add_flags(parser, ServerOptions, "server")
    add_peer_flags(parser)
    return parser


def announcement(address: str, models: Sequence[str], options: ServerOptions) -> str:
    """The address, and a line to paste into another terminal."""
    messages = [{"role": "user", "content": QUESTION}]
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
