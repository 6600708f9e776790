"""Servers that have registered in a Ray cluster, as a process of its own sees them.

A process that is connected to Ray ends when the cluster does. The gateway goes on with the workers it knows."""

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

from quire.core.ray_names import NAMESPACE, WORKER

MAX_LINE = 1 << 20  # bytes


class RayWorkers:
    """Keeps the process running. `urls` are the addresses of the servers, None while nothing was heard."""

    def __init__(self, address: str, interval: float) -> None:
        self._command = [sys.executable, "-m", "quire.gateway.ray_workers", address, str(interval)]
        self._interval = interval
        self.urls: list[str] | None = None
        self.problem = ""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,  # it ends when this process does
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE,
                start_new_session=True,
            )
            assert process.stdout is not None
            try:
                async for line in process.stdout:
                    self._hear(json.loads(line))
            except ValueError:
                self.problem = "what was heard of the Ray cluster is no JSON"
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()
            self.problem = self.problem or "the Ray cluster is gone"
            await asyncio.sleep(self._interval)

    def _hear(self, message: dict[str, Any]) -> None:
        self.problem = str(message.get("problem", ""))
        if "urls" in message:
            self.urls = [str(url) for url in message["urls"]]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def main(address: str, interval: float) -> int:
    """Print the addresses of the servers as JSON, every `interval` seconds."""
    try:
        import ray
    except ImportError:
        _tell({"problem": "ray is not installed: pip install 'quire[ray]'"})
        return 1
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        _tell({"problem": " ".join(str(error).split())[:300]})
        return 1
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    while True:
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
        _tell({"urls": sorted(name.removeprefix(WORKER) for name in names if name.startswith(WORKER))})
        time.sleep(interval)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
