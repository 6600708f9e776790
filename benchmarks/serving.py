"""How servers do with several users, beside each other: latencies, tokens/s, start-up and memory.

    python -m benchmarks.serving                                every engine that is installed, on the default model
    python -m benchmarks.serving --engines quire --rounds 1     a quick look
    python -m benchmarks.serving --formats Q8_0 Q4_0            the file's twins too, made by llama.cpp
    python -m benchmarks.serving MODEL.gguf --json results.json

In every round each server is started, asked for one token until it answers, warmed up, given every workload, and
ended; servers take turns, and only one runs at a time. After each workload Quire does it once more without a
server, while that waits. Memory is the sum of PSS over the server's processes, looked up every second. vLLM serves the
dequantized weights of the first file."""

import argparse
import socket
import sys
import time
from collections.abc import Iterator
from compileall import compile_dir
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import engines as known
from benchmarks.engines import Engines
from benchmarks.formats import FORMATS, float_checkpoint, twins
from benchmarks.load import Ask, LoadFailed, run_load
from benchmarks.machine import note_others
from benchmarks.offline import offline
from benchmarks.processes import ROOT, EngineDied, MemoryWatch, Running, interruptible, progress, running
from benchmarks.report import Report
from benchmarks.speed import add_arguments
from benchmarks.table import Section
from benchmarks.workloads import WARM_UP, WORKLOADS, read_prose
from quire.hub import resolve_model

SECONDS_TO_START = 600.0


def measure_serving(engines: Engines, path: Path, rounds: int, with_vllm: bool = True) -> list[Section]:
    """Every engine's server with one file: a section for each workload, then one for start-up and memory."""
    compile_dir(ROOT / "src", quiet=1)  # as pip leaves what it installs, the peers among it
    prose = read_prose(path)
    models = {name: path for name in engines.names if name != "vllm" or with_vllm}
    if "vllm" in models:
        models["vllm"] = float_checkpoint(path)
    found = {workload: Section(f"{path.name}: {workload.name}") for workload in WORKLOADS}
    starting = Section(f"{path.name}: start-up and memory")
    for number in range(1, rounds + 1):
        for name, model in models.items():
            starting.others.append(note_others(f"{path.name}: round {number} of {rounds}, {name} serves"))
            try:
                with server(engines, name, model) as (url, engine), MemoryWatch(engine) as memory, ExitStack() as ours:
                    begun = first_token(url, engine, prose)
                    alone = ours.enter_context(offline(engines, path)) if name == "quire" else None
                    run_load(url, WARM_UP.asks(prose, seed=-number), WARM_UP.users)
                    for workload, section in found.items():
                        engine.check()
                        add_figures(section, name, url, workload.asks(prose, seed=number), workload.users)
                        if alone:
                            section.row("offline tokens/s").add(name, alone.rate(workload, number))
            except (EngineDied, LoadFailed) as failure:
                progress(f"{name} fails, and has no figures here: {failure}")
                continue
            starting.row("first token over HTTP, s", less_is_better=True).add(name, begun - engine.started)
            starting.row("peak memory (PSS), MB", less_is_better=True).add(name, memory.peak / 1e6)
        if "quire" in models:
            starting.row("first token of `quire run`, s", less_is_better=True).add("quire", first_of_run(path, engines))
    return [*found.values(), starting]


def add_figures(section: Section, engine: str, url: str, asks: list[Ask], users: int) -> None:
    load = run_load(url, asks, users)
    drawn, wanted = (sum(item.num_output for item in items) for items in (load.answers, asks))
    if drawn != wanted:
        raise LoadFailed(f"{drawn} tokens were drawn, and {wanted} were asked for")
    section.row("output tokens/s").add(engine, load.rate)
    for name, share in (("p50", 50), ("p99", 99)):
        section.row(f"first token {name}, ms", less_is_better=True).add(engine, load.ttft(share) * 1e3)
    for name, share in (("p50", 50), ("p99", 99), ("longest", 100)):
        section.row(f"between tokens {name}, ms", less_is_better=True).add(engine, load.gap(share) * 1e3)
    if load.pieces_per_token < 0.95:
        progress(f"{engine} sent only {load.pieces_per_token:.2f} pieces a token: times between tokens are too long")


@contextmanager
def server(engines: Engines, name: str, model: Path) -> Iterator[tuple[str, Running]]:
    """A server that has been started, ready or not, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = engines.server(name, model, port)
    with running(command.words, command.environment) as engine:
        yield f"http://127.0.0.1:{port}", engine


def first_token(url: str, engine: Running, prose: list[int]) -> float:
    """When a server that is starting sent its first token (time.perf_counter())."""
    ask = Ask(prose[:8], 1)
    refusal: Exception | None = None
    while time.perf_counter() < engine.started + SECONDS_TO_START:
        engine.check()
        try:
            return run_load(url, [ask], 1).answers[0].came[0]
        except LoadFailed as failure:  # not listening yet, or still loading
            refusal = failure
            time.sleep(max(0.01, (time.perf_counter() - engine.started) / 100))  # asking takes time from starting
    raise EngineDied(f"no token within {SECONDS_TO_START:.0f} s, lastly {refusal}\n{engine.said()}")


def first_of_run(path: Path, engines: Engines) -> float:
    """Seconds from starting `quire run` to the first byte of its answer."""
    words: list[str | Path] = [
        sys.executable,
        "-m",
        "quire.cli.main",
        "run",
        "-m",
        path,
        "--threads",
        str(engines.threads),
    ]
    words += ["--max-tokens", "1", "--temperature", "0", "Name a river."]
    with running(words, piped=True) as engine:
        stdout = engine.process.stdout
        assert stdout is not None
        if not stdout.read(1):
            raise EngineDied(f"`quire run` said nothing\n{engine.said()}")
        return time.perf_counter() - engine.started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=[], help="serve the file's twins too")
    args = parser.parse_args()
    interruptible()
    engines = known.find(args, needs=["server"])
    path = resolve_model(args.model).path
    report = Report(path, engines, None, args.json)
    for number, file in enumerate(twins(path, args.formats, engines.llama_python)):
        report.add(*measure_serving(engines, file, args.rounds, with_vllm=number == 0))
    report.finish()


if __name__ == "__main__":
    main()
