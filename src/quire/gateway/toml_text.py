"""TOML of plain values: texts, numbers, lists and tables. Python reads it, and does not write it."""

import json
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(config: dict[str, Any]) -> str:
    """Tables of the first and, where a table holds tables only, of the second level have headers; others are inline."""
    text = "".join(_line(name, value) for name, value in config.items() if not _has_header(value))
    for name, value in config.items():
        if isinstance(value, dict) and value and all(isinstance(each, dict) for each in value.values()):
            text += "".join(_table(f"[{_key(name)}.{_key(inner)}]", each) for inner, each in value.items())
        elif isinstance(value, dict) and value:
            text += _table(f"[{_key(name)}]", value)
        elif _has_header(value):
            text += "".join(_table(f"[[{_key(name)}]]", each) for each in value)
    return text


def _has_header(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))


def _table(header: str, table: dict[str, Any]) -> str:
    return f"\n{header}\n" + "".join(_line(name, value) for name, value in table.items())


def _line(name: str, value: Any) -> str:
    return f"{_key(name)} = {_value(value)}\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's texts and numbers are TOML's, too
