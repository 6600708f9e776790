"""Requests over time: generated, or read from a trace."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest
from quire.planning.prompt_ids import joined
from quire.planning.trace_columns import TraceColumns

MAX_TRACE_LINES = 10_000_000
MAX_GAP = 86_400  # seconds between two requests: more is a mistake in the unit
MAX_TOKENS = 10_000_000  # of a request
MAX_TURNS = 500
TRACE_BLOCK = 512  # tokens that one entry of `hash_ids` stands for, as in Mooncake's traces


@dataclass(slots=True)
class Arrival:
    """A request that comes at `time` seconds: tokens, so that equal prefixes are found as they are in an engine."""

    time: float
    prompt_ids: Sequence[int]  # ranges: an hour of prompts takes little memory
    output: int  # tokens
    priority: int = 0
    # The next turn of the conversation: its time counts from the end of this answer, and its prompt follows the answer.
    followed_by: "Arrival | None" = None
    line: int = 0  # of the trace that it stands in

    @property
    def num_turns(self) -> int:
        return 1 + (self.followed_by.num_turns if self.followed_by else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """`rate` requests a second for `num_requests`; inf: all at once. Lengths vary by `spread`, a share of the mean."""

    rate: float = 1.0
    num_requests: int = 100
    prompt: int = 512
    output: int = 128
    spread: float = 0.0
    shared_prefix: int = 0  # tokens that all prompts begin with
    num_prefixes: int = 1  # different ones
    turns: int = 1  # of a conversation: each prompt is the one before, its output and `prompt` tokens more
    think_seconds: float = 5.0  # between an answer and the next turn
    burst: int = 1  # requests that come together
    priorities: int = 1  # levels, drawn evenly
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("num_requests", "prompt", "output", "num_prefixes", "turns", "burst", "priorities")
        for name in positive:
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}", f"{name} must be at least 1", param=name)
        if self.num_requests > MAX_TRACE_LINES:
            raise BadRequest(
                f"num_requests is {self.num_requests:,}", f"let it be at most {MAX_TRACE_LINES:,}", param="num_requests"
            )
        if not self.rate > 0:
            raise BadRequest(f"rate is {self.rate}", "it must be above 0; inf: all requests at once", param="rate")
        if not 0 <= self.spread <= 1:
            raise BadRequest(f"spread is {self.spread}", "it must be a share, from 0 to 1", param="spread")
        for name in ("shared_prefix", "think_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadRequest(f"{name} is {getattr(self, name)}", f"{name} must be at least 0", param=name)
        if self.turns > MAX_TURNS:
            raise BadRequest(f"turns is {self.turns}", f"a conversation has {MAX_TURNS} at most", param="turns")
        longest = self.shared_prefix + self.turns * 2 * (self.prompt + self.output)
        if longest > MAX_TOKENS:
            raise BadRequest(
                f"a request may have {longest:,} tokens", f"let prompt and output be at most {MAX_TOKENS:,} together",
                param="prompt",
            )  # fmt: skip


def generate(spec: WorkloadSpec) -> list[Arrival]:
    """Poisson arrivals, in order of time. Of a conversation the first turn; the others follow it."""
    rng = random.Random(spec.seed)
    fresh = _FreshIds(1)
    prefixes = [fresh.take(spec.shared_prefix) for _ in range(spec.num_prefixes)]
    arrivals: list[Arrival] = []
    now, left = 0.0, spec.num_requests
    while left:
        for _ in range(spec.burst):
            turns = min(left, spec.turns)
            left -= turns
            if turns:
                arrivals.append(_conversation(spec, rng, fresh, rng.choice(prefixes), now, turns))
        if math.isfinite(spec.rate):
            now += rng.expovariate(spec.rate / (spec.burst * spec.turns))
    return arrivals


def _conversation(
    spec: WorkloadSpec, rng: random.Random, fresh: "_FreshIds", prefix: range, now: float, turns: int
) -> Arrival:
    priority = rng.randrange(spec.priorities) if spec.priorities > 1 else 0
    own = fresh.take(_vary(rng, spec.prompt, spec.spread))
    first = Arrival(now, joined(prefix, own), _vary(rng, spec.output, spec.spread), priority)
    if turns > 1:
        first.followed_by = _conversation(spec, rng, fresh, range(0), spec.think_seconds, turns - 1)
    return first


class _FreshIds:
    """Token ids that no other prompt has."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, count: int) -> range:
        self._next += count
        return range(self._next - count, self._next)


def _vary(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))


def read_trace(path: Path, model: str | None = None) -> list[Arrival]:
    """JSON lines: `timestamp` (seconds, or milliseconds in Mooncake's traces, which have `hash_ids`), `input_length`,
    `output_length`; or `arrival`, `prompt_tokens`, `output_tokens`. Or CSV (trace_columns.py), of which `model` takes
    the requests of one model."""
    fresh = _FreshIds(1 << 32)
    arrivals: list[Arrival] = []
    empty = 0  # the first line without a request, if any
    read: Callable[[str], Any] = json.loads
    for number, line in enumerate(_lines(path), 1):
        if number == 1 and line.strip() and not line.lstrip().startswith("{"):
            read = partial(TraceColumns(path, line).values, model=model)
            continue
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            raise BadRequest(f"{path}: line {empty} is empty, and requests follow", "remove it", param="trace")
        if (arrival := _read_line(path, number, line, read, fresh)) is not None:
            arrivals.append(arrival)
            _check_time(path, number, arrivals)
    if not arrivals:
        raise BadRequest(f"{path} has no requests", param="trace")
    return arrivals


def _check_time(path: Path, number: int, arrivals: list[Arrival]) -> None:
    if len(arrivals) < 2:
        return
    before, now = arrivals[-2].time, arrivals[-1].time
    if now < before:
        raise BadRequest(
            f"{path}: line {number} comes at {now:g} s, before the line above it at {before:g} s",
            "sort the trace by time",
            param="trace",
        )
    if now - before > MAX_GAP:
        raise BadRequest(
            f"{path}: line {number} comes {now - before:,.0f} s after the line above it: {MAX_GAP:,} s may pass",
            "times are seconds, with `hash_ids` milliseconds; cut the trace at the gap",
            param="trace",
        )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                if number == MAX_TRACE_LINES:
                    raise BadRequest(f"{path} has more than {MAX_TRACE_LINES:,} lines", "cut it", param="trace")
                yield line
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="trace") from error


def _read_line(path: Path, number: int, line: str, read: Callable[[str], Any], fresh: _FreshIds) -> Arrival | None:
    try:
        if (values := read(line)) is None:
            return None
        hashes = values.get("hash_ids")
        time = float(values.get("timestamp", values.get("arrival"))) / (1000 if hashes is not None else 1)
        num_prompt = _whole(values.get("input_length", values.get("prompt_tokens")))
        output = _whole(values.get("output_length", values.get("output_tokens")))
        priority = _whole(values.get("priority", 0))
        shared = [int(block) for block in hashes or ()]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadRequest(
            f"{path}: line {number} is not a request",
            'write {"timestamp": 0.5, "input_length": 100, "output_length": 20}, or CSV as its first line says',
            param="trace",
        ) from error
    if not 0 <= time < math.inf:
        raise BadRequest(f"{path}: line {number} comes at {time:g} s", "times count from 0", param="trace")
    if num_prompt < 1 or output < 1:
        raise BadRequest(
            f"{path}: line {number} has {num_prompt:,} tokens of a prompt and {output:,} of an output",
            "both are at least 1", param="trace",
        )  # fmt: skip
    if num_prompt + output > MAX_TOKENS:
        raise BadRequest(
            f"{path}: line {number} has {num_prompt + output:,} tokens, and a request may have {MAX_TOKENS:,}",
            param="trace",
        )
    shared = shared[: -(-num_prompt // TRACE_BLOCK)]
    ends = [min(TRACE_BLOCK, num_prompt - TRACE_BLOCK * number) for number in range(len(shared))]
    blocks = [range(block * TRACE_BLOCK, block * TRACE_BLOCK + end) for block, end in zip(shared, ends, strict=True)]
    return Arrival(time, joined(*blocks, fresh.take(num_prompt - sum(ends))), output, priority, line=number)


def _whole(value: Any) -> int:
    """Raises ValueError for 10.5, which is no number of tokens."""
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError(value)
    return int(value)
