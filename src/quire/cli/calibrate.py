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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from quire.cli.bench.setup import progress
from quire.cli.parser import UsageError
from quire.cli.planning_flags import warn_if_busy
from quire.engine.options import EngineOptions
from quire.engine.start import uses_gpu
from quire.hub import DEFAULT_MODEL, cache_dir, resolve_model

if TYPE_CHECKING:
    from quire.planning.calibrate import FirstToken, Ramp, Round, ServedRound
    from quire.planning.calibration import Calibration

SECONDS_TO_START = 300.0  # of a server: large models are read from a disk
SECONDS_TO_ANSWER = 10.0  # what it is
MAX_PASSES = 8  # over all rounds
MIN_STEPS, MIN_KINDS = 40, 8  # steps that a fit needs, and how many kinds of them
CACHE_BYTES = 1 << 30  # on a CPU: room for the requests
_ADDRESS = re.compile(r"^serving .* on (http\S+)$", re.MULTILINE)


def kept_calibration(options: EngineOptions) -> "Calibration | None":
    """What was measured of this model, here, earlier."""
    from quire.hub.hollow import remote_repo
    from quire.planning.calibration import calibration_key, find

    if remote_repo(options.model) is not None:
        return None  # the model would have to be downloaded
    path = resolve_model(options.model, revision=options.revision).path
    return find(cache_dir() / "calibrations", calibration_key(path, _settings(options)))


@dataclass(frozen=True, slots=True)
class LoggedServer:
    """A server that has nothing else to do, and the file in which its engine writes down steps."""

    url: str
    log: Path
    pid: int = 0


def calibrate(
    options: EngineOptions, max_seconds: float | None = None, server: LoggedServer | None = None
) -> "Calibration":
    """Serve requests, fit times to the engine's steps, and keep the fit. Takes at most 20 seconds beside loading the
    model. `server`: has these options."""
    from quire.planning.calibrate import (
        MAX_GPU_SECONDS,
        MAX_SECONDS,
        learn,
        learn_gpu,
    )
    from quire.planning.calibration import Calibration, calibration_key, keep
    from quire.planning.step_fit import fit, fit_quality
    from quire.planning.step_log import read_steps, read_told

    path = resolve_model(options.model, revision=options.revision).path
    key = calibration_key(path, _settings(options))
    on_gpu = uses_gpu(options.device)
    max_seconds = max_seconds or (MAX_GPU_SECONDS if on_gpu else MAX_SECONDS)
    if not on_gpu:
        options = replace(options, kv_cache_memory_bytes=max(options.kv_cache_memory_bytes or 0, CACHE_BYTES))
    options = replace(options, max_model_len=None)
    warn_if_busy("--calibrate")
    with nullcontext(server) if server else logged_server(options) as measured:
        client = _serve_rounds(measured, options.max_num_seqs, max_seconds, on_gpu)
        steps, told = read_steps(measured.log, client.since), read_told(measured.log, client.since)
    graphs, first_tokens = on_gpu and not options.enforce_eager, client.first_tokens
    if on_gpu:
        alike, costs = learn_gpu(steps, first_tokens, client.served, told, graphs)
    else:
        alike, costs = learn(steps, first_tokens)
    if len(steps) < MIN_STEPS or len(alike) < MIN_KINDS:
        raise UsageError(
            f"{len(steps)} steps of the model ran in {max_seconds:g} seconds, and a fit needs {MIN_STEPS}",
            "stop what else runs here, or leave out --calibrate: times are then computed",
        )
    calibration = Calibration(key, fit(alike, graphs), costs, fit_quality(alike, graphs), tuple(alike))
    keep(cache_dir() / "calibrations", calibration)
    return calibration


@contextmanager
def logged_server(options: EngineOptions) -> "Iterator[LoggedServer]":
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps"
        with _server_process(options, log) as (url, process):
            yield LoggedServer(url, log, process.pid)


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
    on_gpu = calibration.about.get("device") == "cuda"
    what = "beside the GPU, serving takes" if on_gpu else "serving adds"
    return (
        f"step times of this machine, fitted to {quality.num_steps} measured steps: a step that was left out is "
        f"predicted within {quality.median:.1%} (median) and {quality.p95:.1%} (p95); {what} "
        f"{1e3 * costs.step:.2f} ms a step, {1e6 * costs.row:.0f} us a token and {1e3 * costs.request:.1f} ms a request"
    )


def _settings(options: EngineOptions) -> dict[str, Any]:
    """Options by name, with those resolved that depend on the machine."""
    return {**asdict(options), "device": "cuda" if uses_gpu(options.device) else "cpu"}


# -- through the server


def _serve_rounds(server: LoggedServer, max_num_seqs: int, max_seconds: float, on_gpu: bool) -> "_RoundClient":
    from quire.planning.calibrate import RAMP_SHARE, WARM_UP_SHARE, Round, ramp_that_fits, rounds_that_fit

    max_model_len = _max_model_len(server.url)
    rounds = rounds_that_fit(max_model_len, max_num_seqs)
    client = _RoundClient(server)
    with progress(2 * len(rounds), "round") as advance:
        began = time.perf_counter()
        client.serve([Round(4, 16, 8)], began + max_seconds, advance)
        if on_gpu:  # the first step of a kind may compile kernels
            client.serve(rounds, began + WARM_UP_SHARE * max_seconds, advance)
            client = _RoundClient(server)  # how long rounds take is found anew
        client.begin()
        end = max(began, client.since - WARM_UP_SHARE * max_seconds) + max_seconds  # compiling may have taken long
        ramp_seconds = RAMP_SHARE * max_seconds if on_gpu else 0.0
        for _ in range(MAX_PASSES):
            client.serve(rounds, end - ramp_seconds, advance)
        if on_gpu:
            client.serve_ramp(ramp_that_fits(max_model_len, max_num_seqs), end)
    return client


@contextmanager
def _server_process(options: EngineOptions, steps: Path) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """`quire serve` in a process of its own, whose engine writes down steps. -> its address, and the process"""
    command = [sys.executable, "-m", "quire.cli.step_log", "serve", str(steps), *as_flags(options), "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield _address(server, log), server
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


def _max_model_len(url: str) -> int:
    with urlopen(f"{url}/info", timeout=SECONDS_TO_ANSWER) as reply:
        return int(json.load(reply)["max_total_tokens"])


def _cpu_seconds(pid: int) -> float:
    """Of the main thread of a process; 0 where this is not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class _RoundClient:
    """Sends the requests of rounds. It reads little of the answers: it shares the CPUs with the server."""

    def __init__(self, server: LoggedServer) -> None:
        self._url, self._pid = urlsplit(server.url), server.pid
        self._rng = Random()  # prompts that no earlier calibration has left in the server's cache
        self.since = 0.0  # time.perf_counter(): what is measured begins
        self.first_tokens: list[FirstToken] = []  # of requests that came alone
        self.served: list[ServedRound] = []
        self._seconds: dict[Round, float] = {}  # seconds that each round took
        self._prefixes: dict[Round, list[list[int]]] = {}  # of each round

    def begin(self) -> None:
        """From now on it is measured."""
        self.since = time.perf_counter()
        self.first_tokens.clear()
        self.served.clear()

    def serve(self, rounds: "Sequence[Round]", end: float, advance: Callable[[], Any]) -> None:
        """Serve those requests that are likely to have ended by `end` (time.perf_counter())."""
        from quire.planning.calibrate import ServedRound

        for each in rounds:
            now, busy = time.perf_counter(), _cpu_seconds(self._pid)
            if now + self._expected(each) > end:
                continue
            try:
                asyncio.run(asyncio.wait_for(self._serve(each), end - now))
            except TimeoutError:  # what ran of it is in the log
                return
            ended, busy = time.perf_counter(), _cpu_seconds(self._pid) - busy
            self._seconds[each] = ended - now
            num_prefixes = each.num_prefixes if each.prefix else 0
            num_prompt = each.num_streams * (each.prefix + each.prompt) + num_prefixes * each.prefix
            num_requests, num_tokens = each.num_streams + num_prefixes, sum(each.outputs()) + num_prefixes
            self.served.append(ServedRound(now, ended, busy, num_requests, num_prompt, num_tokens))
            advance()

    def serve_ramp(self, ramp: "Ramp", end: float) -> None:
        """More and more streams until `end`, each of which sends a request when its last has ended."""
        seconds = end - time.perf_counter()
        if seconds > 0:
            with suppress(TimeoutError):  # what is left is cancelled
                asyncio.run(asyncio.wait_for(self._serve_ramp(ramp, seconds), seconds))

    async def _serve_ramp(self, ramp: "Ramp", seconds: float) -> None:
        prefixes = [self._tokens(ramp.prefix) for _ in range(ramp.num_prefixes)]
        await asyncio.gather(*(self._stream(prefix, 1) for prefix in prefixes))
        await asyncio.gather(*(self._serve_again(ramp, begin * seconds, prefixes) for begin in ramp.begins()))

    async def _serve_again(self, ramp: "Ramp", delay: float, prefixes: list[list[int]]) -> None:
        await asyncio.sleep(delay)
        while True:
            prefix, prompt, output = ramp.draw(self._rng)
            start = self._rng.choice(prefixes)[:prefix] if prefix else []
            await self._stream(start + self._tokens(prompt), output)

    def _expected(self, each: "Round") -> float:
        """Seconds, by earlier rounds: so much a token, and so much a step."""
        if each in self._seconds or not self._seconds:
            return self._seconds.get(each, 0.0)
        from quire.planning.least_squares import non_negative_least_squares

        rows = [[done.num_tokens / seconds, done.output / seconds] for done, seconds in self._seconds.items()]
        a_token, a_step = non_negative_least_squares(rows, [1.0] * len(rows))
        return a_token * each.num_tokens + a_step * each.output

    async def _serve(self, each: "Round") -> None:
        prefixes: list[list[int]] = [[]]
        if each.prefix:
            if each not in self._prefixes:
                self._prefixes[each] = [self._tokens(each.prefix) for _ in range(each.num_prefixes)]
            prefixes = self._prefixes[each]
            await asyncio.gather(*(self._stream(prefix, 1) for prefix in prefixes))  # they are cached then
        prompts = [prefixes[n % len(prefixes)] + self._tokens(each.prompt) for n in range(each.num_streams)]
        first = await asyncio.gather(*map(self._stream, prompts, each.outputs()))
        if each.num_streams == 1:
            self.first_tokens += first

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(3, 203), k=count)

    async def _stream(self, prompt: list[int], num_output: int) -> "FirstToken":
        from quire.planning.calibrate import FirstToken

        fields = {"prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "return_token_ids": True}).encode()
        sent, seen = time.perf_counter(), 0.0
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\nContent-Length: {len(body)}"
            writer.write(f"{head}\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n".encode() + body)
            received, num_tokens = b"", 0
            while data := await reader.read(1 << 16):
                received = received or data
                num_tokens += data.count(b"data: {")
                seen = seen or (time.perf_counter() if num_tokens else 0.0)
        finally:
            writer.close()
        if not received.startswith(b"HTTP/1.1 200") or num_tokens < num_output:
            answer = received[:300].decode(errors="replace")
            raise UsageError(f"the server that is to be measured answers {answer!r}")
        return FirstToken(sent, seen)
