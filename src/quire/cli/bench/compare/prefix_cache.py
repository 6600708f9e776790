"""Prefix cache cold against warm: the time to the first token of a prompt whose prefix was computed before."""

from quire.cli.bench.compare.charts import LineChart
from quire.cli.bench.compare.lab import Lab
from quire.cli.bench.compare.result import Column, Figure, Result, Row, doubt, ratio, times, value
from quire.cli.bench.prompts import BenchRequest, random_prompts

TITLE = "prefix cache: cold against warm"
SIDES = ("cold", "warm")


def compare(lab: Lab) -> Result:
    lengths, suffix = sorted(lab.sizes.lengths), lab.sizes.input_len
    engine = lab.engine(length=lengths[-1] + suffix + 1, num_seqs=2, enable_prefix_caching=True)
    vocab_size = engine.capacity.vocab_size

    def one_round(number: int) -> dict[tuple[str, int], tuple[float, int]]:
        done = {}
        for length in lengths:
            seed = lab.seed + 1000 * number + length
            prefix = random_prompts(1, length, 1, vocab_size, seed)[0].prompt_ids
            ends = random_prompts(2, suffix, 1, vocab_size, seed + 1)
            engine.reset_prefix_cache()
            for side, end in zip(SIDES, ends, strict=True):
                run = lab.run(engine, [BenchRequest([*prefix, *end.prompt_ids], 1)])
                done[side, length] = run.requests[0].ttft, run.num_computed
        return done

    rounds = lab.rounds(one_round)
    rows: list[Row] = []
    for length in lengths:
        row: Row = {"length": f"{length:,} + {suffix}"}
        for side in SIDES:
            row[side] = Figure.of([1e3 * done[side, length][0] for done in rounds])
            row[f"{side}_computed"] = rounds[0][side, length][1]
        row["times"] = ratio(row["cold"], row["warm"])
        rows.append(row)
    last = rows[-1]
    earlier = times(last["cold"], last["warm"])
    return Result(
        title=TITLE,
        columns=[
            Column("length", "prefix + own tokens"),
            Column("cold", "cold: TTFT ms", 1),
            Column("warm", "warm: TTFT ms", 1),
            Column("times", "times", 1),
            Column("cold_computed", "cold: tokens computed"),
            Column("warm_computed", "warm: tokens computed"),
        ],
        rows=rows,
        conclusion=f"with {lengths[-1]:,} shared tokens the first token comes {earlier} times as early: "
        f"{value(last, 'warm_computed'):,.0f} tokens are computed instead of "
        f"{value(last, 'cold_computed'):,.0f}" + doubt((last["cold"], last["warm"])),
        held_fixed=f"the engine, one request at a time, prompts of equal length, {suffix} tokens of its own each, no "
        "two rounds with the same prefix",
        notes=["a warm request follows a cold one with the same prefix: the two cannot take turns in another order"],
        charts=[
            LineChart(
                "time to the first token",
                "tokens of the shared prefix",
                "milliseconds",
                {
                    side: [(length, value(row, side)) for length, row in zip(lengths, rows, strict=True)]
                    for side in SIDES
                },
            )
        ],
        rounds=len(rounds),
    )
