"""Without against with a KV cache: the time of one token behind a context of growing length."""

from quire.cli.bench.compare.charts import LineChart
from quire.cli.bench.compare.lab import Lab, in_turn
from quire.cli.bench.compare.result import Column, Figure, Result, Row, doubt, ratio, times, value
from quire.cli.bench.prompts import BenchRequest, random_prompts

TITLE = "generation without against with a KV cache"
SIDES = ("without", "with")
STEPS = 4  # tokens behind each length whose time is taken


def compare(lab: Lab) -> Result:
    lengths = sorted(lab.sizes.lengths)
    engine = lab.engine(length=lengths[-1] + STEPS + 1, num_seqs=1)
    whole = random_prompts(1, lengths[-1], 1, engine.capacity.vocab_size, lab.seed)[0].prompt_ids
    differing = 0

    computed: dict[tuple[str, int], int] = {}

    def with_cache(length: int) -> tuple[float, list[int]]:
        """Seconds of each token that follows a prefill, which does not count, and the tokens."""
        run = lab.run(engine, [BenchRequest(whole[:length], STEPS + 1)])
        computed["with", length] = (run.num_computed - length) // STEPS
        return sum(run.requests[0].gaps) / STEPS, run.requests[0].tokens

    def without_cache(length: int, known: list[int]) -> tuple[float, list[int]]:
        """The next token, by computing all tokens before it again."""
        run = lab.run(engine, [BenchRequest([*whole[:length], *known], 1)])
        computed["without", length] = run.num_computed
        return run.requests[0].latency, run.requests[0].tokens

    known = {length: with_cache(length)[1] for length in lengths}

    def one_round(number: int) -> dict[tuple[str, int], float]:
        nonlocal differing
        seconds = {}
        for length in lengths:
            for side in in_turn(number, SIDES):
                if side == "with":
                    seconds[side, length], _ = with_cache(length)
                else:
                    seconds[side, length], token = without_cache(length, known[length][:1])
                    differing += token != known[length][1:2]
        return seconds

    rounds = lab.rounds(one_round)
    rows: list[Row] = [
        {"length": f"{length:,}"} | {side: Figure.of([1e3 * done[side, length] for done in rounds]) for side in SIDES}
        for length in lengths
    ]
    for length, row in zip(lengths, rows, strict=True):
        row["times"] = ratio(row["without"], row["with"])
        row |= {f"{side}_computed": computed[side, length] for side in SIDES}
    last = rows[-1]
    return Result(
        title=TITLE,
        columns=[
            Column("length", "tokens before"),
            Column("without", "without: ms a token", 1),
            Column("with", "with: ms a token", 2),
            Column("times", "times", 1),
            Column("without_computed", "without: tokens computed"),
            Column("with_computed", "with: tokens computed"),
        ],
        rows=rows,
        conclusion=f"behind {last['length']} tokens, one more takes {value(last, 'with'):.1f} ms with the cache and "
        f"{value(last, 'without'):.0f} ms without: {times(last['without'], last['with'])} times as long"
        + doubt((last["without"], last["with"])),
        held_fixed="the engine, one sequence, the same tokens, greedy, prefix caching off",
        notes=[
            "without a cache, a token costs a prefill of all tokens before it: kernels for many rows, which are the "
            "best there are for it",
            "both sides gave the same tokens" if not differing else f"{differing} tokens differ between the sides",
        ],
        charts=[
            LineChart(
                "time of one token by the tokens before it",
                "tokens before it",
                "milliseconds, logarithmic",
                {
                    f"{side} a KV cache": [
                        (length, value(row, side)) for length, row in zip(lengths, rows, strict=True)
                    ]
                    for side in SIDES
                },
                log_x=True,
                log_y=True,
            )
        ],
        rounds=len(rounds),
    )
