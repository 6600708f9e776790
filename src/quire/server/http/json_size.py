"""How many values a JSON body has, found before it is decoded: a byte of JSON can become 50 bytes of objects, and a
decoder holds the interpreter while it makes them."""

import re

from quire.core.errors import BadRequest

MAX_VALUES = 1 << 20  # of arrays and objects together; token ids, mostly
MAX_MEMBERS = 1 << 16  # of objects; also a limit of the number of objects and of arrays
SCAN_BYTES = 1 << 18  # that one call looks at, so that other threads run in between

LIMITS = {b",": MAX_VALUES, b":": MAX_MEMBERS, b"{": MAX_MEMBERS, b"[": MAX_MEMBERS}
NAMES = {b",": "values", b":": "members of objects", b"{": "objects", b"[": "arrays"}

# Possessive: nothing is kept for backtracking.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # a string, without its quotes
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_WHOLE = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)  # up to a string that does not end


def check_json_size(body: bytes) -> None:
    """Raises BadRequest if the body has too many values, whether or not it is JSON."""
    if len(body) <= MAX_MEMBERS:
        return
    starts = range(0, len(body), SCAN_BYTES)
    if all(sum(body.count(mark, at, at + SCAN_BYTES) for at in starts) <= limit for mark, limit in LIMITS.items()):
        return  # as nearly always; marks in strings were counted as well
    counts, position = dict.fromkeys(LIMITS, 0), 0
    while position < len(body):
        end = _end(_WHOLE, body, position)
        values = _STRING.sub(b"", body[position:end])
        for mark, limit in LIMITS.items():
            counts[mark] += values.count(mark)
            if counts[mark] > limit:
                raise _too_many(NAMES[mark], limit)
        position = _string_end(body, end + 1) if body[end : end + 1] == b'"' else end


def _string_end(body: bytes, position: int) -> int:
    """Where the text behind a string begins, whose own text begins at `position`."""
    while position < len(body):
        position = _end(_INSIDE, body, position)
        if body[position : position + 1] == b'"':
            return position + 1
        position += 2 * (body[position : position + 1] == b"\\")  # an escape that SCAN_BYTES has cut
    return position


def _end(pattern: "re.Pattern[bytes]", body: bytes, position: int) -> int:
    match = pattern.match(body, position, position + SCAN_BYTES)
    assert match is not None, "the pattern also matches nothing"
    return match.end()


def _too_many(what: str, limit: int) -> BadRequest:
    return BadRequest(f"the body has more than {limit} {what}", "send several requests")
