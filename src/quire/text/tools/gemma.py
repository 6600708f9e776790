"""`call:name{city:<|"|>Paris<|"|>,days:3}`: objects with bare keys and quotes that are tokens, of Gemma 4."""

import json
import re
from typing import Any

from quire.text.tools.parser import Schemas
from quire.text.tools.values import json_value, property_types

_HEAD = re.compile(r"\s*call:(?P<name>[\w.:-]+?)\s*(?=\{)")
_KEY = re.compile(r"([^:{}\[\],]+):")
_SCALAR = re.compile(r"[^,{}\[\]]+")
_MAX_DEPTH = 64


def gemma_calls(text: str, schemas: Schemas, quote: str) -> list[tuple[str, str]]:
    """The one call of the text; empty if it is none. A number between quotes is one where the schema says so."""
    head = _HEAD.match(text)
    if head is None:
        return []
    try:
        reader = _ObjectReader(text, head.end(), quote)
        arguments = reader.value(_MAX_DEPTH)
    except (ValueError, IndexError):
        return []
    if text[reader.position :].strip():
        return []
    schema = schemas.get(head["name"])
    for key, value in arguments.items():
        if isinstance(value, str) and (types := property_types(schema, key)) is not None and "string" not in types:
            arguments[key] = json.loads(json_value(value, types))
    return [(head["name"], json.dumps(arguments, ensure_ascii=False))]


class _ObjectReader:
    """Raises ValueError or IndexError where the text is not as it should be."""

    def __init__(self, text: str, position: int, quote: str) -> None:
        self._text, self.position, self._quote = text, position, quote

    def value(self, depth: int) -> Any:
        if not depth:
            raise ValueError("nested too deep")
        self._skip_space()
        if self._text.startswith(self._quote, self.position):
            return self._quoted()
        if self._text[self.position] == "{":
            return dict(self._items("}", lambda: (self._key(), self.value(depth - 1))))
        if self._text[self.position] == "[":
            return list(self._items("]", lambda: self.value(depth - 1)))
        return self._scalar()

    def _items(self, close: str, item: Any) -> Any:
        self.position += 1
        self._skip_space()
        while self._text[self.position] != close:
            yield item()
            self._skip_space()
            if self._text[self.position] == ",":
                self.position += 1
                self._skip_space()
            elif self._text[self.position] != close:
                raise ValueError("neither a comma nor the end")
        self.position += 1

    def _key(self) -> str:
        if self._text.startswith(self._quote, self.position):
            key = self._quoted()
            self._skip_space()
            if self._text[self.position] != ":":
                raise ValueError("a key without a value")
            self.position += 1
            return key
        match = _KEY.match(self._text, self.position)
        if match is None:
            raise ValueError("no key")
        self.position = match.end()
        return match[1].strip().strip('"')

    def _quoted(self) -> str:
        begin = self.position + len(self._quote)
        end = self._text.index(self._quote, begin)
        self.position = end + len(self._quote)
        return self._text[begin:end]

    def _scalar(self) -> Any:
        match = _SCALAR.match(self._text, self.position)
        if match is None:
            raise ValueError("no value")
        self.position = match.end()
        text = match[0].strip()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _skip_space(self) -> None:
        while self._text[self.position].isspace():
            self.position += 1
