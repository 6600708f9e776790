"""The input file of a batch: one request on each line, as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from quire.core.errors import QuireError
from quire.server.http.body import explain


class BadBatch(QuireError):
    """The file is wrong. An error of a single request goes into its result."""

    status, code = 400, "bad_batch"


class BatchLine(Struct, kw_only=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


RequestKey = tuple[str, int]  # a custom_id, and how many lines before it have the same


@dataclass(frozen=True, slots=True)
class BatchRequest:
    line: BatchLine
    repeat: int = 0

    @property
    def key(self) -> RequestKey:
        return self.line.custom_id, self.repeat


_decoder = msgspec.json.Decoder(BatchLine)


class BatchRequests:
    """Requests are read when they are iterated: a batch may be larger than memory."""

    def __init__(self, path: Path) -> None:
        """Read the whole file once, so that a mistake in its last line is found before anything is computed."""
        self._path = path
        self.keys = {request.key for request in self}

    def __iter__(self) -> Iterator[BatchRequest]:
        seen: Counter[str] = Counter()
        for _, line in self._lines():
            yield BatchRequest(line, seen[line.custom_id])
            seen[line.custom_id] += 1

    def _lines(self) -> Iterator[tuple[int, BatchLine]]:
        try:
            with self._path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        yield number, self._line(number, text)
        except OSError as error:
            raise BadBatch(f"{self._path} cannot be read: {error.strerror}") from error

    def _line(self, number: int, text: bytes) -> BatchLine:
        try:
            return _decoder.decode(text)
        except msgspec.ValidationError as error:
            problem = explain(str(error), BatchLine).message
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = f"this is not JSON: {error}"
        except RecursionError:
            problem = "this is nested too deeply"
        raise BadBatch(
            f"{self._path}, line {number}: {problem}",
            'a line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}',
        )
