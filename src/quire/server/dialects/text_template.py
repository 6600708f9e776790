"""JSON that is sent again and again with another text in one place."""

from uuid import uuid4

import msgspec

TEXT = uuid4().hex  # stands for the text: no client can know it

_encode = msgspec.json.Encoder().encode
_ENCODED = _encode(TEXT)


class TextTemplate:
    def __init__(self, example: object) -> None:
        """`example` has `TEXT` in one place."""
        self._before, self._after = _encode(example).split(_ENCODED)

    def fill(self, text: str) -> msgspec.Raw:
        """What encodes to the same bytes as the example with this text."""
        return msgspec.Raw(self._before + _encode(text) + self._after)
