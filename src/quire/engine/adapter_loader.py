"""Adapters of an engine that runs: read in a thread, added between steps, removed once nobody uses them."""

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.core.errors import QuireError
from quire.engine.engine import Engine
from quire.engine.messages import AdapterLoaded, AdapterUnloaded, ErrorInfo, FromEngine
from quire.engine.structured_engine import StructuredEngine
from quire.runtime.adapters import LoadedAdapter

log = logging.getLogger("quire.engine")


def load_adapters(
    engine: Engine, adapters: Mapping[str, str], restarted: bool, tell: Callable[[FromEngine], None]
) -> None:
    """Those that it starts with. When it starts anew, one that is gone meanwhile keeps nobody from the others."""
    for key, path in adapters.items():
        try:
            engine.add_adapter(key, engine.executor.load_adapter(Path(path)))
        except QuireError as error:
            if not restarted:
                raise
            log.error("adapter %s could not be loaded again: %s", key, error)
            tell(AdapterUnloaded(key))


class AdapterLoader:
    """Those that come and go later. What comes of it is told."""

    def __init__(self, engine: Engine, compiling: StructuredEngine, tell: Callable[[FromEngine], None]) -> None:
        self._engine, self._compiling, self._tell = engine, compiling, tell
        self._worker: ThreadPoolExecutor | None = None
        self._done: deque[tuple[str, LoadedAdapter | Exception]] = deque()
        self._leaving: set[str] = set()
        self._wake, self._waker = os.pipe()

    def fileno(self) -> int:
        """Can be read from when `tidy` has something to do."""
        return self._wake

    def load(self, key: str, path: Path) -> None:
        self._worker = self._worker or ThreadPoolExecutor(1, "adapters")
        self._worker.submit(self._load, key, path)

    def _load(self, key: str, path: Path) -> None:
        try:
            self._done.append((key, self._engine.executor.load_adapter(path)))
        except Exception as problem:
            self._done.append((key, problem))
        os.write(self._waker, b".")

    def unload(self, key: str) -> None:
        if key in self._engine.adapters:
            self._leaving.add(key)
        else:
            self._tell(AdapterUnloaded(key))

    def tidy(self) -> None:
        """Between two steps."""
        while self._done:
            os.read(self._wake, 1)
            key, loaded = self._done.popleft()
            if isinstance(loaded, Exception):
                self._tell(AdapterLoaded(key, ErrorInfo.of(loaded)))
            else:
                self._engine.add_adapter(key, loaded)
                self._tell(AdapterLoaded(key))
        for key in [key for key in self._leaving if not self._compiling.uses_adapter(key)]:
            self._leaving.remove(key)
            self._engine.remove_adapter(key)
            self._tell(AdapterUnloaded(key))
