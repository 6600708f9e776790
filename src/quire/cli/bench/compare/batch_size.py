"""Batch size against latency and throughput: what one more user costs the others."""

from quire.cli.bench.compare.charts import LineChart
from quire.cli.bench.compare.lab import Lab, in_turn
from quire.cli.bench.compare.result import Column, Figure, Result, Row, doubt, times, value
from quire.cli.bench.prompts import random_prompts

TITLE = "batch size against latency and throughput"


def compare(lab: Lab) -> Result:
    sizes = lab.sizes
    batches = sorted(sizes.batch_sizes)
    engine = lab.engine(length=sizes.input_len + sizes.output_len, num_seqs=batches[-1])
    requests = random_prompts(batches[-1], sizes.input_len, sizes.output_len, engine.capacity.vocab_size, lab.seed)

    def decode(batch: int) -> tuple[float, float, float]:
        """Output tokens a second while decoding, seconds a token, seconds of a whole request."""
        run = lab.run(engine, requests[:batch])
        first, last = max(r.times[0] for r in run.requests), max(r.times[-1] for r in run.requests)
        gaps = [gap for request in run.requests for gap in request.gaps]
        num_decoded = sum(time > first for request in run.requests for time in request.times)
        latencies = [request.latency for request in run.requests]
        return num_decoded / (last - first), sum(gaps) / len(gaps), sum(latencies) / batch

    rounds = lab.rounds(lambda number: {batch: decode(batch) for batch in in_turn(number, batches)})
    rows: list[Row] = [
        {
            "batch": str(batch),
            "tokens_per_second": Figure.of([done[batch][0] for done in rounds]),
            "tpot": Figure.of([1e3 * done[batch][1] for done in rounds]),
            "latency": Figure.of([1e3 * done[batch][2] for done in rounds]),
        }
        for batch in batches
    ]
    one, best = rows[0], max(rows, key=lambda row: value(row, "tokens_per_second"))
    more, longer = (times(best[key], one[key]) for key in ("tokens_per_second", "tpot"))
    return Result(
        title=TITLE,
        columns=[
            Column("batch", "batch size"),
            Column("tokens_per_second", "decode tok/s", 1),
            Column("tpot", "TPOT ms", 1),
            Column("latency", "whole request ms", 0),
        ],
        rows=rows,
        conclusion=f"a batch of {best['batch']} decodes {more} times the tokens a second of a batch of {one['batch']}, "
        f"and a token of one user takes {longer} times as long"
        + doubt((best["tokens_per_second"], one["tokens_per_second"])),
        held_fixed=f"the engine, prompts of {sizes.input_len} tokens that all come at once, outputs of "
        f"{sizes.output_len} tokens, greedy",
        charts=[
            LineChart(
                title,
                "batch size",
                unit,
                {name: [(batch, value(row, key)) for batch, row in zip(batches, rows, strict=True)]},
                log_x=True,
            )
            for title, unit, name, key in (
                ("throughput", "tokens/s while decoding", "decode tokens/s", "tokens_per_second"),
                ("time per output token", "milliseconds", "TPOT", "tpot"),
            )
        ],
        rounds=len(rounds),
    )
