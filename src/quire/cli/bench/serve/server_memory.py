"""Memory of the server under load: of its processes if it runs on this machine, else what its /metrics tell."""

import asyncio
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from quire.cli.bench.resources import peak_rss
from quire.cli.bench.serve.http_client import HttpClient, LoadFailed
from quire.cli.machine import read

LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
SECONDS_BETWEEN_READINGS = 1.0
_LISTENING = "0A"
_RESIDENT = re.compile(rb"^process_resident_memory_bytes(?:\{.*\})? (\S+)", re.MULTILINE)


class ServerMemory:
    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.is_local = client.host in LOCAL
        self._pids = server_pids(client.port) if self.is_local else set()
        self._told = 0  # bytes, by /metrics

    async def watch(self) -> None:
        """Until it is cancelled, or there is no use in it."""
        while not self._pids:
            try:
                reply = await self._client.get("/metrics")
            except LoadFailed:
                return
            match = _RESIDENT.search(reply.body)
            if match is None:
                return
            self._told = max(self._told, int(float(match[1])))
            await asyncio.sleep(SECONDS_BETWEEN_READINGS)

    def figures(self) -> dict[str, Any]:
        """The sum over the server's processes of the peak that each has had since it began."""
        peak = sum(peak_rss(pid) or 0 for pid in self._pids) or self._told or None
        reason = "no process with that port may be read" if self.is_local else "the server is on another machine"
        missing = {} if peak else {"peak_rss_bytes": f"{reason}, and its /metrics do not tell"}
        return {"peak_rss_bytes": peak, "not_measured": missing}


def server_pids(port: int) -> set[int]:
    """The processes that listen on a port of this machine, and all that they started."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    processes = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    children = defaultdict(list)
    for pid in processes:
        # The second field is the program's name in parentheses, which may have spaces.
        fields = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        if fields:
            children[int(fields[1])].append(pid)
    found: set[int] = set()
    queue = [pid for pid in processes if sockets & _links(pid)] if sockets else []
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children[pid]
    return found


def _inodes(port: int) -> set[str]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in read(Path(f"/proc/net/{name}")).splitlines()[1:]]
    return {row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port}


def _links(pid: int) -> set[str]:
    """What the open files of a process are; none of a process that may not be looked at."""
    links = set()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            links.add(str(path.readlink()))
    except OSError:
        pass
    return links
