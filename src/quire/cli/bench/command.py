"""`quire bench COMMAND ...`: how fast a model runs here, or a server answers."""

from collections.abc import Sequence
from importlib import import_module

from quire.cli.parser import Parser, UsageError, nearest

COMMANDS = {  # name: (module, what it measures)
    "throughput": ("quire.cli.bench.throughput", "many requests at once: tokens and requests a second"),
    "latency": ("quire.cli.bench.latency", "one batch at a time: how long it takes"),
    "serve": ("quire.cli.bench.serve.command", "a server under load: latencies, throughput, goodput"),
    "compare": ("quire.cli.bench.compare.command", "two ways of doing the same, such as with and without a KV cache"),
}

EXAMPLES = """\
  quire bench throughput --num-prompts 64 --input-len 128 --output-len 64
  quire bench latency --batch-size 1 --input-len 512 --output-len 64
  quire bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 100
  quire bench compare all --html report.html
  quire bench latency --help
"""


def run(argv: Sequence[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return int(import_module(COMMANDS[argv[0]][0]).run(argv[1:]))
    rows = "\n".join(f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(
        f"bench [{'|'.join(COMMANDS)}]", f"Measure how fast a model runs on this machine.\n\n{rows}", EXAMPLES
    )
    parser.add_argument("benchmark", help=f"one of {', '.join(COMMANDS)}")
    name = parser.parse(argv or ["--help"]).benchmark
    raise UsageError(f"there is no benchmark `{name}`", nearest(name, COMMANDS) or f"choose from {', '.join(COMMANDS)}")
