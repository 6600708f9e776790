"""A frame that is sent again and again with another text in one place."""

from uuid import uuid4

import msgspec

TEXT = uuid4().hex  # stands for the text: no client can know it

_encode = msgspec.json.Encoder().encode
_ENCODED = _encode(TEXT)


class TextTemplate:
    def __init__(self, frame: bytes) -> None:
        """`frame` has `TEXT` in one place, as JSON."""
        self._before, self._after = frame.split(_ENCODED)

    def fill(self, text: str) -> bytes:
        """The frame with this text."""
        return self._before + _encode(text) + self._after
