"""`<function=name><parameter=key>value</parameter></function>` and its like: every parameter has tags of its own."""

import json
import re
from dataclasses import dataclass

from quire.text.markers import partial_marker
from quire.text.tools.call_body import HeadedBody
from quire.text.tools.parser import Schemas
from quire.text.tools.values import ONLY_TEXT, json_value, property_types

_CDATA = "<![CDATA["
_TEXT_KINDS = {"true": True, "string": True, None: None}  # what a tag says of its value: whether it is a text


@dataclass(frozen=True, slots=True)
class Tags:
    value: str  # a regex: what opens a value, with the groups `key` and, where the tag tells, `kind`
    value_end: str
    end: str  # of the call
    newlines: bool = False  # a newline at either end of a value belongs to the tags
    cdata: bool = False  # a value may stand in <![CDATA[...]]>


class TaggedBody(HeadedBody):
    """A text is passed on as it comes. Other values are when they are complete: only then their type is known."""

    def __init__(self, index: int, head: re.Pattern[str], tags: Tags, schemas: Schemas) -> None:
        super().__init__(index, head)
        self._tags, self._schemas = tags, schemas
        self._value_tag = re.compile(tags.value)
        self._text = ""  # not parsed yet
        self._searched = 0  # characters of it in which no value ends
        self._in_value = False
        self._types: frozenset[str] | None = None  # of the open value
        self._streams = False  # the open value is a text
        self._at_start = False  # nothing of the open value was passed on
        self._num_parameters = 0

    def _begin(self, name: str) -> None:
        self._schema = self._schemas.get(name)

    def _arguments(self, text: str) -> tuple[str, str]:
        self._text += text
        written = ""
        while not self.done:
            piece = self._parse_value() if self._in_value else self._parse_between()
            if piece is None:
                return written + (self._partial_value() if self._streams else ""), ""
            written += piece
        return written, self._text

    def _parse_between(self) -> str | None:
        """Up to the next value or the end of the call; None if neither is there yet."""
        match = self._value_tag.search(self._text)
        end = self._text.find(self._tags.end)
        if end >= 0 and (match is None or end < match.start()):
            self._text, self.done = self._text[end + len(self._tags.end) :], True
            return "}" if self._num_parameters else "{}"
        if match is None:
            return None
        groups = match.groupdict()
        key, is_text = groups["key"].strip(), _TEXT_KINDS.get(groups.get("kind"), False)
        self._types = property_types(self._schema, key) if is_text is None else None
        self._streams = (is_text or self._types == ONLY_TEXT) and not self._tags.cdata
        self._text, self._in_value, self._at_start = self._text[match.end() :], True, True
        self._num_parameters += 1
        return f"{'{' if self._num_parameters == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: " + (
            '"' if self._streams else ""
        )

    def _parse_value(self) -> str | None:
        """Up to the end of the value; None if it is not there yet."""
        end = self._text.find(self._tags.value_end, self._searched)
        self._searched = max(len(self._text) - len(self._tags.value_end), 0) if end < 0 else 0
        if end < 0:
            return None
        value, self._text = self._text[:end], self._text[end + len(self._tags.value_end) :]
        value = self._without_newline(value)
        if self._tags.newlines:
            value = value.removesuffix("\n")
        if self._tags.cdata and value.startswith(_CDATA) and value.endswith("]]>"):
            value = value[len(_CDATA) : -3]
        streamed, self._streams, self._in_value = self._streams, False, False
        return _escaped(value) + '"' if streamed else json_value(value, self._types)

    def _partial_value(self) -> str:
        """As much of an open value as surely belongs to it, however the text goes on."""
        if self._tags.newlines and self._at_start and len(self._text) < 2:
            return ""
        keep = partial_marker(self._text, self._tags.value_end)
        if self._tags.newlines and self._text[: len(self._text) - keep].endswith("\n"):
            keep += 1
        cut = len(self._text) - keep
        if not cut:
            return ""
        value, self._text = self._without_newline(self._text[:cut]), self._text[cut:]
        self._searched = 0
        return _escaped(value)

    def _without_newline(self, value: str) -> str:
        at_start, self._at_start = self._at_start, False
        return value.removeprefix("\n") if at_start and self._tags.newlines else value


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
