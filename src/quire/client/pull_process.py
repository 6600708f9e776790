"""Fetches one model, in a process of its own: whoever started it can end it, and nothing of a download stays behind in
a server.

Started as `python -m quire.client.pull_process NAME`. A line of JSON goes out for each thing that there is to say:
{"sha256", "total", "done"} while files come, then {"path"} or {"error": [code, status, message, hint]}."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import QuireError
from quire.engine.options import EngineOptions
from quire.engine.start import task_of
from quire.hub import fetch_model
from quire.hub.progress import DownloadProgress, ProgressUpdate

EVERY = 0.2  # seconds
PATIENCE = 5  # added to niceness: whoever computes comes first


class JsonProgress(DownloadProgress):
    @contextmanager
    def track(self, what: str, total: int, sha256: str = "") -> Iterator[ProgressUpdate]:
        told = 0.0

        def update(done: int) -> None:
            nonlocal told
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                _tell({"sha256": sha256, "total": total, "done": max(0, min(done, total))})

        update(0)
        yield update
        _tell({"sha256": sha256, "total": total, "done": total})


def main(name: str) -> None:
    os.nice(PATIENCE)
    try:
        path = fetch_model(name, JsonProgress()).path
        task_of(path, EngineOptions())  # Unsupported, if it is one that cannot be run
        _tell({"path": str(path)})
    except QuireError as error:
        _tell({"error": [error.code, error.status, error.message, error.hint]})


def _tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
