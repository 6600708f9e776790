"""The kinds of options that people type from the guides of other engines. Values are compared as they are written on a
command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """These values ask for nothing; every other one is refused."""

    values: tuple[str, ...]
    reason: str
    switch: bool = False


PeerOption = Renamed | NoEffect | Only

OFF = ("false", "none")
