"""CUDA graphs on and off: what launching every kernel by itself costs a decode step."""

from quire.cli.bench.compare.charts import LineChart
from quire.cli.bench.compare.lab import Lab, NotHere, in_turn
from quire.cli.bench.compare.result import Column, Figure, Result, Row, doubt, ratio, times, value
from quire.cli.bench.prompts import random_prompts

TITLE = "CUDA graphs: off against on"
SIDES = ("off", "on")


def compare(lab: Lab) -> Result:
    if not lab.on_gpu:
        raise NotHere(
            "CUDA graphs are for GPUs, and the model runs on the CPU",
            "on a CPU a step is one call of the kernels already",
        )
    sizes = lab.sizes
    batches = sorted(sizes.batch_sizes)
    length = sizes.input_len + sizes.output_len
    engines = {side: lab.engine(length=length, num_seqs=batches[-1], enforce_eager=side == "off") for side in SIDES}
    vocab_size = engines["on"].capacity.vocab_size
    requests = random_prompts(batches[-1], sizes.input_len, sizes.output_len, vocab_size, lab.seed)

    def one_round(number: int) -> dict[tuple[str, int], float]:
        seconds = {}
        for batch in batches:
            for side in in_turn(number, SIDES):
                gaps = [gap for request in lab.run(engines[side], requests[:batch]).requests for gap in request.gaps]
                seconds[side, batch] = sum(gaps) / len(gaps)
        return seconds

    rounds = lab.rounds(one_round)
    rows: list[Row] = [
        {"batch": str(batch)} | {side: Figure.of([1e3 * done[side, batch] for done in rounds]) for side in SIDES}
        for batch in batches
    ]
    for row in rows:
        row["times"] = ratio(row["off"], row["on"])
    first, last = rows[0], rows[-1]
    slower = [times(row["off"], row["on"]) for row in (first, last)]
    return Result(
        title=TITLE,
        columns=[
            Column("batch", "batch size"),
            Column("off", "off: TPOT ms", 2),
            Column("on", "on: TPOT ms", 2),
            Column("times", "times", 2),
        ],
        rows=rows,
        conclusion=f"without graphs a token takes {slower[0]} times as long at batch {first['batch']}, and {slower[1]} "
        f"times at batch {last['batch']}" + doubt(*((row["off"], row["on"]) for row in (first, last))),
        held_fixed=f"the model, prompts of {sizes.input_len} tokens, outputs of {sizes.output_len}, greedy",
        charts=[
            LineChart(
                "time per output token",
                "batch size",
                "milliseconds",
                {
                    f"graphs {side}": [(batch, value(row, side)) for batch, row in zip(batches, rows, strict=True)]
                    for side in SIDES
                },
                log_x=True,
            )
        ],
        rounds=len(rounds),
    )
