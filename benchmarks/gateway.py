"""What a gateway costs: added latency, requests/s, SSE chunks/s, memory and time to start, before a trivial worker.

    python -m benchmarks.gateway                            the gateway on one core, worker and clients on the other
    python -m benchmarks.gateway --seconds 2 --rounds 1
    python -m benchmarks.gateway --peer litellm=.venv-litellm/bin/litellm --peer smg=.venv-routers/bin/smg
    make bench-gateway                                      installs LiteLLM, vllm-router and smg, and measures all

Latency at a fixed rate of requests, sent when they are due whether or not others have ended, directly and through the
gateway in turn; the difference of the quantiles is what the gateway adds. Gateways take turns, round by round; those
that are not measured are stopped meanwhile. A gateway is ready when it has answered its first request."""

import argparse
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import uvloop

from benchmarks.gateway_traffic import BODY, chunks_a_second, latencies, requests_a_second
from benchmarks.load import percentile
from benchmarks.machine import describe, note_others
from benchmarks.peers.gateways import ENVIRONMENT, GATEWAYS, wait_until_it_answers
from benchmarks.processes import Running, interruptible, running

AIMS = {
    "added_p50_ms": 0.25,
    "added_p99_ms": 1.0,
    "requests_s": 2500.0,
    "chunks_s": 60_000.0,
    "rss_mb": 70.0,
    "ready_s": 0.4,
}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@dataclass(frozen=True, slots=True)
class Figures:
    added_p50_ms: float
    added_p99_ms: float
    requests_s: float
    chunks_s: float
    cpu_us_request: float  # CPU time of the gateway: what neighbours do not change
    cpu_us_chunk: float
    rss_mb: float
    ready_s: float


@dataclass(frozen=True, slots=True)
class MeasuredGateway:
    name: str
    url: str
    process: Running
    ready_s: float

    def stop(self) -> None:
        """Until `go_on`, so that it takes no time from the one that is measured."""
        for process in self.process.tree():
            process.suspend()

    def go_on(self) -> None:
        for process in self.process.tree():
            process.resume()

    def cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self.process.tree()]
        return float(sum(each.user + each.system for each in times))


def measure(gateway: MeasuredGateway, worker: str, seconds: float) -> Figures:
    url = gateway.url
    uvloop.run(requests_a_second(url, 0.5))  # warm
    direct, through = uvloop.run(latencies(worker, seconds)), uvloop.run(latencies(url, seconds))
    added = [1000 * (percentile(through, q) - percentile(direct, q)) for q in (50, 99)]
    requests, cpu_request = _with_cpu(gateway, lambda: uvloop.run(requests_a_second(url, seconds)))
    chunks, cpu_chunk = _with_cpu(gateway, lambda: uvloop.run(chunks_a_second(url, seconds)))
    rss = sum(process.memory_info().rss for process in gateway.process.tree()) / 1e6
    return Figures(*added, requests, chunks, cpu_request, cpu_chunk, rss, gateway.ready_s)


def _with_cpu(gateway: MeasuredGateway, run: Callable[[], float]) -> tuple[float, float]:
    """-> a rate, and the CPU time of the gateway for each, in microseconds"""
    before, begin = gateway.cpu_seconds(), perf_counter()
    rate = run()
    count = rate * (perf_counter() - begin)
    return rate, 1e6 * (gateway.cpu_seconds() - before) / count


def on_core(number: int, command: list[str]) -> list[str]:
    """All of its threads there."""
    if not CORES or shutil.which("taskset") is None:
        return command
    return ["taskset", "-c", str(CORES[number % len(CORES)]), *command]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_worker(stack: ExitStack) -> str:
    port = free_port()
    worker = stack.enter_context(running(on_core(1, [sys.executable, "-m", "benchmarks.gateway_traffic", str(port)])))
    wait_until_it_answers(f"http://127.0.0.1:{port}", BODY, worker)
    return f"http://127.0.0.1:{port}"


def start_gateway(stack: ExitStack, name: str, program: str, worker: str, folder: Path) -> MeasuredGateway:
    port = free_port()
    if name == "quire":
        command = [sys.executable, "-m", "quire.cli.main", "gateway", "--worker", worker]
        command += ["--port", str(port), "--admin-port", "0"]
    else:
        command = GATEWAYS[name](program, worker, port, free_port(), folder)
    process = stack.enter_context(running(on_core(0, command), ENVIRONMENT))
    url = f"http://127.0.0.1:{port}"
    made = MeasuredGateway(name, url, process, wait_until_it_answers(url, BODY, process))
    stack.callback(made.go_on)  # a stopped process does not end
    return made


def show(rounds: dict[str, list[Figures]]) -> None:
    """Medians over the rounds, and what the others have beside Quire's."""
    medians = {
        name: {field: median(asdict(each)[field] for each in figures) for field in asdict(figures[0])}
        for name, figures in rounds.items()
    }
    for name, values in medians.items():
        print(f"{name:<12}" + "  ".join(f"{field} {value:.2f}" for field, value in values.items()))
    for name, values in medians.items():
        if name != "quire":
            rate = medians["quire"]["requests_s"] / values["requests_s"]
            latency = f"{medians['quire']['added_p50_ms']:.3f} and {values['added_p50_ms']:.3f} ms"
            print(f"quire beside {name}: {rate:.2f} times the requests/s; added latency (p50) {latency}")


def peer(text: str) -> tuple[str, str]:
    name, _, program = text.partition("=")
    if name not in GATEWAYS or not program:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=PROGRAM with one of {', '.join(GATEWAYS)}")
    return name, program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer", type=peer, action="append", default=[], metavar="NAME=PROGRAM", help=f"one of {', '.join(GATEWAYS)}"
    )
    args = parser.parse_args()
    interruptible()
    machine, rounds = describe(), dict[str, list[Figures]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        worker = start_worker(stack)
        gateways = []
        for name, program in [("quire", ""), *args.peer]:
            note_others(f"{name} starts")
            gateways.append(start_gateway(stack, name, program, worker, folder))
            gateways[-1].stop()
        with suppress(AttributeError, OSError):
            os.sched_setaffinity(0, {CORES[-1]})
        for number in range(args.rounds):
            for gateway in gateways:
                note_others(f"{gateway.name}, round {number + 1} of {args.rounds}")
                gateway.go_on()
                figures = measure(gateway, worker, args.seconds)
                gateway.stop()
                rounds.setdefault(gateway.name, []).append(figures)
        direct = {
            "requests_s": uvloop.run(requests_a_second(worker, 1.0)),
            "chunks_s": uvloop.run(chunks_a_second(worker, 1.0)),
        }
    show(rounds)
    print("directly    " + "  ".join(f"{name} {value:.2f}" for name, value in direct.items()))
    shown = {name: [asdict(each) for each in figures] for name, figures in rounds.items()}
    print(json.dumps({"benchmark": "gateway", "machine": machine, "aims": AIMS, "direct": direct, "rounds": shown}))


if __name__ == "__main__":
    main()
