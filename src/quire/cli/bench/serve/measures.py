"""Figures of a load, with the keys of vLLM's result file."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from quire.cli.bench.serve.flags import METRICS
from quire.cli.bench.serve.generator import LoadRun, Outcome
from quire.cli.bench.serve.stream import StreamedAnswer
from quire.planning.percentiles import percentile

Count = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """One answered request: seconds, tokens."""

    index: int  # in the dataset
    answer: StreamedAnswer
    num_prompt: int
    num_output: int

    @property
    def e2el(self) -> float:
        return self.answer.ended - self.answer.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first."""
        return (self.e2el - self.answer.ttft) / (self.num_output - 1) if self.num_output > 1 else None


def measured(outcomes: Sequence[Outcome], prompt_lens: Sequence[int], count: Count) -> list[Measured]:
    """`prompt_lens` and `count` stand in where the server does not count tokens; where `count` cannot, chunks do."""
    results = []
    for outcome in outcomes:
        if answer := outcome.answer:
            num_prompt = prompt_lens[outcome.index] if answer.num_prompt is None else answer.num_prompt
            num_output = answer.num_output
            if num_output is None:
                counted = count(answer.text)
                num_output = len(answer.moments) if counted is None else counted
            results.append(Measured(outcome.index, answer, num_prompt, num_output))
    return results


def figures_of(
    run: LoadRun, requests: Sequence[Measured], percentiles: Sequence[float], goals: Mapping[str, float]
) -> dict[str, Any]:
    seconds = run.seconds or float("inf")
    num_input, num_output = (sum(getattr(each, name) for each in requests) for name in ("num_prompt", "num_output"))
    figures: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(requests),
        "failed": len(run.outcomes) - len(requests),
        "interrupted": run.interrupted,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(requests) / seconds,
        "request_goodput": sum(keeps(each, goals) for each in requests) / seconds if goals else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": peak_rate(requests, run.begin),
        "max_concurrent_requests": peak_concurrency(run.outcomes),
        "failures": dict(Counter(outcome.failure for outcome in run.outcomes if outcome.failure).most_common()),
    }
    for name in METRICS:
        figures |= spread(name, times_of(name, requests), percentiles)
    return figures


def times_of(metric: str, requests: Sequence[Measured]) -> list[float]:
    match metric:
        case "ttft":
            return [each.answer.ttft for each in requests]
        case "tpot":
            return [each.tpot for each in requests if each.tpot is not None]
        case "itl":
            return [gap for each in requests for gap in each.answer.gaps]
        case _:
            return [each.e2el for each in requests]


def spread(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds, from seconds; None without values."""
    if not values:
        names = ["mean", "median", "std", *(f"p{share:g}" for share in percentiles)]
        return {f"{name}_{metric}_ms": None for name in names}
    statistics = {"mean": fmean(values), "median": percentile(values, 50), "std": pstdev(values)}
    statistics |= {f"p{share:g}": percentile(values, share) for share in percentiles}
    return {f"{name}_{metric}_ms": 1e3 * value for name, value in statistics.items()}


def keeps(request: Measured, goals: Mapping[str, float]) -> bool:
    """Whether it is within the bounds, in milliseconds. One token has no time between tokens."""
    times = {"ttft": request.answer.ttft, "tpot": request.tpot or 0.0, "e2el": request.e2el}
    return all(1e3 * times[name] <= bound for name, bound in goals.items())


def peak_rate(requests: Sequence[Measured], begin: float) -> float:
    """Tokens of the best second, counted from the start. A chunk of several tokens counts with their mean number."""
    tokens: defaultdict[int, float] = defaultdict(float)  # second -> how many
    for each in requests:
        for moment in each.answer.moments:
            tokens[int(moment - begin)] += each.num_output / len(each.answer.moments)
    return max(tokens.values(), default=0.0)


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests in flight at one moment; one that begins when another ends is not beside it."""
    changes = sorted([(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes])
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def details(run: LoadRun, requests: Sequence[Measured]) -> dict[str, Any]:
    """Each request, in the order of the dataset."""
    answered = {each.index: each for each in requests}
    rows = [(outcome, answered.get(outcome.index)) for outcome in sorted(run.outcomes, key=lambda o: o.index)]
    return {
        "input_lens": [each.num_prompt if each else 0 for _, each in rows],
        "output_lens": [each.num_output if each else 0 for _, each in rows],
        "ttfts": [each.answer.ttft if each else 0.0 for _, each in rows],
        "itls": [each.answer.gaps if each else [] for _, each in rows],
        "latencies": [outcome.ended - outcome.sent for outcome, _ in rows],
        "start_times": [outcome.sent - run.begin for outcome, _ in rows],
        "queue_times": [outcome.queued for outcome, _ in rows],
        "generated_texts": [each.answer.text if each else "" for _, each in rows],
        "errors": [outcome.failure for outcome, _ in rows],
    }
