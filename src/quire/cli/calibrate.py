"""Calibration: how long steps of a model take on this machine, and what its server adds, for `quire simulate`."""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.cli.bench.setup import progress
from quire.cli.parser import UsageError
from quire.cli.planning_flags import warn_if_busy
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor, uses_gpu
from quire.hub import DEFAULT_MODEL, cache_dir, resolve_model

if TYPE_CHECKING:
    from quire.planning.calibration import Burst, Calibration

SECONDS_TO_START = 300.0  # of a server: large models are read from a disk
# Streams, and tokens of each; short ones tell what a request takes.
BURSTS = (*[(1, 2)] * 6, (1, 49), (8, 33), (32, 25), *[(1, 2)] * 6, (1, 49), (8, 33), (32, 25))
NUM_PROMPT = 16
NUM_PARTS = 79  # of the progress bar: bursts, and shapes of steps, some of which may not fit
CACHE_BYTES = 1 << 30  # on a CPU: room for the steps that are timed
_STEP_SECONDS = re.compile(r'^quire_step_seconds_(count|sum)\{[^}]*phase="run"[^}]*\} (\S+)', re.MULTILINE)
_ADDRESS = re.compile(r"^serving .* on (http\S+)$", re.MULTILINE)


def kept_calibration(options: EngineOptions) -> "Calibration | None":
    """What was measured of this model, here, earlier."""
    from quire.planning.calibration import calibration_key, find

    path = resolve_model(options.model, revision=options.revision).path
    return find(cache_dir() / "calibrations", calibration_key(path, _settings(options)))


def calibrate(options: EngineOptions, max_seconds: float | None = None, url: str | None = None) -> "Calibration":
    """Measure, fit, and keep the fit. Takes at most 20 seconds beside loading the model twice. `url`: of a server that
    has these options, and nothing to do."""
    from quire.planning.calibrate import MAX_SECONDS, calibration_steps, measured_steps
    from quire.planning.calibration import Calibration, as_served, calibration_key, fit_costs, keep
    from quire.planning.fitted_times import fit, fit_quality

    path = resolve_model(options.model, revision=options.revision).path
    key = calibration_key(path, _settings(options))
    if not uses_gpu(options.device):
        options = replace(options, kv_cache_memory_bytes=max(options.kv_cache_memory_bytes or 0, CACHE_BYTES))
    options = replace(options, max_model_len=None)
    warn_if_busy("--calibrate")
    with progress(NUM_PARTS, "part") as advance:
        with nullcontext(url) if url else running_server(options) as server:
            bursts = _serve_bursts(server, advance)
        executor = new_executor(path, options)
        capacity = executor.allocate(executor.load())
        shapes = calibration_steps(
            capacity,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=options.block_size,
        )
        steps = measured_steps(
            executor, capacity, shapes, block_size=options.block_size, max_seconds=max_seconds or MAX_SECONDS,
            advance=advance,
        )  # fmt: skip
        executor.stop()
    if len(steps) < 10:
        raise UsageError(
            f"{len(steps)} steps of the model were timed in 20 seconds, and a fit needs 10",
            "stop what else runs here, or leave out --calibrate: times are then computed",
        )
    times = fit(steps)
    if not capacity.ahead:
        times = as_served(times, bursts)
    costs = fit_costs(bursts, times, on_gpu=capacity.ahead > 0)
    calibration = Calibration(key, times, costs, fit_quality(steps))
    keep(cache_dir() / "calibrations", calibration)
    return calibration


def calibrate_target(arguments: Namespace) -> str:
    """The model of `quire plan` or `quire simulate`, with an engine's defaults. -> what was found"""
    check_target(arguments)
    options = EngineOptions(
        model=arguments.model or DEFAULT_MODEL,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
    )
    return describe(calibrate(options))


def check_target(arguments: Namespace) -> None:
    if arguments.shape or arguments.hardware or (arguments.model or "").endswith("config.json") or arguments.tp > 1:
        raise UsageError(
            "--calibrate runs the model here", "leave out --shape, --hardware and --tp, and name a model's files"
        )


def describe(calibration: "Calibration") -> str:
    quality, costs = calibration.quality, calibration.costs
    return (
        f"step times of this machine, fitted to {quality.num_steps} measured steps: a step that was left out is "
        f"predicted within {quality.median:.1%} (median) and {quality.p95:.1%} (p95); serving adds "
        f"{1e3 * costs.step:.2f} ms a step, {1e6 * costs.row:.0f} us a token and {1e3 * costs.request:.1f} ms a request"
    )


def _settings(options: EngineOptions) -> dict[str, Any]:
    """Options by name, with those resolved that depend on the machine."""
    return {**asdict(options), "device": "cuda" if uses_gpu(options.device) else "cpu"}


# -- through the server


def _serve_bursts(url: str, advance: Callable[[], Any]) -> "list[Burst]":
    asyncio.run(_burst(url, 4, 8))  # warms up
    bursts = []
    for num_streams, num_output in BURSTS:
        bursts.append(asyncio.run(_burst(url, num_streams, num_output)))
        advance()
    return bursts


@contextmanager
def running_server(options: EngineOptions, program: Sequence[str] = ("quire.cli.main", "serve")) -> Iterator[str]:
    """`quire serve` in a process of its own. -> its address"""
    command = [sys.executable, "-m", *program, *as_flags(options), "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(server: "subprocess.Popen[str]", log: Any) -> str:
    began = time.monotonic()
    while True:
        log.seek(0)
        text = log.read()
        if (found := _ADDRESS.search(text)) is not None:
            return found[1]
        if server.poll() is not None or time.monotonic() > began + SECONDS_TO_START:
            raise UsageError(f"the server that is to be measured does not start: {text.strip()[-500:]}")
        time.sleep(0.05)


def as_flags(options: EngineOptions) -> list[str]:
    """The flags that make these options."""
    flags = []
    for spec in fields(options):
        value, name = getattr(options, spec.name), "--" + spec.name.replace("_", "-")
        if value == spec.default:
            continue
        if isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [name, *value]
        else:
            flags += [name, str(value)]
    return flags


async def _burst(url: str, num_streams: int, num_output: int) -> "Burst":
    from quire.planning.calibration import Burst

    num_waiting, together = num_streams, asyncio.get_running_loop().create_future()

    def begun() -> None:
        nonlocal num_waiting
        num_waiting -= 1
        if not num_waiting:
            together.set_result(time.perf_counter())

    streams = asyncio.gather(*(_stream(url, number, num_output, begun) for number in range(num_streams)))
    await asyncio.wait([together, streams], return_when=asyncio.FIRST_COMPLETED)
    before = await _steps(url)
    seen = await streams
    after = await _steps(url)
    num_steps, seconds = (late - early for late, early in zip(after, before, strict=True))
    last_start = max(pieces[0][0] for pieces in seen)  # from here on all decode
    return Burst(
        num_streams, NUM_PROMPT, num_output,
        ttft=median(pieces[0][0] for pieces in seen),
        tpot=median(_seconds_per_token(pieces, last_start) for pieces in seen),
        step=seconds / num_steps if num_steps >= num_output // 2 else 0.0,
    )  # fmt: skip


async def _steps(url: str) -> tuple[float, float]:
    """-> steps of the server so far, and the seconds that they ran."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
    text = (await reader.read(-1)).decode()
    writer.close()
    found = dict(_STEP_SECONDS.findall(text))
    return float(found.get("count", 0)), float(found.get("sum", 0))


def _seconds_per_token(pieces: list[tuple[float, int]], since: float) -> float:
    late = [piece for piece in pieces if piece[0] >= since]
    (begin, first), (end, last) = (late if len(late) > 2 else pieces)[0], pieces[-1]
    return (end - begin) / max(1, last - first)


async def _stream(url: str, number: int, num_output: int, begun: Callable[[], None]) -> list[tuple[float, int]]:
    """-> when pieces came, in seconds, and the tokens until then. `begun` is called at the first. It reads little of
    them: it shares the CPUs with the server."""
    prompt = [3 + (number * 31 + i * 7) % 200 for i in range(NUM_PROMPT)]
    fields = {"prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "return_token_ids": True}).encode()
    parts = urlsplit(url)
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\nConnection: close"
    writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
    pieces: list[tuple[float, int]] = []
    received, num_tokens = b"", 0
    while data := await reader.read(1 << 16):
        received = received or data
        if num_new := data.count(b"data: {"):
            if not num_tokens:
                begun()
            num_tokens += num_new
            pieces.append((time.perf_counter() - began, num_tokens))
    writer.close()
    if not received.startswith(b"HTTP/1.1 200") or num_tokens < num_output:
        raise UsageError(f"the server that is to be measured answers {received[:300].decode(errors='replace')!r}")
    return pieces
