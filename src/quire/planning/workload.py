"""Requests over time: generated, or read from a trace."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from quire.core.errors import BadRequest

MAX_TRACE_LINES = 10_000_000
TRACE_BLOCK = 512  # tokens that one entry of `hash_ids` stands for, as in Mooncake's traces


@dataclass(slots=True)
class Arrival:
    """A request that comes at `time` seconds: tokens, so that equal prefixes are found as they are in an engine."""

    time: float
    prompt_ids: list[int]
    output: int  # tokens
    priority: int = 0
    # The next turn of the conversation: its time counts from the end of this answer, and its prompt follows the answer.
    followed_by: "Arrival | None" = None

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
        if not self.rate > 0:
            raise BadRequest(f"rate is {self.rate}", "it must be above 0; inf: all requests at once", param="rate")
        if not 0 <= self.spread <= 1:
            raise BadRequest(f"spread is {self.spread}", "it is a share: from 0 to 1", param="spread")
        if self.shared_prefix < 0 or self.think_seconds < 0:
            raise BadRequest("shared_prefix and think_seconds must be at least 0", param="shared_prefix")


def generate(spec: WorkloadSpec) -> list[Arrival]:
    """Poisson arrivals, in order of time. Of a conversation the first turn; the others follow it."""
    rng = random.Random(spec.seed)
    fresh = count(1)  # token ids that no other prompt has
    prefixes = [[next(fresh) for _ in range(spec.shared_prefix)] for _ in range(spec.num_prefixes)]
    arrivals: list[Arrival] = []
    now, left = 0.0, spec.num_requests
    while left:
        for _ in range(spec.burst):
            turns = min(left, spec.turns)
            left -= turns
            if turns:
                arrivals.append(_conversation(spec, rng, fresh, list(rng.choice(prefixes)), now, turns))
        if math.isfinite(spec.rate):
            now += rng.expovariate(spec.rate / (spec.burst * spec.turns))
    return arrivals


def _conversation(
    spec: WorkloadSpec, rng: random.Random, fresh: Iterator[int], prefix: list[int], now: float, turns: int
) -> Arrival:
    priority = rng.randrange(spec.priorities) if spec.priorities > 1 else 0
    prompt = prefix + [next(fresh) for _ in range(_vary(rng, spec.prompt, spec.spread))]
    first = Arrival(now, prompt, _vary(rng, spec.output, spec.spread), priority)
    if turns > 1:
        first.followed_by = _conversation(spec, rng, fresh, [], spec.think_seconds, turns - 1)
    return first


def _vary(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))


def read_trace(path: Path) -> list[Arrival]:
    """JSON lines: `timestamp` (seconds, or milliseconds in Mooncake's traces, which have `hash_ids`), `input_length`,
    `output_length`; or `arrival`, `prompt_tokens`, `output_tokens`."""
    fresh = count(1 << 32)
    arrivals = [_read_line(path, number, line, fresh) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not arrivals:
        raise BadRequest(f"{path} has no requests", param="trace")
    for number, (before, after) in enumerate(pairwise(arrivals), 2):
        if after.time < before.time:
            raise BadRequest(
                f"{path}: request {number} comes at {after.time:g} s, before the one above it at {before.time:g} s",
                "sort the trace by time",
                param="trace",
            )
    return arrivals


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number == MAX_TRACE_LINES:
                    raise BadRequest(f"{path} has more than {MAX_TRACE_LINES:,} lines", "cut it", param="trace")
                yield line
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="trace") from error


def _read_line(path: Path, number: int, line: str, fresh: Iterator[int]) -> Arrival:
    try:
        values = json.loads(line)
        hashes = values.get("hash_ids")
        time = float(values.get("timestamp", values.get("arrival"))) / (1000 if hashes is not None else 1)
        num_prompt = int(values.get("input_length", values.get("prompt_tokens")))
        output = int(values.get("output_length", values.get("output_tokens")))
    except (ValueError, TypeError, AttributeError) as error:
        raise BadRequest(
            f"{path}: line {number} is not a request",
            'write {"timestamp": 0.5, "input_length": 100, "output_length": 20}',
            param="trace",
        ) from error
    if not (math.isfinite(time) and time >= 0 and num_prompt >= 1 and output >= 1):
        raise BadRequest(f"{path}: line {number} has a negative time or no tokens", param="trace")
    prompt = [int(block) * TRACE_BLOCK + i for block in hashes or () for i in range(TRACE_BLOCK)][:num_prompt]
    prompt += [next(fresh) for _ in range(num_prompt - len(prompt))]
    return Arrival(time, prompt, output, int(values.get("priority", 0)))
