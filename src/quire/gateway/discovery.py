"""Workers that are found while the gateway runs: in a file, by DNS names that have an address for each of them, and in
a Ray cluster."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from quire.gateway.config import Discovery, Table, WorkerEntry, worker_problems
from quire.gateway.ray_workers import RayWorkers

log = logging.getLogger("quire.gateway")

Found = Callable[[list[WorkerEntry]], None]


class WorkersFile(Table):
    workers: list[WorkerEntry] = msgspec.field(default_factory=list)


class WorkerDiscovery:
    """Looks every `interval` seconds, and calls `found` with all workers when they have changed.

    What cannot be read or resolved leaves its workers as they were: a name server that is away ends no request."""

    def __init__(self, settings: Discovery, found: Found) -> None:
        self._settings, self._found = settings, found
        self._file: list[WorkerEntry] = []
        self._file_stamp = (0, 0)  # time of its last change, and size
        self._resolved: list[list[WorkerEntry]] = [[] for _ in settings.dns]
        self._ray = RayWorkers(settings.ray, settings.interval) if settings.ray is not None else None
        self._registered: list[WorkerEntry] = []
        self._last: list[WorkerEntry] = []
        self._problems: dict[str, str] = {}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("workers could not be looked for")
            await asyncio.sleep(self._settings.interval)

    async def look(self) -> None:
        if self._settings.file is not None:
            self._read(Path(self._settings.file))
        for place, entry in enumerate(self._settings.dns):
            await self._resolve(place, entry)
        if self._ray is not None:
            self._ask_ray(self._ray)
        resolved = [each for many in self._resolved for each in many]
        entries = {entry.label: entry for entry in (*self._file, *resolved, *self._registered)}
        if (now := list(entries.values())) != self._last:
            self._last = now
            self._found(now)

    def _read(self, path: Path) -> None:
        try:
            stat = path.stat()
            if self._file_stamp == (stat.st_mtime_ns, stat.st_size):
                return
            decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
            workers = decode(path.read_bytes(), type=WorkersFile).workers
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._note(str(path), str(error))
            return
        problems = "; ".join(worker_problems(workers))
        if not problems:
            self._file, self._file_stamp = workers, (stat.st_mtime_ns, stat.st_size)
        self._note(str(path), problems)

    async def _resolve(self, place: int, entry: WorkerEntry) -> None:
        parts = urlsplit(entry.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._note(host, str(error))
            return
        addresses = sorted({str(info[4][0]) for info in found})
        self._resolved[place] = [_at(entry, host, address, port) for address in addresses]
        self._note(host, "")

    def _ask_ray(self, ray: RayWorkers) -> None:
        problem = ray.problem
        if not problem and ray.urls is not None:
            workers = [WorkerEntry(url=url) for url in ray.urls]
            problem = "; ".join(worker_problems(workers))
            if not problem:
                self._registered = workers
        self._note(f"Ray at {self._settings.ray}", problem)

    def _note(self, source: str, problem: str) -> None:
        if problem != self._problems.get(source, ""):
            self._problems[source] = problem
            if problem:
                log.error("workers of %s stay as they were: %s", source, problem)
            else:
                log.info("workers of %s are known again", source)

    async def close(self) -> None:
        if self._ray is not None:
            await self._ray.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _at(entry: WorkerEntry, host: str, address: str, port: int) -> WorkerEntry:
    """The worker at one address of a name; endpoints of the name are those of the address, too, and its certificate is
    for the name."""
    shown = f"[{address}]" if ":" in address else address
    parts = urlsplit(entry.url)
    url = urlunsplit((parts.scheme, f"{shown}:{port}", parts.path, "", ""))
    endpoints = {
        name: endpoint.replace(f"//{host}:", f"//{shown}:")
        for name in ("kv_events", "kv_replay")
        if (endpoint := getattr(entry, name)) is not None
    }
    tls_name = entry.tls_name or (host if parts.scheme == "https" else "")
    return msgspec.structs.replace(entry, url=url, name="", tls_name=tls_name, **endpoints)
