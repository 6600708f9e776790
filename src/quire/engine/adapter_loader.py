"""LoRA adapters of a running engine: read in a thread, added between steps, removed when no request uses them."""

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.core.errors import QuireError
from quire.engine.engine import Engine
from quire.engine.messages import AdapterLoaded, AdapterUnloaded, ErrorInfo, FromEngine
from quire.runtime.adapters import LoadedAdapter

log = logging.getLogger("quire.engine")


def load_adapters(
    engine: Engine, adapters: Mapping[str, str], restarted: bool, send: Callable[[FromEngine], None]
) -> None:
    """Load the adapters that an engine starts with. After a restart, one that is gone is reported and skipped."""
    for key, path in adapters.items():
        try:
            engine.add_adapter(key, engine.executor.load_adapter(Path(path)))
        except QuireError as error:
            if not restarted:
                raise
            log.error("adapter %s could not be loaded again: %s", key, error)
            send(AdapterUnloaded(key))


class AdapterLoader:
    """Adapters that are loaded and unloaded while the engine runs. The outcome is sent as a message."""

    def __init__(self, engine: Engine, send: Callable[[FromEngine], None]) -> None:
        self._engine, self._send = engine, send
        self._thread: ThreadPoolExecutor | None = None
        self._loaded: deque[tuple[str, LoadedAdapter | Exception]] = deque()
        self._unloading: set[str] = set()
        self._read_end, self._write_end = os.pipe()

    def fileno(self) -> int:
        """Becomes readable when `update` has something to do."""
        return self._read_end

    def load(self, key: str, path: Path) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "adapters")
        self._thread.submit(self._load, key, path)

    def _load(self, key: str, path: Path) -> None:
        try:
            self._loaded.append((key, self._engine.executor.load_adapter(path)))
        except Exception as error:
            self._loaded.append((key, error))
        os.write(self._write_end, b".")

    def unload(self, key: str) -> None:
        if key in self._engine.adapters:
            self._unloading.add(key)
        else:
            self._send(AdapterUnloaded(key))

    def update(self) -> None:
        """Between two steps: add what has been read, remove what no request uses any more."""
        while self._loaded:
            os.read(self._read_end, 1)
            key, loaded = self._loaded.popleft()
            if isinstance(loaded, Exception):
                self._send(AdapterLoaded(key, ErrorInfo.of(loaded)))
            else:
                self._engine.add_adapter(key, loaded)
                self._send(AdapterLoaded(key))
        for key in [key for key in self._unloading if not self._engine.uses_adapter(key)]:
            self._unloading.remove(key)
            self._engine.remove_adapter(key)
            self._send(AdapterUnloaded(key))
