"""A frame that is sent again and again with another text in one place."""

from uuid import uuid4

import msgspec

from quire.server.http.wire_format import WireFormat

TEXT = uuid4().hex  # stands for the text: no client can know it

_encode = msgspec.json.Encoder().encode
_ENCODED = _encode(TEXT)


class TextTemplate:
    def __init__(self, wire: WireFormat, example: object) -> None:
        """`example` has `TEXT` in one place."""
        self._before, self._after = wire.frame(example).split(_ENCODED)

    def fill(self, text: str) -> bytes:
        """The same bytes as the frame of the example with this text."""
        return self._before + _encode(text) + self._after
