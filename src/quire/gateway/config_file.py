"""Reads the configuration from its file. What is wrong there is told in a sentence, with the key that was meant."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from quire.core.errors import BadRequest
from quire.core.nearest import nearest
from quire.gateway.config import (
    EXAMPLE,
    CacheAware,
    Discovery,
    Faults,
    GatewayConfig,
    GatewayKey,
    KeyGroup,
    ModelRoute,
    Queue,
    Redis,
    RouteRule,
    RouteTarget,
    TokenPrices,
    WorkerEntry,
    check_config,
)

# By the path of a table, without numbers and names in it.
TABLES: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "": ("the top of the file", GatewayConfig),
    "workers": ("[[workers]]", WorkerEntry),
    "keys": ("[[keys]]", GatewayKey),
    "groups": ("[[groups]]", KeyGroup),
    "models": ("[models.NAME]", ModelRoute),
    "models.rules": ("`rules` of [models.NAME]", RouteRule),
    "models.targets": ("`targets` of [models.NAME]", RouteTarget),
    "models.price": ("`price` of [models.NAME]", TokenPrices),
    "queue": ("[queue]", Queue),
    "faults": ("[faults]", Faults),
    "cache_aware": ("[cache_aware]", CacheAware),
    "redis": ("[redis]", Redis),
    "discovery": ("[discovery]", Discovery),
    "discovery.dns": ("[[discovery.dns]]", WorkerEntry),
}

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")
_CHOICE = re.compile(r"Invalid enum value '(?P<value>[^']*)' - at `\$\.?(?P<path>.*)`")
_WRONG = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>.*)`")


def read_config(path: Path) -> GatewayConfig:
    """Raises BadRequest that lists every problem."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}", param="config") from None
    return parse_config(text, str(path))


def parse_config(text: bytes, name: str) -> GatewayConfig:
    try:
        config = msgspec.toml.decode(text, type=GatewayConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message, hint = explained(error, name)
        raise BadRequest(f"{name}: {message}", hint, param="config") from None
    check_config(config, name)
    return config


def explained(error: Exception, name: str = "", root: str = "") -> tuple[str, str]:
    """-> what is wrong, and a hint. `name`: of the file. `root`: the table that was read, of TABLES."""
    said = str(error)
    if match := _UNKNOWN.fullmatch(said):
        return _unknown(match["key"], _table(match["path"] or root))
    if match := _MISSING.fullmatch(said):
        return f"{TABLES[_table(match['path'] or root)][0]} has no `{match['key']}`", EXAMPLE
    if match := _CHOICE.fullmatch(said):
        return _no_choice(match["value"], match["path"] if not root else f"{root}.{match['path']}")
    if match := _WRONG.fullmatch(said):
        return f"`{match['path']}`: {match['what'][:1].lower()}{match['what'][1:]}", EXAMPLE
    if name.endswith((".yaml", ".yml")):
        return "the file is not TOML", f"of LiteLLM? `quire gateway --from-litellm {name} > gateway.toml`"
    return f"not TOML: {said}", EXAMPLE


def _table(path: str | None) -> str:
    """`workers[0]` -> `workers`; the nearest table around it that is known."""
    bare = re.sub(r"\[[^\]]*\]", "", path or "")
    while bare not in TABLES:
        bare = bare.rpartition(".")[0]
    return bare


def _unknown(key: str, table: str) -> tuple[str, str]:
    shown, kind = TABLES[table]
    message = f"there is no key `{key}` in {shown}"
    if near := nearest(key, kind.__struct_fields__):
        return message, f"did you mean `{near[0]}`?"
    homes = [place for place, other in TABLES.values() if key in other.__struct_fields__]
    return message, f"it belongs to {homes[0]}" if homes else EXAMPLE


def _no_choice(value: str, path: str) -> tuple[str, str]:
    parent, _, key = path.rpartition(".")
    choices = _choices(get_type_hints(TABLES[_table(parent)][1])[key])
    near = nearest(value, choices)
    hint = f"did you mean `{near[0]}`?" if near else f"it is one of {', '.join(choices)}"
    return f"{key} is `{value}`", hint


def _choices(hint: Any) -> list[str]:
    """The choices of a `Literal`, however deep it is in a type."""
    return [text for part in get_args(hint) for text in ([part] if isinstance(part, str) else _choices(part))]
