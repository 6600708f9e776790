"""Decodes the body of a request, or raises an error that names the field."""

import asyncio
import re
from collections.abc import Callable, Sized
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from quire.core.errors import BadRequest, BodyTooLarge, shortened
from quire.core.nearest import nearest
from quire.server.errors import NotJson
from quire.server.http.json_size import MAX_MEMBERS, check_json_size

MAX_TEXTS = 2048  # in one request, as at OpenAI
INLINE_BYTES = 1 << 14  # larger bodies are decoded and parsed in a thread, so that other streams go on
MAX_EXPLAINED = 2000  # characters of a decoder's message, which quotes what was sent

Body = TypeVar("Body", bound=msgspec.Struct)
Explain = Callable[[str, type[msgspec.Struct]], BadRequest]
T = TypeVar("T")

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?$")
_WRONG = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")


async def read_body(request: Request, limit: int, json_only: bool = True) -> bytes:
    """The whole body. The limit is checked while it is received: Content-Length may be missing or wrong. Without
    `json_only` any Content-Type is accepted, because `curl -d` sends a wrong one."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if json_only and kind != "application/json" and not kind.endswith("+json"):
        raise NotJson(f"the body is `{kind}`", "send JSON with `Content-Type: application/json`")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    if size <= MAX_MEMBERS:  # too short for too many values
        return b"".join(parts)
    return await asyncio.to_thread(_joined, parts)


def _joined(parts: list[bytes]) -> bytes:
    body = b"".join(parts)
    check_json_size(body)
    return body


async def read_json(
    request: Request,
    limit: int,
    decoder: msgspec.json.Decoder[Body],
    *,
    json_only: bool = True,
    explained: Explain | None = None,
) -> Body:
    """The whole body, decoded."""
    body = await read_body(request, limit, json_only)
    return await in_thread_if_large(body, decode, body, decoder, explained)


async def in_thread_if_large(body: bytes, function: Callable[..., T], *arguments: Any) -> T:
    """function(*arguments), in a thread if the body is large."""
    return await asyncio.to_thread(function, *arguments) if len(body) > INLINE_BYTES else function(*arguments)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes", "send less, or raise the server's `max_body_bytes`")


def decode(body: bytes, decoder: msgspec.json.Decoder[Body], explained: Explain | None = None) -> Body:
    """`explained` makes the error of a dialect; `explain` is the default."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise (explained or explain)(shortened(str(error), MAX_EXPLAINED), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def explain(message: str, body: type[msgspec.Struct]) -> BadRequest:
    """The error for a message of msgspec, with the field it is about."""
    kind, path, what = parts(message)
    if kind == "unknown":
        near = [] if "." in path else nearest(path, body.__struct_fields__)
        hint = f"did you mean `{near[0]}`?" if near else ""
        return BadRequest(f"unknown field `{path}`", hint, param=path)
    if kind == "missing":
        return BadRequest(f"field `{path}` is missing", param=path)
    return BadRequest(f"`{path}`: {what}", param=path) if path else BadRequest(f"the body: {what}")


def parts(message: str) -> tuple[Literal["unknown", "missing", "wrong"], str, str]:
    """Splits a message of msgspec: the kind of mistake, the path of the field ("" for the body), and the rest."""
    if match := _UNKNOWN.match(message):
        return "unknown", _path(match["path"], match["field"]), ""
    if match := _MISSING.match(message):
        return "missing", _path(match["path"], match["field"]), ""
    match = _WRONG.match(message)
    path, what = (match["path"], match["what"]) if match else ("", message)
    return "wrong", path, what[:1].lower() + what[1:]


def texts_or_ids(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """One element for each text, from a text, texts, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if not given or len(kinds) > 1:
        what = "is empty" if not given else "mixes texts and ids"
        raise BadRequest(f"{param} {what}", "send a text, texts, token ids, or lists of token ids", param=param)
    texts: list[Any] = [given] if kinds == {int} else given
    check_number(texts, param)
    return texts


def check_number(texts: Sized, param: str) -> None:
    if len(texts) > MAX_TEXTS:
        raise BadRequest(
            f"{param} has {len(texts)} texts, and {MAX_TEXTS} are allowed", "send several requests", param=param
        )


def _path(parent: str | None, field: str) -> str:
    return f"{parent}.{field}" if parent else field
