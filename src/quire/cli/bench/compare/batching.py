"""Static against continuous batching: the same requests, the same engine, the same number of rows."""

from collections.abc import Sequence

from quire.cli.bench.compare.charts import BarChart, TimelineChart
from quire.cli.bench.compare.lab import Lab, RequestTrace, RunTrace, in_turn, same_tokens
from quire.cli.bench.compare.result import Column, Figure, Result, Row, bars, doubt, times
from quire.cli.bench.prompts import BenchRequest, random_prompts
from quire.planning.percentiles import percentile

TITLE = "static against continuous batching"
SIDES = ("static", "continuous")


def compare(lab: Lab) -> Result:
    sizes = lab.sizes
    engine = lab.engine(length=sizes.input_len + sizes.output_len, num_seqs=sizes.batch_size)
    requests = spread_requests(
        sizes.num_prompts, sizes.input_len, sizes.output_len, engine.capacity.vocab_size, lab.seed
    )

    def one_round(number: int) -> dict[str, RunTrace]:
        runs = {}
        for side in in_turn(number, SIDES):
            batch = sizes.batch_size if side == "static" else len(requests)
            runs[side] = _in_batches([lab.run(engine, part) for part in parts(requests, batch)])
        return runs

    rounds = lab.rounds(one_round)
    rows = [_row(side, [done[side] for done in rounds], sizes.batch_size) for side in SIDES]
    first = rounds[0]
    static, continuous = rows
    gain = times(continuous["tokens_per_second"], static["tokens_per_second"])
    waits = times(static["mean_latency"], continuous["mean_latency"])
    return Result(
        title=TITLE,
        columns=[
            Column("side", ""),
            Column("tokens_per_second", "output tok/s", 1),
            Column("mean_latency", "mean latency s", 3),
            Column("p99_latency", "p99 latency s", 3),
            Column("rows_used", "rows used %"),
        ],
        rows=rows,
        conclusion=f"continuous batching gives {gain} times the tokens a second; static batching makes a request take "
        f"{waits} times as long"
        + doubt(*((static[key], continuous[key]) for key in ("tokens_per_second", "mean_latency"))),
        held_fixed=f"the engine, {sizes.batch_size} rows, {sizes.num_prompts} requests that all come at once, prompts "
        f"of {sizes.input_len} tokens, outputs of {min(r.output_len for r in requests)} to "
        f"{max(r.output_len for r in requests)} tokens, greedy",
        notes=[
            same_tokens(first["static"], first["continuous"]),
            "the static side waits for the slowest of its batch and pays nothing else: unlike in older engines, rows "
            "that have ended are not computed, and prompts are not padded",
        ],
        charts=[
            BarChart("throughput", "output tokens/s, higher is better", bars(rows, "tokens_per_second")),
            BarChart("mean latency", "seconds, lower is better", bars(rows, "mean_latency")),
            TimelineChart("which sequence holds which row", [(side, _lanes(first[side].requests)) for side in SIDES]),
        ],
        rounds=len(rounds),
    )


def spread_requests(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Most outputs are short and a few are long, as those of people: from an eighth of `output_len` up to all of it,
    in an order that is not sorted."""
    prompts = random_prompts(count, input_len, output_len, vocab_size, seed)
    least = max(output_len // 8, 1)
    shares = [((index * 7) % count / max(count - 1, 1)) ** 2 for index in range(count)]
    return [
        BenchRequest(prompt.prompt_ids, least + round((output_len - least) * min(share, 1.0)))
        for prompt, share in zip(prompts, shares, strict=True)
    ]


def parts(requests: Sequence[BenchRequest], size: int) -> list[Sequence[BenchRequest]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _in_batches(runs: Sequence[RunTrace]) -> RunTrace:
    """Runs one after the other as one: all requests were there at the beginning."""
    whole = RunTrace([], [], 0.0)
    for run in runs:
        for request in run.requests:
            request.times = [time + whole.seconds for time in request.times]
            request.admitted += whole.seconds
            request.asked = 0.0
        whole = RunTrace(whole.requests + run.requests, whole.records + run.records, whole.seconds + run.seconds)
    return whole


def _row(side: str, runs: Sequence[RunTrace], num_rows: int) -> Row:
    latencies = [[request.latency for request in run.requests] for run in runs]
    steps, drawn = runs[0].records, sum(len(request.tokens) for request in runs[0].requests)
    return {
        "side": side,
        "tokens_per_second": Figure.of([run.num_output / run.seconds for run in runs]),
        "mean_latency": Figure.of([sum(one) / len(one) for one in latencies]),
        "p99_latency": Figure.of([percentile(one, 99) for one in latencies]),
        "rows_used": 100 * drawn / (num_rows * len(steps)),
    }


def _lanes(requests: Sequence[RequestTrace]) -> list[list[tuple[float, float]]]:
    """A request goes into the first row that is free when it is admitted."""
    lanes: list[list[tuple[float, float]]] = []
    for request in sorted(requests, key=lambda request: request.admitted):
        span = (max(request.admitted, 0.0), request.times[-1])
        free = next((lane for lane in lanes if lane[-1][1] <= span[0] + 1e-3), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes
