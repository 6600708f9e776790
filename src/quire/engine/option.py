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
    for name, value, bound in out_of_bounds(options):
        raise BadRequest(f"{name} is {value}", f"{name} must be {bound}", param=name)


def out_of_bounds(options: Any) -> Iterator[tuple[str, float, str]]:
    """(name, value, "at least 1") of each field that is below its `minimum`, or above its `maximum`."""
    for spec in fields(options):
        minimum, maximum = spec.metadata.get("minimum"), spec.metadata.get("maximum")
        value = getattr(options, spec.name)
        if minimum is not None and value is not None and not value >= minimum:  # NaN is no value either
            yield spec.name, value, f"at least {minimum}"
        if maximum is not None and value is not None and value > maximum:
            yield spec.name, value, f"at most {maximum}"


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
