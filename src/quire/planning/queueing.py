"""How an engine holds up under a steady rate of requests, by arithmetic alone: to leave out what cannot serve it."""

from dataclasses import dataclass
from math import inf, log

from quire.planning.step_times import StepTimes, StepWork

MAX_ROUNDS = 60
TAIL = log(100)  # an exponential wait exceeds this many times its mean once in a hundred
TPOT_TAIL = 1.25  # the slowest of a hundred requests against the mean: each is an average over many steps


@dataclass(frozen=True, slots=True)
class Estimate:
    """The waiting at one engine, in seconds; infinite where requests come faster than it serves them."""

    num_seqs: float  # in flight, on average
    ttft: float
    tpot: float
    ttft_p99: float
    tpot_p99: float

    def p99(self, output: int) -> dict[str, float]:
        return {"ttft": self.ttft_p99, "tpot": self.tpot_p99, "e2e": self.ttft_p99 + output * self.tpot_p99}


SATURATED = Estimate(inf, inf, inf, inf, inf)


def estimate(
    times: StepTimes, rate: float, prompt: int, output: int, max_seqs: int, max_num_batched_tokens: int
) -> Estimate:
    """A step has the sequences that decode, and the prompt tokens that come while it runs: a fixed point."""
    middle = prompt + output // 2
    num_seqs, seconds = 1.0, 0.0
    for _ in range(MAX_ROUNDS):
        prefill = rate * prompt * seconds
        if num_seqs > max_seqs or num_seqs + prefill > max_num_batched_tokens:
            return SATURATED
        before, seconds = seconds, times.seconds(_work(num_seqs, prefill, prompt, middle))
        num_seqs = max(1.0, rate * output * seconds)
        if abs(seconds - before) < 1e-3 * seconds:
            break
    chunk = max(1, int(max_num_batched_tokens - num_seqs))
    alone = _prefill(times, prompt, chunk, num_seqs, middle)
    busy = rate * alone  # the share of the time in which some prompt is computed
    if busy >= 1:
        return SATURATED
    wait = seconds / 2 + busy / (2 * (1 - busy)) * alone  # the step that runs, and prompts before this one
    return Estimate(num_seqs, wait + alone, seconds, TAIL * wait + alone, TPOT_TAIL * seconds)


def _work(num_seqs: float, prefill: float, prompt: int, context: int) -> StepWork:
    return StepWork(
        num_tokens=round(num_seqs + prefill),
        num_rows=max(1, round(num_seqs)),
        num_read=round(num_seqs * context + prefill / 2),
        num_pairs=round(num_seqs * context + prefill * prompt / 2),
    )


def _prefill(times: StepTimes, prompt: int, chunk: int, num_seqs: float, context: int) -> float:
    """Seconds of the steps that compute a prompt beside the sequences that decode."""
    total, start = 0.0, 0
    while start < prompt:
        count = min(chunk, prompt - start)
        pairs = count * start + count * (count + 1) // 2
        decode = round(num_seqs)
        total += times.seconds(
            StepWork(count + decode, decode + 1, start + count + decode * context, pairs + decode * context)
        )
        start += count
    return total
