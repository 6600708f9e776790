"""Parses numbers, sizes and booleans of the command line."""

import re
from collections.abc import Callable
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*([A-Za-z]*)", re.ASCII)
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
_BYTE_UNITS = {"": 1, "B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in ((f"{letter}iB", 1024), (letter, 1024), (f"{letter}B", 1000), (f"{letter.lower()}B", 1000))
}
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Reader = Callable[[str], Any]  # raises ValueError with a message for the user


def read_count(text: str) -> int:
    """32768, 32k (32,000) or 32K (32,768): small letters count in thousands, as vLLM's do."""
    return _read_scaled(text, _COUNT_UNITS, "a whole number such as 4096, 32k (thousands) or 32K (1024s)")


def read_bytes(text: str) -> int:
    """512MB (millions), 4GiB or 4G (1024s), or a number of bytes."""
    return _read_scaled(text, _BYTE_UNITS, "a size such as 4GiB, 512MB or a number of bytes")


def read_truth(text: str) -> bool:
    if (truth := _TRUTHS.get(text.strip().lower())) is None:
        raise ValueError(f"`{text}` is not one of {', '.join(_TRUTHS)}")
    return truth


def reader(annotation: Any, unit: str = "") -> Reader:
    """How a value of this type is read. `X | None` is read as X: leaving it out means None."""
    kind = bare(annotation)
    if get_origin(kind) is Literal:
        return _one_of(get_args(kind))
    if kind is int:
        return read_bytes if unit == "bytes" else read_count
    if kind is bool:
        return read_truth
    if kind is float:
        return _read_float
    assert kind is str, f"no flag can be made for {annotation}"
    return str


def bare(annotation: Any) -> Any:
    """X of `X | None`."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        assert len(kinds) == 1, f"no flag can be made for {annotation}"
        return kinds[0]
    return annotation


def _read_scaled(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"`{text}` is not {wanted}")
    value = Decimal(match[1]) * units[match[2]]
    if value != int(value):
        raise ValueError(f"`{text}` is {value}, and a whole number is needed")
    return int(value)


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"`{text}` is not a number") from None


def _one_of(choices: tuple[Any, ...]) -> Reader:
    def read(text: str) -> Any:
        for choice in choices:
            if str(choice) == text:
                return choice
        raise ValueError(f"`{text}` is not one of {', '.join(map(str, choices))}")

    return read
