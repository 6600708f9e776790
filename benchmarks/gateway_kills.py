"""Streams through a gateway while the servers behind it are killed again and again: is any lost, is any token another?

    python -m benchmarks.gateway_kills              100 streams over 3 servers, one killed every 5 s for 5 minutes
    python -m benchmarks.gateway_kills --streams 12 --servers 2 --every 4 --seconds 20
    python -m benchmarks.gateway_kills --seconds 60 --policies none write_through --rounds 3

A server is killed with its engine (kill -9), as a machine that goes down, and started again at the same port. Each
stream is read once undisturbed, and then again and again; its tokens have to be the same. Told at the end: streams
read, how many were lost or differed (none should), the longest gaps between two tokens of a stream, also of the
undisturbed ones, and what those of streams that went on consist of. The servers share a directory of KV blocks in
memory (/dev/shm), with the write policy that `--policies` names; none: they share nothing."""

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gateway import CORES, free_port
from benchmarks.gateway_gaps import GapTrace, Kill
from benchmarks.kills import Kills, read_all, read_while_killed
from benchmarks.machine import describe
from benchmarks.processes import Running, interruptible, progress, running

SECONDS_TO_START = 120.0
AIM = 1.5  # seconds: the longest gap between two tokens of a stream
WITHOUT = "none"  # a directory that the servers share
POLICIES = (WITHOUT, "write_back", "write_through")
DISK_GIB = 2


class Servers:
    """Of one model, each at a port of its own."""

    def __init__(self, stack: ExitStack, model: str, count: int, flags: list[str], cores_each: int) -> None:
        self._stack, self._model, self._flags, self._cores_each = stack, model, flags, cores_each
        self.ports = [free_port() for _ in range(count)]
        self._rng = random.Random(2)
        self.kills: list[Kill] = []
        self._started: list[Running] = []
        self._processes = {port: self._start(port) for port in self.ports}

    def _start(self, port: int) -> Running:
        command = [sys.executable, "-m", "quire.cli.main", "serve", self._model, "--port", str(port), *self._flags]
        command = on_cores(self.ports.index(port) + 1, self._cores_each, command)
        self._started.append(self._stack.enter_context(running(command)))
        return self._started[-1]

    def said(self) -> list[str]:
        """Lines of all of them, also of those that were killed."""
        return [line for process in self._started for line in process.said(num_lines=1 << 30).splitlines()]

    def kill_one(self) -> int:
        """One that is ready, while another one is."""
        ready = [port for port in self.ports if is_ready(port)]
        if len(ready) < 2:
            return 0
        port = self._rng.choice(ready)
        self.kills.append(Kill(time.time(), url_of(port)))
        for process in reversed(self._processes[port].tree()):
            process.kill()
        self._processes[port].process.wait()
        self._processes[port] = self._start(port)
        return 1


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"{url_of(port)}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_until_ready(ports: list[int]) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while not all(map(is_ready, ports)):
        if time.monotonic() > end:
            raise SystemExit(f"the servers were not ready within {SECONDS_TO_START:.0f} s")
        time.sleep(0.1)


def config(ports: list[int], audit_log: Path) -> str:
    workers = "".join(f'[[workers]]\nname = "{url_of(port)}"\nurl = "{url_of(port)}"\n' for port in ports)
    listeners = f"port = 0\nadmin_port = 0\naudit_log = {json.dumps(str(audit_log))}\n"
    return f"{listeners}[faults]\nhealth_interval = 0.2\nbreaker_seconds = 0.5\n{workers}"


def quantiles(gaps: list[float]) -> str:
    ordered = sorted(gaps) or [0.0]
    p50, p90 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.9))
    return f"{p50:.2f} s (median), {p90:.2f} s (p90), {ordered[-1]:.2f} s (most)"


def flags_of(policy: str, folder: str, args: argparse.Namespace) -> list[str]:
    flags = ["--threads", str(args.threads), "--kv-cache-memory-bytes", "128MiB", "--block-size", str(args.block_size)]
    flags += ["--access-log", "--log-format", "json"]
    if policy == WITHOUT:
        return flags
    return [*flags, "--kv-disk-path", folder, "--kv-disk-size", str(DISK_GIB), "--kv-disk-write-policy", policy]


def on_cores(number: int, count: int, command: list[str]) -> list[str]:
    """The command of process `number`, with `count` cores of its own; 0: all share all."""
    if not count:
        return command
    own = CORES[number * count : (number + 1) * count]
    if len(own) < count:
        raise SystemExit(f"{count} cores for each process are more than the {len(CORES)} that there are")
    return ["taskset", "-c", ",".join(map(str, own)), *command]


def start_gateway(stack: ExitStack, ports: list[int], folder: Path, cores_each: int) -> tuple[Running, str, str]:
    """-> it, its address, and that of its admin listener"""
    file = folder / "gateway.toml"
    file.write_text(config(ports, folder / "audit.jsonl"))
    command = [sys.executable, "-m", "quire.cli.main", "gateway", "--config", str(file)]
    gateway = stack.enter_context(running(on_cores(0, cores_each, command)))
    while not (found := re.search(r"on (http://\S+)\n  curl (http://\S+)/workers", gateway.said())):
        gateway.check()
        time.sleep(0.05)
    return gateway, found[1], found[2]


def sum_of(address: str, name: str) -> float:
    """Of a metric, over its labels."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        return sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)", answer.read().decode(), re.MULTILINE)))


def measure(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Read all streams, undisturbed and while servers are killed. Ends the program if one was lost."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="quire-kv-", dir=memory))
        servers = Servers(stack, args.model, args.servers, flags_of(policy, folder, args), args.cores_each)
        progress(f"starting {args.servers} servers")
        wait_until_ready(servers.ports)
        own = Path(stack.enter_context(TemporaryDirectory()))
        gateway, url, admin = start_gateway(stack, servers.ports, own, args.cores_each)
        calm = Kills()
        undisturbed = asyncio.run(read_all(url, args.streams, args.tokens, calm))
        kills = asyncio.run(read_while_killed(url, servers.kill_one, undisturbed, args.every, args.seconds))
        resumed = sum_of(admin, "quire_gateway_resumes_total")
        ready = [url_of(port) for port in servers.ports if is_ready(port)]
        hits = sum(sum_of(address, "quire_kv_tier_hits_total") for address in ready)
        log = gateway.said()
        trace = GapTrace(servers.kills, (own / "audit.jsonl").read_text().splitlines(), servers.said())
        gaps = trace.resumed(kills.longest)
    print(f"{policy}: {len(kills.pauses)} kills, {kills.read} streams were read, {resumed:.0f} times one went on")
    print(f"  longest gap in a stream: {quantiles(calm.gaps)} undisturbed")
    print(f"  {quantiles(kills.gaps)} with kills ({AIM} is the aim); {hits:.0f} tokens from the disk at the end")
    print(*trace.table(gaps), sep="\n")
    print(f"  {len(kills.problems)} lost", *kills.problems[:20], sep="\n    ")
    if kills.problems:
        print(log)
        raise SystemExit(1)
    kills.longest.clear()
    return {"policy": policy, "resumed": resumed, "calm": calm.gaps, **asdict(kills), "parts": [*map(asdict, gaps)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from kill to kill, give or take a fifth")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=48, help="of a stream")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["write_through"], help="measured in turns")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--cores-each", type=int, default=0, help="of the gateway and of each server; 0: they share all"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a server")
    parser.add_argument(
        "--block-size",
        type=int,
        default=16,
        help="of a server: what a stream has beyond its last full block is computed again",
    )
    args = parser.parse_args()
    interruptible()
    runs = [measure(policy, args) for _ in range(args.rounds) for policy in args.policies]
    print(json.dumps({"benchmark": "gateway_kills", "machine": describe(), "runs": runs}))


if __name__ == "__main__":
    main()
