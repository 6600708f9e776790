"""What the benchmarks share on the command line: a model, its engine, and a progress bar."""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.cli.flags import add_flags, add_model_flag, read_flags
from quire.cli.parser import Parser, UsageError
from quire.cli.peer_flags import add_peer_flags
from quire.engine.option import out_of_bounds
from quire.engine.options import ENGINES, GENERATION, LORA, SERVING, EngineOptions

if TYPE_CHECKING:
    from quire.engine.engine import Engine

# Flags without an effect here.
_SERVING_ONLY = ("served_model_name", *SERVING, *ENGINES, *GENERATION, *LORA)


def add_json_flag(parser: Parser) -> None:
    """As other commands have it."""
    help_text = "the same as --output-json -"
    parser.add_argument(
        "--json", dest="output_json", action="store_const", const="-", default=argparse.SUPPRESS, help=help_text
    )


def add_engine_flags(parser: Parser, skip: Collection[str] = ()) -> None:
    """`skip`: options that the benchmark sets itself."""
    add_model_flag(parser)
    about = {
        "enable_prefix_caching": {"help": "reuse the KV cache of shared prompt prefixes (default: off)"},
        "seed": {"help": "of random prompts and of sampling (default: 0)"},
    }
    add_flags(parser, EngineOptions, "engine", about=about, skip=("model", *_SERVING_ONLY, *skip))
    add_peer_flags(parser)


def read_engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Prefix caching is off unless it is asked for: its hits would be measured too."""
    return read_flags(EngineOptions, arguments, given={"enable_prefix_caching": False, "seed": 0})


def start(options: EngineOptions) -> "tuple[Engine, float]":
    """-> the engine, and the seconds it took."""
    from quire.engine.engine import Engine
    from quire.engine.start import new_executor
    from quire.hub import resolve_model

    files = resolve_model(options.model, revision=options.revision)
    begin = time.perf_counter()
    engine = Engine(new_executor(files.path, options), options)
    return engine, time.perf_counter() - begin


def check_bounds(flags: Any) -> None:
    for name, value, bound in out_of_bounds(flags):
        raise UsageError(f"--{name.replace('_', '-')} is {value}", f"give {bound}")


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[], Any]]:
    """A bar on stderr if that is a terminal; call the result whenever one more is done."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, leave=False) as bar:
        yield bar.update
