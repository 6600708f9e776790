"""Chunked prefill on and off: how long decoding users wait for a token while long prompts arrive."""

from collections.abc import Sequence

from quire.cli.bench.compare.charts import BarChart, LineChart
from quire.cli.bench.compare.lab import Lab, RunTrace, in_turn, same_tokens
from quire.cli.bench.compare.result import Column, Figure, Result, Row, bars, doubt, times, value
from quire.cli.bench.prompts import random_prompts
from quire.planning.percentiles import percentile

TITLE = "chunked prefill: off against on"
SIDES = ("off", "on")
SHORT = 16  # tokens of a decoding user's prompt
FIRST_ARRIVAL = 6  # steps before the first long prompt comes


def compare(lab: Lab) -> Result:
    sizes = lab.sizes
    users, num_long = sizes.batch_size, sizes.num_prompts
    budgets = {"off": sizes.input_len + users, "on": min(sizes.chunk_size, sizes.input_len) + users}
    engines = {
        side: lab.engine(
            length=max(sizes.input_len + 2, SHORT + sizes.output_len),
            num_seqs=users + num_long,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=0,
            target_itl_ms=0,
        )
        for side, budget in budgets.items()
    }
    vocab_size = engines["on"].capacity.vocab_size
    requests = random_prompts(users, SHORT, sizes.output_len, vocab_size, lab.seed)
    requests += random_prompts(num_long, sizes.input_len, 1, vocab_size, lab.seed + 1)
    spacing = max((sizes.output_len - FIRST_ARRIVAL) // max(num_long, 1), 1)
    arrivals = {users + index: FIRST_ARRIVAL + index * spacing for index in range(num_long)}

    def one_round(number: int) -> dict[str, RunTrace]:
        return {side: lab.run(engines[side], requests, at_step=arrivals) for side in in_turn(number, SIDES)}

    rounds = lab.rounds(one_round)
    rows = [_row(side, [done[side] for done in rounds], users) for side in SIDES]
    off, on = rows
    first = rounds[0]
    shorter = times(off["max_gap"], on["max_gap"])
    later = times(on["long_ttft"], off["long_ttft"])
    return Result(
        title=TITLE,
        columns=[
            Column("side", ""),
            Column("largest_step", "largest step, tokens"),
            Column("p50_gap", "gap p50 ms", 1),
            Column("p99_gap", "gap p99 ms", 1),
            Column("max_gap", "gap max ms", 1),
            Column("long_ttft", "TTFT of the long ms", 0),
            Column("tokens_per_second", "all tok/s", 0),
        ],
        rows=rows,
        conclusion=f"in chunks, the longest wait for a token is {value(on, 'max_gap'):.0f} ms instead of "
        f"{value(off, 'max_gap'):.0f} ({shorter} times shorter); the long prompts' first token takes {later} "
        "times as long" + doubt((off["max_gap"], on["max_gap"])),
        held_fixed=f"the model, {users} users who decode {sizes.output_len} tokens each, {num_long} prompts of "
        f"{sizes.input_len} tokens that arrive meanwhile before the same steps, greedy, no limit on a step's time",
        notes=[same_tokens(first["off"], first["on"])],
        charts=[
            LineChart(
                "gap before each token of one user",
                "token",
                "milliseconds",
                {
                    f"chunked prefill {side}": [
                        (index, 1e3 * gap) for index, gap in enumerate(first[side].requests[0].gaps, 1)
                    ]
                    for side in SIDES
                },
            ),
            BarChart("longest gap", "milliseconds, lower is better", bars(rows, "max_gap")),
        ],
        rounds=len(rounds),
    )


def _row(side: str, runs: Sequence[RunTrace], users: int) -> Row:
    gaps = [[gap for request in run.requests[:users] for gap in request.gaps] for run in runs]
    firsts = [[request.ttft for request in run.requests[users:]] for run in runs]
    return {
        "side": side,
        "largest_step": max(record.num_tokens for record in runs[0].records),
        "p50_gap": Figure.of([1e3 * percentile(each, 50) for each in gaps]),
        "p99_gap": Figure.of([1e3 * percentile(each, 99) for each in gaps]),
        "max_gap": Figure.of([1e3 * max(each) for each in gaps]),
        "long_ttft": Figure.of([1e3 * sum(each) / len(each) for each in firsts]),
        "tokens_per_second": Figure.of([run.num_computed / run.seconds for run in runs]),
    }
