"""`quire bench compare NAME`: one comparison on this model and machine, or all of them on one page."""

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.cli.bench.compare.charts import svg
from quire.cli.bench.compare.comparisons import ALL, COMPARISONS, FIXED
from quire.cli.bench.compare.lab import Interrupted, Lab
from quire.cli.bench.compare.result import Result
from quire.cli.bench.compare.sizes import Sizes
from quire.cli.bench.compare.surroundings import surroundings
from quire.cli.bench.report import check_target
from quire.cli.bench.setup import add_engine_flags, read_engine_options
from quire.cli.flags import add_flags, read_flags
from quire.cli.interrupts import first_interrupt_noted
from quire.cli.main import INTERRUPTED
from quire.cli.parser import Parser, UsageError, nearest
from quire.core.errors import QuireError
from quire.engine.options import EngineOptions

EXAMPLES = """\
  quire bench compare batching                              static against continuous batching, as a table
  quire bench compare kv-cache --svg curve.svg              the curve, as a picture
  quire bench compare formats A.gguf B.gguf --json          size, memory, tokens/s, perplexity, KL
  quire bench compare speculation -m ./model.gguf --output-len 256
  quire bench compare all --html report.html                everything, on one page that works offline
  quire bench compare batching --help                       its sizes, and their defaults
"""
OUTPUTS = {"--json", "--svg", "--html"}  # flags that say where results go


def run(argv: Sequence[str]) -> int:
    argv = _name_first(argv)
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    if name and name != ALL:
        _known_comparison(name)
    arguments = _parser(name).parse(argv if name else argv or ["--help"])
    options = read_engine_options(arguments)
    files = getattr(arguments, "files", ())
    if files:
        if hasattr(arguments, "model"):
            raise UsageError("--model and files are given", "name the files only")
        options = replace(options, model=files[0])
    check_target(arguments.html)
    check_target(getattr(arguments, "svg", None))
    with first_interrupt_noted() as noted:
        session = _Session(arguments, options, argv[1:], noted.is_set)
        return session.all() if name == ALL else session.one(name)


def _name_first(argv: Sequence[str]) -> Sequence[str]:
    """The sizes and flags are those of a comparison, so that its name has to be known before they are read."""
    if not argv or not argv[0].startswith("-") or {"-h", "--help"} & {*argv}:
        return argv
    name = ALL if ALL in argv else next((argument for argument in argv if argument in COMPARISONS), None)
    if name is None:
        raise UsageError("no comparison is named", f"choose from {', '.join((*COMPARISONS, ALL))}")
    rest = list(argv)
    rest.remove(name)
    return [name, *rest]


def _known_comparison(name: str) -> str:
    """Raises UsageError for an unknown one."""
    if name not in COMPARISONS:
        known = (*COMPARISONS, ALL)
        raise UsageError(f"there is no comparison `{name}`", nearest(name, known) or f"choose from {', '.join(known)}")
    return name


def _parser(name: str) -> Parser:
    rows = "\n".join(f"  {each:<16} {COMPARISONS[each].what}" for each in COMPARISONS)
    about = f"{COMPARISONS[name].what}." if name in COMPARISONS else f"{rows}\n  {ALL:<16} all of these"
    usage = f"bench compare {name}" if name else f"bench compare [{'|'.join((*COMPARISONS, ALL))}]"
    parser = Parser(
        usage + (" [FILE ...]" if name == "formats" else ""),
        f"Compare what this field compares, on your model and machine. Both sides take turns.\n\n{about}",
        EXAMPLES,
    )
    parser.add_argument("comparison", help="what to compare")
    if name == "formats":
        parser.add_argument("files", nargs="*", metavar="FILE", help="the same model in several formats")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    if name != ALL:
        parser.add_argument("--svg", metavar="FILE", help="write the charts")
    parser.add_argument("--html", metavar="FILE", help="write a page with tables and charts that needs no network")
    if name in (ALL, ""):
        parser.add_argument("--only", nargs="+", type=_known_comparison, metavar="NAME", help=f"of `{ALL}`, only these")
    sizes = {field.name for field in fields(Sizes)}
    offered = COMPARISONS[name].sizes if name in COMPARISONS else dict.fromkeys({"repeats"} if name == ALL else sizes)
    defaults = {key: {"help": _help(key, default)} for key, default in offered.items() if default is not None}
    add_flags(parser, Sizes, "sizes", about=defaults, skip=sizes - set(offered))
    add_engine_flags(parser, (*FIXED, *COMPARISONS[name].varies) if name in COMPARISONS else FIXED)
    return parser


def _help(name: str, default: Any) -> str:
    text = next(field.metadata["help"] for field in fields(Sizes) if field.name == name)
    return f"{text} (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


class _Session:
    """One call of the command."""

    def __init__(
        self, arguments: Namespace, options: EngineOptions, argv: Sequence[str], stopped: Callable[[], bool]
    ) -> None:
        self.arguments, self.options, self.stopped = arguments, options, stopped
        self.argv = argv
        self.results: list[Result] = []
        self.skipped: dict[str, str] = {}

    def one(self, name: str) -> int:
        try:
            result = self._compare(name, "")
        except Interrupted:
            print("interrupted before the first round was done", file=sys.stderr)
            return INTERRUPTED
        self.results.append(result)
        print(json.dumps(self.figures | result.as_json()) if self.arguments.json else result.as_text())
        if self.arguments.svg:
            Path(self.arguments.svg).write_text(svg(result.charts), encoding="utf-8")
        self._write_page()
        self._say_where()
        return INTERRUPTED if result.interrupted else 0

    def all(self) -> int:
        names = self.arguments.only or list(COMPARISONS)
        interrupted = False
        _ = self.figures  # a model that cannot be read ends it here
        for number, name in enumerate(names, 1):
            place = f"[{number}/{len(names)}] "
            print(f"{place}{name}: {COMPARISONS[name].what}", file=sys.stderr)
            try:
                self._add(self._compare(name, place))
            except Interrupted:
                interrupted = True
            except QuireError as error:
                self.skipped[name] = str(error).replace("\nhint:", ";").replace("\n", " ")
                print(f"{place}{name} is skipped: {self.skipped[name]}", file=sys.stderr)
            if interrupted or self.stopped():
                interrupted = True
                break
        if self.arguments.json:
            done = [result.as_json() for result in self.results]
            skipped = [{"comparison": name, "reason": reason} for name, reason in self.skipped.items()]
            print(json.dumps(self.figures | {"comparisons": done, "skipped": skipped, "interrupted": interrupted}))
        self._write_page()
        self._say_where()
        return INTERRUPTED if interrupted else 0

    def _add(self, result: Result) -> None:
        self.results.append(result)
        if not self.arguments.json:
            print(f"{result.as_text()}\n", flush=True)
        self._write_page()  # after each, so that nothing that is done can be lost

    def _lab(self, name: str, place: str = "") -> Lab:
        sizes = read_flags(Sizes, self.arguments, given=COMPARISONS[name].sizes)
        files = getattr(self.arguments, "files", ())
        return Lab(self.options, sizes, files, self.stopped, _progress(f"{place}{name}"))

    def _compare(self, name: str, place: str) -> Result:
        lab, begin = self._lab(name, place), time.perf_counter()
        try:
            result: Result = import_module(COMPARISONS[name].module).compare(lab)
        finally:
            lab.close()
            _clear_line()
        result.name, result.interrupted = name, lab.interrupted
        if result.rounds == 1:
            result.notes.append("one round: how much the figures vary is not known")
        result.seconds = time.perf_counter() - begin
        result.command = shlex.join(["quire", "bench", "compare", name, *_repeated(self.argv, _parser(name))])
        return result

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The model and the machine."""
        return surroundings(Lab(self.options, Sizes()))

    def _write_page(self) -> None:
        if self.arguments.html and self.results:
            from quire.cli.bench.compare.html import page

            text = page(self.results, self.skipped, self.figures)
            Path(self.arguments.html).write_text(text, encoding="utf-8")

    def _say_where(self) -> None:
        for path in (getattr(self.arguments, "svg", None), self.arguments.html):
            if path and self.results:
                print(f"written to {path}", file=sys.stderr)


def _progress(name: str) -> Callable[[int, int], None]:
    """A line on stderr that is written again, if that is a terminal."""

    def show(number: int, total: int) -> None:
        if sys.stderr.isatty():
            what = "warming up" if number == 0 else f"round {number} of {total - 1}"
            sys.stderr.write(f"\r\033[K{name}: {what}")
            sys.stderr.flush()

    return show


def _clear_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


def _repeated(argv: Sequence[str], parser: Parser) -> list[str]:
    """The arguments that make the same measurement again: without outputs, and without flags of `all` that this
    comparison does not have."""
    kept: list[str] = []
    dropped = False  # the last flag
    for argument in argv:
        if argument.startswith("--"):
            flag = argument.partition("=")[0].replace("_", "-")
            dropped = flag in OUTPUTS or flag not in parser.flags
            if flag == "--json":  # the only one without a value
                dropped = False
                continue
        elif argument.startswith("-"):
            dropped = False
        if not dropped:
            kept.append(argument)
    return kept
