"""Options that people type from the guides of other engines. Each is an option of ours, has no effect, or is refused.

An option that only steers what is decided here by itself has no effect, and a warning says so. One that would change
answers, capacity, safety or placement is refused by name. Values are compared as they are written on a command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another name of an option of ours. `values`: a value there -> the value here; None leaves the default."""

    option: str
    values: Mapping[str, Any] = field(default_factory=dict)
    switch: bool = False  # a flag without a value


@dataclass(frozen=True, slots=True)
class NoEffect:
    reason: str
    switch: bool = False


@dataclass(frozen=True, slots=True)
class Only:
    """An option of which these values ask for nothing; every other one is refused."""

    values: tuple[str, ...]
    reason: str
    switch: bool = False


PeerOption = Renamed | NoEffect | Only


def written(value: Any) -> str:
    """A keyword's value as on a command line."""
    return str(value).lower()


def translate(peer: Renamed, value: Any) -> Any:
    """The value of our option; None leaves its default."""
    return peer.values.get(written(value), value)


def warning(name: str, peer: NoEffect | Only, value: Any) -> str:
    """What to say of an option that is left out; "" where it asks for nothing. A value that could never work raises
    `BadRequest`."""
    if isinstance(peer, NoEffect):
        return f"{name} has no effect: {peer.reason}"
    if written(value) not in peer.values:
        raise BadRequest(f"{name} is {value}, and that is not possible here", peer.reason, param=name)
    return ""
