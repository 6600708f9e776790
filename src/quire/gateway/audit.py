"""The audit log: a JSON object a line for each decision. It has names and numbers, never keys, prompts or answers."""

import logging
import time
from pathlib import Path
from typing import IO, Any

from quire.core.errors import BadRequest
from quire.gateway.wire import json_bytes

log = logging.getLogger("quire.gateway")


class AuditLog:
    """Without a path nothing is written. The file is opened again on SIGHUP, so that it can be rotated."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.reopen(path)

    def reopen(self, path: str | None) -> None:
        opened: IO[bytes] | None = None
        if path is not None:
            try:
                opened = Path(path).open("ab", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise BadRequest(f"cannot write to {path}: {error.strerror}", param="audit_log") from None
        self.close()
        self._path, self._file = path, opened

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, decision: str, **facts: Any) -> None:
        if self._file is None:
            return
        line = {"time": round(time.time(), 3), "decision": decision} | {k: v for k, v in facts.items() if v is not None}
        try:
            self._file.write(json_bytes(line) + b"\n")
        except OSError as error:
            log.error("the audit log cannot be written: %s", error.strerror)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
