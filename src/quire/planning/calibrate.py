"""Requests that show what steps of a model take while it is served, and what is learnt from these steps."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from math import exp, log, log2
from random import Random
from statistics import fmean, median

from quire.planning.fitted_times import size_of
from quire.planning.least_squares import fit_usual, non_negative_least_squares
from quire.planning.recent_rate import RecentRate
from quire.planning.step_fit import MeasuredStep, fit
from quire.planning.step_log import LoggedStep, Told
from quire.planning.step_times import ServingCosts, StepTimes, StepWork

MAX_SECONDS, MAX_GPU_SECONDS = 16.0, 18.0  # of all rounds
WARM_UP_SHARE, RAMP_SHARE = 0.25, 0.35  # of these, on a GPU
MAX_OUTLIER = 3.0  # times the median: a longer step tells of something else on this machine
MIN_CPU = 0.001  # seconds of a round that tells what a server takes
MIN_ROUNDS, MIN_TOLD = 8, 40  # of the server
LOOP_BEFORE = 0.5  # of a turn of the loop of a GPU's engine, what comes before a step is queued
MIN_PREFIX = 512  # tokens
RATES = 5  # kinds of steps by what a GPU computed just before
MAX_GAP = 0.1  # seconds between two steps that the engine's loop takes at most


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are sent together."""

    num_streams: int
    prompt: int  # tokens of each, behind its prefix
    output: int  # in the mean: half as many of the first stream, and half more of the last
    prefix: int = 0  # tokens that the prompts begin with, and that are cached
    num_prefixes: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_streams * (self.prompt + self.output) + self.num_prefixes * self.prefix

    def outputs(self) -> list[int]:
        """The output lengths of streams. They end one after the other, so that steps of all sizes run."""
        if self.num_streams == 1:
            return [self.output]
        return [round(self.output * (0.5 + each / (self.num_streams - 1))) for each in range(self.num_streams)]


# The most telling first: on a slow machine there is time for these alone. Prompts of streams that came together are
# computed beside those that decode already, as the scheduler divides them.
ROUNDS = (
    Round(1, 16, 17), Round(1, 64, 2), Round(8, 32, 17), Round(1, 256, 2), Round(32, 24, 13), Round(4, 40, 33),
    Round(1, 128, 2), Round(1, 24, 2), Round(1, 48, 2), Round(1, 8, 9), Round(2, 100, 33), Round(1, 512, 2),
    Round(12, 64, 32), Round(6, 32, 16, prefix=512), Round(1, 32, 33), Round(1, 96, 2), Round(1, 1536, 33),
    Round(1, 192, 2), Round(3, 160, 40), Round(1, 80, 17), Round(1, 384, 2), Round(32, 24, 33), Round(64, 24, 24),
    Round(4, 768, 24), Round(64, 96, 40, prefix=2048, num_prefixes=8), Round(48, 1280, 48), Round(128, 32, 24),
    Round(256, 32, 24), Round(12, 3072, 32), Round(16, 1024, 32), Round(24, 48, 24, prefix=1024, num_prefixes=4),
    Round(32, 512, 48), Round(128, 128, 32, prefix=1024, num_prefixes=8), Round(96, 256, 32),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ramp:
    """Streams of which there are more and more. Each sends a request when its last has ended, so that prompts of all
    lengths come beside any number of sequences."""

    num_streams: int
    prompts: tuple[int, int]  # tokens: the fewest and the most
    outputs: tuple[int, int]
    prefix: int = 2048  # cached tokens, of which some prompts begin with a quarter or more
    num_prefixes: int = 4
    prefix_share: float = 0.4  # of the prompts

    def begins(self) -> list[float]:
        """When streams begin, as shares of the time: each number of them is there for as long as twice as many."""
        return [0.85 * log2(number + 1) / log2(self.num_streams + 1) for number in range(self.num_streams)]

    def draw(self, rng: Random) -> tuple[int, int, int]:
        """-> tokens of a prompt's prefix, its own tokens, and how many are asked for."""
        has_prefix = self.num_prefixes > 0 and rng.random() < self.prefix_share
        prefix = _between(rng, self.prefix // 4, self.prefix) if has_prefix else 0
        low, high = self.prompts
        return prefix, _between(rng, low, high // 8 if has_prefix else high), _between(rng, *self.outputs)


def _between(rng: Random, low: int, high: int) -> int:
    """Short lengths are as likely as long ones."""
    return round(exp(rng.uniform(log(low), log(max(low, high)))))


def ramp_that_fits(max_model_len: int, max_num_seqs: int) -> Ramp:
    longest = min(2048, max_model_len // 2)
    prefix = min(2048, max_model_len // 2)
    outputs = min(16, max_model_len // 8), min(200, max_model_len // 4)
    num_prefixes = 4 if prefix >= MIN_PREFIX else 0
    return Ramp(min(96, max_num_seqs), (min(16, longest), longest), outputs, prefix, num_prefixes)


def rounds_that_fit(max_model_len: int, max_num_seqs: int) -> list[Round]:
    return [
        each
        for each in ROUNDS
        if each.prefix + each.prompt + max(each.outputs()) <= max_model_len and each.num_streams <= max_num_seqs
    ]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a request to an idle server. Moments of time.perf_counter()."""

    sent: float
    seen: float


def mean_steps(steps: Sequence[LoggedStep], graphs: bool = False) -> list[MeasuredStep]:
    """Steps that are nearly alike, as one: a single one tells little where other programs run now and then. `graphs`:
    they are padded to the sizes of CUDA graphs."""
    alike: dict[tuple[int, ...], list[LoggedStep]] = defaultdict(list)
    most = _most_recent(steps)
    for step in steps:
        alike[_kind(step.work, graphs, most)].append(step)
    return [_mean(group) for group in alike.values()]


def _most_recent(steps: Sequence[LoggedStep]) -> int:
    return max((step.work.recent for step in steps), default=0) or 1


def _kind(work: StepWork, graphs: bool, most: int) -> tuple[int, ...]:
    """`most`: of `recent`."""
    shared = round(4 * work.num_shared / max(1, work.num_read))
    if not graphs:
        size = round(8 * log2(work.num_tokens))
        return work.num_chunks > 0, size, round(2 * log2(1 + work.num_read)), shared
    alone = round(2 * log2(1 + work.num_read - work.num_chunk_read)) if work.num_chunks else 0
    recent = round(RATES * work.recent / most)
    return work.num_chunks > 0, size_of(work, True), round(2 * log2(1 + work.num_read)), shared, alone, recent


def device_steps(steps: Sequence[LoggedStep], graphs: bool) -> list[MeasuredStep]:
    """What a GPU worked on steps, of which many take less than the engine's loop beside them."""
    return mean_steps([replace(step, seconds=step.on_device) for step in steps if step.on_device], graphs)


def with_recent(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Each with what a GPU computed just before."""
    rate, told = RecentRate(), []
    for step in steps:
        told.append(replace(step, work=replace(step.work, recent=rate.at(step.began))))
        rate.add(step.work.num_tokens, step.began, step.seconds)
    return told


def loop_costs(steps: Sequence[LoggedStep]) -> ServingCosts:
    """What the loop of a GPU's engine takes from the end of one step to the end of the next, beside waiting: it tells
    of the one, takes requests, and plans the step after the next."""
    turns = [
        (before, step, after)
        for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
        if before.goes_on and step.goes_on and step.seconds < MAX_GAP
    ]
    if not turns:
        return ServingCosts()
    rows = [
        [1.0, step.work.num_rows, after.work.num_chunks > 0, step.num_new, after.num_admitted, before.num_ended]
        for before, step, after in turns
    ]
    seconds = [step.seconds - step.waited for _, step, _ in turns]
    own = fit_usual(rows, seconds)
    return ServingCosts(step=own[0], row=own[1], prompts=own[2], arrival=sum(own[3:]))


@dataclass(frozen=True, slots=True)
class ServedRound:
    """What a server did, by time.perf_counter(), and how long its CPU was busy with it."""

    began: float
    ended: float
    cpu_seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_tokens: int  # sent, each by itself


def server_costs(told: Sequence[Told], served: Sequence[ServedRound]) -> ServingCosts:
    """What the server of a GPU's engine takes for the message of a step, for each token in it, and for what it writes
    to a client; and for a request and its prompt: what its CPU did beside messages."""
    known = [each for each in served if each.cpu_seconds >= MIN_CPU]
    if len(known) < MIN_ROUNDS or len(told) < MIN_TOLD:
        return ServingCosts()
    numbers = [[each.num_messages, each.num_tokens, each.num_writes] for each in told]
    seconds = [each.seconds for each in told]
    message, stream, write = fit_usual(numbers, seconds)
    rows, others = [], []
    for each in known:
        own = [one for one in told if each.began <= one.began < each.ended]
        rest = each.cpu_seconds - sum(one.seconds for one in own)
        num_messages = sum(one.num_messages for one in own)
        rows.append([n / each.cpu_seconds for n in (each.num_requests, each.num_prompt_tokens, num_messages)])
        others.append(rest / each.cpu_seconds)
    taken, prompt_token, beside = fit_usual(rows, others)
    return ServingCosts(taken=taken, prompt_token=prompt_token, message=message + beside, stream=stream, write=write)


def undisturbed(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Steps of a CPU but those in which requests came: the server reads these on the cores that compute. The engine's
    loop takes them when the step has ended."""
    return [step for step, num in zip(steps, _num_arrivals(steps), strict=True) if not num]


def arrival_seconds(steps: Sequence[LoggedStep], times: StepTimes) -> float:
    """How much longer a step of a CPU is for each request that came while it ran."""
    disturbed = [(step, num) for step, num in zip(steps, _num_arrivals(steps), strict=True) if num]
    longer = sum(step.seconds - times.seconds(step.work) for step, _ in disturbed)
    return max(0.0, longer) / max(1, sum(num for _, num in disturbed))


def _num_arrivals(steps: Sequence[LoggedStep]) -> list[int]:
    return [*(step.num_new for step in steps[1:]), 0]


def _mean(steps: list[LoggedStep]) -> MeasuredStep:
    seconds = _usual([step.seconds for step in steps])
    numbers = zip(*(astuple(step.work) for step in steps), strict=True)
    return MeasuredStep(StepWork(*(round(fmean(column)) for column in numbers)), seconds, len(steps))


def _usual(seconds: list[float]) -> float:
    """The mean, in which none is much longer than most."""
    longest = MAX_OUTLIER * median(seconds)
    return fmean(min(each, longest) for each in seconds)


def gapless(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Steps of a GPU, each with the time since the one before: the device waited for the engine's loop."""
    longer = list(steps[:1])
    for before, after in pairwise(steps):
        gap = after.began - before.ended
        waited = before.goes_on and 0 < gap < MAX_GAP
        longer.append(replace(after, began=before.ended, seconds=after.seconds + gap) if waited else after)
    return longer


def request_seconds(steps: Sequence[LoggedStep], first_tokens: Sequence[FirstToken]) -> float:
    """What passes between a client and the steps of its request."""
    delays = []
    for token in first_tokens:
        own = [step for step in steps if token.sent <= step.began and step.ended <= token.seen]
        if own:
            delays.append(token.seen - token.sent - (own[-1].ended - own[0].began))
    return median(delays) if delays else 0.0


def serving_costs(steps: Sequence[LoggedStep], first_tokens: Sequence[FirstToken]) -> ServingCosts:
    """Of a CPU: what passes between steps, and between a client and the steps of its request."""
    gaps: dict[int, list[float]] = defaultdict(list)
    for before, after in pairwise(steps):
        gap = after.began - before.ended
        if before.goes_on and 0 <= gap < MAX_GAP:
            gaps[before.work.num_rows].append(gap)
    step = row = 0.0
    if gaps:
        typical = {num_rows: max(1e-6, _usual(values)) for num_rows, values in gaps.items()}
        columns = [[1 / gap, num_rows / gap] for num_rows, gap in typical.items()]
        step, row = non_negative_least_squares(columns, [1.0] * len(columns))
    return ServingCosts(step=step, row=row, request=request_seconds(steps, first_tokens))


def learn(steps: Sequence[LoggedStep], first_tokens: Sequence[FirstToken]) -> tuple[list[MeasuredStep], ServingCosts]:
    """What a CPU's steps tell: those to fit times to, and what serving adds."""
    alike = mean_steps(undisturbed(steps))
    arrival = arrival_seconds(steps, fit(alike)) if alike else 0.0
    return alike, replace(serving_costs(steps, first_tokens), arrival=arrival)


def learn_gpu(
    steps: Sequence[LoggedStep],
    first_tokens: Sequence[FirstToken],
    served: Sequence[ServedRound],
    told: Sequence[Told],
    graphs: bool,
) -> tuple[list[MeasuredStep], ServingCosts]:
    """The same of a GPU's, whose loop works beside it. What a request of an idle server waits for has a part of a turn
    of the loop in it."""
    together = with_recent(gapless(steps))
    loop, server = loop_costs(together), server_costs(told, served)
    turn = loop.step + loop.row + loop.prompts
    request = max(0.0, request_seconds(together, first_tokens) - LOOP_BEFORE * turn)
    costs = replace(server, step=loop.step, row=loop.row, prompts=loop.prompts, arrival=loop.arrival, request=request)
    return device_steps(together, graphs), costs
