"""Makes flags from a dataclass, and the dataclass from the flags.

Every field is a flag of the same name; its default stands in the dataclass only. The field's metadata holds the rest:
`help`, `metavar`, `choices`, `synonyms` (a value -> the choice it stands for), `otherwise` (what to do instead of
giving another value), `minimum` (which the dataclass checks), `unit: "bytes"`, `aliases` (other names of the flag),
`several` (a flag that takes several values). A command may override it with `about`. The environment variable
QUIRE_<FIELD> stands in for a flag that is not given."""

import argparse
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from quire.cli.parser import Parser, UsageError
from quire.cli.values import bare, read_truth, reader
from quire.hub.aliases import DEFAULT_MODEL

T = TypeVar("T")
About = Mapping[str, Mapping[str, Any]]  # field -> metadata

_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


def add_flags(
    parser: Parser, options: type, title: str, *, about: About | None = None, skip: Collection[str] = ()
) -> None:
    """Add a group of flags, one for each field. A flag that is not given is not in the namespace."""
    group = parser.add_argument_group(title)
    for flag in _flags(options, about or {}):
        if flag.field not in skip:
            flag.add_to(group)


def read_flags(
    options: type[T],
    arguments: argparse.Namespace,
    *,
    about: About | None = None,
    given: Mapping[str, Any] | None = None,
) -> T:
    """Values come from the flags, else the environment, else `given`, else the defaults of `options`."""
    values = dict(given or {})
    for flag in _flags(options, about or {}):
        if hasattr(arguments, flag.field):
            values[flag.field] = flag.shape(getattr(arguments, flag.field))
        elif (text := os.environ.get(flag.variable)) is not None:
            values[flag.field] = flag.read_variable(text)
    return options(**values)


def add_model_flag(parser: Parser) -> None:
    help_text = f"path, repository or short name (default: {DEFAULT_MODEL})"
    parser.add_argument("-m", "--model", default=argparse.SUPPRESS, help=help_text)


def add_model_argument(parser: Parser) -> None:
    parser.add_argument(
        "named", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model MODEL"
    )


def with_model_argument(arguments: argparse.Namespace) -> argparse.Namespace:
    """The model may be named either way, and not both."""
    if hasattr(arguments, "named"):
        if hasattr(arguments, "model"):
            raise UsageError(f"two models are named, {arguments.named} and {arguments.model}", "leave --model out")
        arguments.model = arguments.named
    return arguments


@dataclass(frozen=True, slots=True)
class _Flag:
    field: str
    kind: Any  # the type of one value: T of `T`, `T | None`, `list[T]` and `tuple[T, ...]`
    many: type | None  # list or tuple, for several values
    default: Any  # None where the help text shows none
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"QUIRE_{self.field.upper()}"

    def add_to(self, group: Any) -> None:
        settings: dict[str, Any] = {"dest": self.field, "default": argparse.SUPPRESS, "help": self._help()}
        if self.kind is bool:
            group.add_argument(self.name, action=argparse.BooleanOptionalAction, **settings)
        else:
            action = "append" if self.many else "store"
            if self.metadata.get("several"):
                action, settings["nargs"] = "extend", "+"
            names = (self.name, *self.metadata.get("aliases", ()))
            group.add_argument(*names, action=action, type=self._argument, metavar=self._metavar(), **settings)

    def shape(self, value: Any) -> Any:
        return self.many(value) if self.many else value

    def read(self, text: str) -> Any:
        """One value. Raises ValueError with a message for the user."""
        value = reader(self.kind, self.metadata.get("unit", ""))(text)
        value = self.metadata.get("synonyms", {}).get(value, value)
        choices = self.metadata.get("choices")
        if choices and value not in choices:
            raise ValueError(f"`{text}` is not one of {', '.join(map(str, choices))}")
        return value

    def read_variable(self, text: str) -> Any:
        try:
            if self.kind is bool:
                return read_truth(text)
            return self.many(self.read(part) for part in text.split(",")) if self.many else self.read(text)
        except ValueError as failure:
            hint = f"unset it, or give {self.name}"
            if text.startswith("tcp://"):  # Kubernetes sets QUIRE_PORT for a service called quire
                hint += "; Kubernetes sets it for a service called quire unless `enableServiceLinks: false`"
            raise UsageError(f"the environment variable {self.variable}: {failure}", hint) from None

    def _argument(self, text: str) -> Any:
        try:
            return self.read(text)
        except ValueError as failure:
            if otherwise := self.metadata.get("otherwise"):
                raise UsageError(f"{self.name}: {failure}", otherwise) from None
            raise argparse.ArgumentTypeError(str(failure)) from None

    def _metavar(self) -> str:
        if metavar := self.metadata.get("metavar"):
            return str(metavar)
        if choices := self.metadata.get("choices") or get_args(self.kind):
            return "{" + ",".join(map(str, choices)) + "}"
        return "SIZE" if self.metadata.get("unit") == "bytes" else _METAVARS[self.kind]

    def _help(self) -> str:
        text = str(self.metadata.get("help", ""))
        if self.many:
            text += "; may be given several times"
        if self.default not in (None, "", [], ()) and "(default" not in text:
            text += f" (default: {self._written_default()})"
        return text.replace("%", "%%")

    def _written_default(self) -> str:
        """The default as the help text shows it: as one would write it on the command line."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.many:
            return ",".join(map(str, self.default))
        if isinstance(self.default, float):
            return f"{self.default:g}"
        if self.metadata.get("unit") == "bytes" and self.default and self.default % 2**20 == 0:
            return f"{self.default // 2**20}MiB"
        return str(self.default)


def _flags(options: type, about: About) -> Iterator[_Flag]:
    kinds = get_type_hints(options)
    for field in fields(options):
        kind, many = bare(kinds[field.name]), None
        if get_origin(kind) in (list, tuple):
            kind, many = get_args(kind)[0], get_origin(kind)
        default = None if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield _Flag(field.name, kind, many, default, {**field.metadata, **about.get(field.name, {})})
