"""What threads of a transfer tell the engine's loop, which takes it between two steps."""

import contextlib
import os
import select
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

News = TypeVar("News")
PIPE_BYTES = 2**16  # read at once


class NewsQueue(Generic[News]):
    """Any thread puts news in; the loop takes it. Its file is readable while there is any."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._poll = select.poll()
        self._poll.register(self._read_end, select.POLLIN)
        weakref.finalize(self, _close, self._read_end, self._write_end)

    def fileno(self) -> int:
        return self._read_end

    def __bool__(self) -> bool:
        return bool(self._news)

    def put(self, news: News) -> None:
        self._news.append(news)
        with contextlib.suppress(BlockingIOError):  # the pipe is full, and so readable
            os.write(self._write_end, b".")

    def take(self) -> Iterator[News]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, PIPE_BYTES)  # before the news: what comes later makes it readable again
        while self._news:
            yield self._news.popleft()

    def wait(self, seconds: float) -> None:
        """Until there is news, or `seconds` have passed."""
        self._poll.poll(seconds * 1000)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
