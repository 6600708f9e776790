"""From the bytes a client sends to a typed body, or to an error that names the field."""

import re
from collections.abc import Callable, Sized
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from quire.core.errors import BadRequest, BodyTooLarge
from quire.server.errors import NotJson

MAX_TEXTS = 2048  # of one request, as OpenAI

Body = TypeVar("Body", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<at>[^`]*)`)?$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<at>[^`]*)`)?$")
_WRONG = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<at>[^`]*)`$")


async def read_body(request: Request, limit: int, json_only: bool = True) -> bytes:
    """The whole body. The limit holds while it is read, whatever Content-Length says or does not say. Without
    `json_only` the Content-Type does not matter: `curl -d` sends one that is wrong."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if json_only and kind != "application/json" and not kind.endswith("+json"):
        raise NotJson(f"the body is `{kind}`", "send JSON with `Content-Type: application/json`")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes", "send less, or raise the server's `max_body_bytes`")


def decode(
    body: bytes,
    decoder: msgspec.json.Decoder[Body],
    explained: Callable[[str, type[msgspec.Struct]], BadRequest] | None = None,
) -> Body:
    """`explained` says in a dialect's own words what is wrong; `explain` says it in ours."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise (explained or explain)(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def explain(message: str, body: type[msgspec.Struct]) -> BadRequest:
    """What msgspec says, with the field it is about."""
    kind, path, what = parts(message)
    if kind == "unknown":
        near = [] if "." in path else get_close_matches(path, body.__struct_fields__, n=1)
        hint = f"did you mean `{near[0]}`?" if near else ""
        return BadRequest(f"unknown field `{path}`", hint, param=path)
    if kind == "missing":
        return BadRequest(f"field `{path}` is missing", param=path)
    return BadRequest(f"`{path}`: {what}", param=path) if path else BadRequest(f"the body: {what}")


def parts(message: str) -> tuple[Literal["unknown", "missing", "wrong"], str, str]:
    """Of what msgspec says: what kind of mistake it is, the path of the field ("" for the body), and the rest."""
    if found := _UNKNOWN.match(message):
        return "unknown", _path(found["at"], found["field"]), ""
    if found := _MISSING.match(message):
        return "missing", _path(found["at"], found["field"]), ""
    found = _WRONG.match(message)
    path, what = (found["at"], found["what"]) if found else ("", message)
    return "wrong", path, what[:1].lower() + what[1:]


def texts_or_ids(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """Of what may be a text, texts, ids, or lists of ids: one element for each text."""
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


def _path(at: str | None, field: str) -> str:
    return f"{at}.{field}" if at else field
