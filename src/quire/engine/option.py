"""An option: a field of a dataclass with its help text, and what is checked of every one."""

from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from typing import Any

from quire.core.errors import BadRequest


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with its help text; `more` is described in cli/flags.py."""
    return field(default=default, metadata={"help": help, **more})


def check_bounds(options: Any) -> None:
    """Raises BadRequest for a field that is below the `minimum`, or above the `maximum`, in its metadata."""
    for name, value, minimum in below_minimum(options):
        raise BadRequest(f"{name} is {value}", f"{name} must be at least {minimum}", param=name)
    for spec in fields(options):
        maximum, value = spec.metadata.get("maximum"), getattr(options, spec.name)
        if maximum is not None and value is not None and value > maximum:
            raise BadRequest(f"{spec.name} is {value}", f"{spec.name} must be at most {maximum}", param=spec.name)


def below_minimum(options: Any) -> Iterator[tuple[str, float, float]]:
    """(name, value, minimum) of each field that is less than the `minimum` in its metadata."""
    for spec in fields(options):
        minimum, value = spec.metadata.get("minimum"), getattr(options, spec.name)
        if minimum is not None and value is not None and not value >= minimum:  # NaN is no value either
            yield spec.name, value, minimum


def named_values(given: Sequence[str], option: str, kind: str) -> dict[str, str]:
    """["a=x,b=y", "c=z"] -> {"a": "x", "b": "y", "c": "z"}"""
    values: dict[str, str] = {}
    for entry in (part for text in given for part in text.split(",")):
        name, equals, value = entry.partition("=")
        if not (name and equals and value):
            raise BadRequest(f"{option} has `{entry}`", f"write NAME={kind}", param=option)
        if name in values:
            raise BadRequest(f"{option} has two called `{name}`", "give each a name of its own", param=option)
        values[name] = value
    return values
