"""Engines of the model to compare, driven step by step: every token with its time, every step with its record.

Prompts and outputs are token ids, as in the other benchmarks. Both sides of a comparison take turns, so that a machine
that gets slower or faster slows both."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.cli.bench.compare.sizes import Sizes
from quire.cli.bench.prompts import BenchRequest
from quire.cli.bench.setup import start
from quire.cli.parser import UsageError
from quire.core.errors import EngineFailed, QuireError
from quire.core.params import SamplingParams
from quire.core.records import StepRecord
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import executor_options, load_tokenizer, uses_gpu
from quire.hub import resolve_model

if TYPE_CHECKING:
    from quire.models.config import ModelConfig
    from quire.ops.kv_spec import KVSpec
    from quire.text.tokenizers.tokenizer import Tokenizer
    from quire.weights.checkpoint import Checkpoint

T = TypeVar("T")


class Interrupted(Exception):
    """The user has pressed Ctrl-C."""


class NotHere(QuireError):
    """This comparison says nothing about this model or machine."""

    status, code = 400, "not_here"


@dataclass(slots=True)
class RequestTrace:
    """One request. Times are seconds since the run began."""

    num_prompt: int
    asked: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each token came
    num_cached: int = 0  # prompt tokens from the prefix cache
    admitted: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked

    @property
    def latency(self) -> float:
        return self.times[-1] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Between one token and the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclass(slots=True)
class RunTrace:
    """Requests until all have ended, and the steps that it took."""

    requests: list[RequestTrace]
    records: list[StepRecord]
    seconds: float

    @property
    def num_output(self) -> int:
        return sum(len(request.tokens) for request in self.requests)

    @property
    def num_computed(self) -> int:
        return sum(record.num_tokens for record in self.records)

    @property
    def tokens(self) -> list[list[int]]:
        return [request.tokens for request in self.requests]


class Lab:
    """What a comparison needs: options, sizes, engines, and rounds."""

    def __init__(
        self,
        options: EngineOptions,
        sizes: Sizes,
        files: Sequence[str] = (),
        stopped: Callable[[], bool] = lambda: False,
        on_round: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self.options, self.sizes, self.files = options, sizes, files
        self.seed = options.seed or 0
        self.interrupted = False
        self._stopped, self._on_round = stopped, on_round
        self._engines: list[Engine] = []
        self._names = (str(number) for number in count())

    # ---- the model

    @property
    def on_gpu(self) -> bool:
        return uses_gpu(self.options.device)

    @cached_property
    def path(self) -> Path:
        return resolve_model(self.options.model, revision=self.options.revision).path

    @cached_property
    def checkpoint(self) -> "Checkpoint":
        from quire.weights.checkpoint import open_checkpoint
        from quire.weights.dummy_checkpoint import DummyCheckpoint

        return DummyCheckpoint(self.path) if self.options.load_format == "dummy" else open_checkpoint(self.path)

    @cached_property
    def model(self) -> "ModelConfig":
        from quire.models.registry import family, read_model_config

        return read_model_config(family(self.checkpoint.config.architecture), self.checkpoint.config)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.path, self.options)

    def kv_spec(self, options: EngineOptions | None = None) -> "KVSpec":
        from quire.runtime.kv import kv_spec

        options = options or self.options
        return kv_spec(self.model, options.block_size, executor_options(options).kv_dtype)

    # ---- engines

    def engine(self, *, length: int, num_seqs: int, **changes: Any) -> Engine:
        """An engine with room for `num_seqs` sequences of `length` tokens, and no more: several stand side by side."""
        self.check_length(length)
        wanted = {"max_model_len": length, "max_num_seqs": num_seqs, "enable_prefix_caching": False} | changes
        options = replace(self.options, **wanted)
        if options.kv_cache_memory_bytes is None:
            blocks = num_seqs * (-(-length // options.block_size) + 1)
            options = replace(options, kv_cache_memory_bytes=blocks * self.kv_spec(options).block_bytes)
        engine, _ = start(options)
        self._engines.append(engine)
        return engine

    def check_length(self, length: int) -> None:
        if length > self.model.max_length:
            raise UsageError(
                f"this comparison needs sequences of {length:,} tokens, and the model was made for "
                f"{self.model.max_length:,}",
                "give smaller lengths: see --help",
            )

    def close(self) -> None:
        while self._engines:
            self._engines.pop().stop()

    # ---- runs

    def run(
        self,
        engine: Engine,
        requests: Sequence[BenchRequest],
        *,
        at_step: Mapping[int, int] | None = None,
        temperature: float = 0.0,
    ) -> RunTrace:
        """Submit all requests at once, or request i in front of step `at_step[i]`; run until all have ended."""
        waiting = {index: (at_step or {}).get(index, 0) for index in range(len(requests))}
        traces: dict[str, RequestTrace] = {}
        ordered: dict[int, RequestTrace] = {}
        records: list[StepRecord] = []
        begin, num_live = time.perf_counter(), 0
        while waiting or engine.has_work:
            if self._stopped():
                self._cancel(engine, traces)
            due = [index for index, step in waiting.items() if step <= len(records)]
            if not due and not num_live:
                due = [min(waiting, key=waiting.__getitem__)]  # nothing else would make steps
            for index in due:
                del waiting[index]
                name = next(self._names)
                traces[name] = ordered[index] = RequestTrace(
                    len(requests[index].prompt_ids), time.perf_counter() - begin
                )
                engine.submit(self._request(name, requests[index], temperature, index))
                num_live += 1
            for event in engine.step():
                if event.finish_reason == "error":
                    raise EngineFailed(event.reason)
                trace, now = traces[event.request_id], time.perf_counter() - begin
                trace.tokens += event.tokens
                trace.times += [now] * len(event.tokens)
                trace.num_cached = max(trace.num_cached, event.num_cached)
                num_live -= event.final
            if engine.record is not None and engine.record.num_tokens:
                records.append(engine.record)
                for name in engine.record.admitted:
                    traces[name].admitted = time.perf_counter() - begin - engine.record.seconds
        return RunTrace([ordered[index] for index in range(len(requests))], records, time.perf_counter() - begin)

    def _cancel(self, engine: Engine, traces: Mapping[str, RequestTrace]) -> None:
        for name in traces:
            engine.cancel(name)
        raise Interrupted

    def _request(self, name: str, request: BenchRequest, temperature: float, index: int) -> Request:
        params = SamplingParams(
            temperature=temperature, max_tokens=request.output_len, ignore_eos=True, seed=self.seed + index
        )
        return Request(id=name, prompt_ids=request.prompt_ids, params=params)

    def rounds(self, one_round: Callable[[int], T]) -> list[T]:
        """The results of the rounds, the first of which warms up and does not count. Ctrl-C ends them; without a round
        that is done, it ends the comparison."""
        results: list[T] = []
        total = self.sizes.repeats + 1
        for number in range(total):
            self._on_round(number, total)
            try:
                self.check_stopped()
                result = one_round(number)
            except Interrupted:
                self.interrupted = True
                if not results:
                    raise
                break
            if number:
                results.append(result)
        return results

    def check_stopped(self) -> None:
        if self._stopped():
            raise Interrupted


def in_turn(number: int, sides: Sequence[T]) -> list[T]:
    """The order of the sides in a round: the other way around in every second one."""
    return list(sides) if number % 2 == 0 else list(reversed(sides))


GPU_ROUNDS = "kernels on a GPU round differently by the size of a batch (--batch-invariant makes them equal)"


def same_tokens(one: RunTrace, other: RunTrace, why: str = GPU_ROUNDS) -> str:
    """A note on whether both sides gave the same tokens, and why not."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    same = sum(a == b for a, b in pairs)
    if same == len(pairs):
        return "both sides gave the same tokens"
    return f"{len(pairs) - same} of {len(pairs)} outputs differ between the sides: {why}"
