"""The input file of a batch: one request on each line, as JSON."""

from collections.abc import Iterator
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


_decoder = msgspec.json.Decoder(BatchLine)


class BatchRequests:
    """Requests are read when they are iterated: a batch may be larger than memory."""

    def __init__(self, path: Path) -> None:
        """Read the whole file once, so that a mistake in its last line is found before anything is computed."""
        self._path = path
        self.ids: set[str] = set()
        for number, line in self._lines():
            if line.custom_id in self.ids:
                raise BadBatch(
                    f"{path}, line {number}: custom_id `{line.custom_id}` was used before",
                    "results are matched by it: give each request its own",
                )
            self.ids.add(line.custom_id)

    def __iter__(self) -> Iterator[BatchLine]:
        return (line for _, line in self._lines())

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
