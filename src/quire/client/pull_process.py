"""Fetches one model in a process of its own, so that a server can end it and keeps nothing of the download in memory.

Started as `python -m quire.client.pull_process NAME`. It prints lines of JSON:
{"sha256", "total", "done"} while files arrive, then {"path"} or {"error": [code, status, message, hint]}."""

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

REPORT_INTERVAL = 0.2  # seconds
DOWNLOAD_NICENESS = 5  # added to the process's: computing comes first


class JsonProgress(DownloadProgress):
    @contextmanager
    def track(self, what: str, total: int, sha256: str = "") -> Iterator[ProgressUpdate]:
        reported = 0.0  # time.monotonic() of the last line

        def update(done: int) -> None:
            nonlocal reported
            if time.monotonic() - reported >= REPORT_INTERVAL:
                reported = time.monotonic()
                _report({"sha256": sha256, "total": total, "done": max(0, min(done, total))})

        update(0)
        yield update
        _report({"sha256": sha256, "total": total, "done": total})


def main(name: str) -> None:
    os.nice(DOWNLOAD_NICENESS)
    try:
        path = fetch_model(name, JsonProgress()).path
        task_of(path, EngineOptions())  # raises Unsupported if Quire cannot run it
        _report({"path": str(path)})
    except QuireError as error:
        _report({"error": [error.code, error.status, error.message, error.hint]})


def _report(line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
