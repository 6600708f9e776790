"""What the benchmarks share on the command line: a model, its engine, and a bar that moves."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.cli.flags import add_flags, read_flags
from quire.cli.parser import Parser
from quire.engine.engine import Engine
from quire.engine.options import LORA, EngineOptions
from quire.engine.start import new_executor
from quire.hub import resolve_model

_SERVING_ONLY = ("served_model_name", "max_queued_requests", *LORA)  # nobody is named, nobody is refused


def add_engine_flags(parser: Parser) -> None:
    parser.add_argument(
        "-m", "--model", default=argparse.SUPPRESS, help="path, repository or short name (default: smollm2)"
    )
    about = {
        "enable_prefix_caching": {"help": "share the cache of equal beginnings between requests (default: off)"},
        "seed": {"help": "for prompts and for drawing (default: 0)"},
    }
    add_flags(parser, EngineOptions, "engine", about=about, skip=("model", *_SERVING_ONLY))


def read_engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Prefixes are not shared unless that is asked for: it would be measured, too."""
    return read_flags(EngineOptions, arguments, given={"enable_prefix_caching": False, "seed": 0})


def start(options: EngineOptions) -> tuple[Engine, float]:
    """-> the engine, and the seconds it took."""
    files = resolve_model(options.model, revision=options.revision)
    begin = time.perf_counter()
    engine = Engine(new_executor(files.path, options), options)
    return engine, time.perf_counter() - begin


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[], Any]]:
    """A bar on stderr if someone is watching; call what it gives whenever one more is done."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, leave=False) as bar:
        yield bar.update
