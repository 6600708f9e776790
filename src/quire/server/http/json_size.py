"""How many values a JSON body has, found before it is decoded: a byte of JSON can become 50 bytes of objects, and a
decoder holds the interpreter while it makes them."""

import re

from quire.core.errors import BadRequest

MAX_VALUES = 1 << 20  # of arrays and objects together; token ids, mostly
MAX_MEMBERS = 1 << 16  # of objects; also a limit of the number of objects and of arrays
SCAN_BYTES = 1 << 20  # that one call looks at

LIMITS = {b",": MAX_VALUES, b":": MAX_MEMBERS, b"{": MAX_MEMBERS, b"[": MAX_MEMBERS}
NAMES = {b",": "values", b":": "members of objects", b"{": "objects", b"[": "arrays"}

_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # possessive: nothing is kept for backtracking


def check_json_size(body: bytes) -> None:
    """Raises BadRequest if the body has too many values, whether or not it is JSON."""
    if all(_count(body, mark, 0, len(body)) <= limit for mark, limit in LIMITS.items()):
        return  # as nearly always; marks in strings were counted as well
    counts = dict.fromkeys(LIMITS, 0)
    position, num_strings = 0, 0
    while position < len(body):
        quote = body.find(b'"', position)
        end = len(body) if quote < 0 else quote
        for mark, limit in LIMITS.items():
            counts[mark] += _count(body, mark, position, end)
            if counts[mark] > limit:
                raise _too_many(NAMES[mark], limit)
        num_strings += 1
        if num_strings > MAX_VALUES + MAX_MEMBERS:
            raise _too_many("texts", MAX_VALUES)
        position = len(body) if quote < 0 else _string_end(body, quote + 1)


def _count(body: bytes, mark: bytes, begin: int, end: int) -> int:
    """In steps, so that other threads run in between."""
    return sum(body.count(mark, at, min(at + SCAN_BYTES, end)) for at in range(begin, end, SCAN_BYTES))


def _string_end(body: bytes, position: int) -> int:
    """Where the text behind a string begins, whose own text begins at `position`. In steps, so that other threads run
    in between."""
    while position < len(body):
        match = _INSIDE.match(body, position, position + SCAN_BYTES)
        assert match is not None, "it also matches nothing"
        position = match.end()
        if body[position : position + 1] == b'"':
            return position + 1
        position += 2 * (body[position : position + 1] == b"\\")  # an escape that the limit has cut
    return position


def _too_many(what: str, limit: int) -> BadRequest:
    return BadRequest(f"the body has more than {limit} {what}", "send several requests")
