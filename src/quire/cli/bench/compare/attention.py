"""Naive against flash attention: time and memory of one layer by length, with the model's own heads."""

import time
from dataclasses import replace

from quire.cli.bench.compare.charts import Chart, LineChart
from quire.cli.bench.compare.lab import Lab, NotHere, in_turn
from quire.cli.bench.compare.result import Column, Figure, Result, Row, doubt, times, value
from quire.engine.start import executor_options

TITLE = "naive against flash attention"
SIDES = ("naive", "flash")
MIB = 1 << 20


def compare(lab: Lab) -> Result:
    from quire.executors.attention_layer import AttentionLayer, blas_threads

    config = lab.model
    if config.latent:
        raise NotHere("the model has latent attention (MLA), which has no naive twin here", "try another model")
    threads = blas_threads()
    options = replace(executor_options(lab.options), threads=threads, enforce_eager=True)
    lengths = sorted(lab.sizes.lengths)
    layers = {n: AttentionLayer(options, config.heads, config.kv_heads, config.head_dim, n) for n in lengths}
    memory = {(side, length): layers[length].peak_bytes(side) for length in lengths for side in SIDES}
    ready = {(side, length): layers[length].ready(side) for length in lengths for side in SIDES}

    def seconds(side: str, length: int) -> float:
        begin = time.perf_counter()
        layers[length].wait(ready[side, length]())
        return time.perf_counter() - begin

    def one_round(number: int) -> dict[tuple[str, int], float]:
        done: dict[tuple[str, int], float] = {}
        for length in lengths:
            lab.check_stopped()
            done |= {(side, length): seconds(side, length) for side in in_turn(number, SIDES)}
        return done

    rounds = lab.rounds(one_round)
    rows: list[Row] = []
    for length in lengths:
        row: Row = {"length": f"{length:,}"}
        for side in SIDES:
            row[side] = Figure.of([1e3 * done[side, length] for done in rounds])
            peak = memory[side, length]
            row[f"{side}_memory"] = None if peak is None else peak / MIB
        row["difference"] = layers[length].difference(ready["naive", length](), ready["flash", length]())
        rows.append(row)
    last = rows[-1]
    columns = [Column("length", "tokens"), Column("naive", "naive ms", 2), Column("flash", "flash ms", 2)]
    columns += [Column("naive_memory", "naive MiB", 1), Column("flash_memory", "flash MiB", 1)]
    faster = times(last["naive"], last["flash"])
    conclusion = f"at {last['length']} tokens, flash attention is {faster} times as fast"
    if last["flash_memory"] is not None:
        conclusion += f" and takes {value(last, 'flash_memory'):.1f} MiB instead of {value(last, 'naive_memory'):.1f}"
    charts: list[Chart] = [_chart("time", "milliseconds, logarithmic", "", lengths, rows)]
    if last["flash_memory"] is not None:
        charts.append(_chart("memory at its peak", "MiB, logarithmic", "_memory", lengths, rows))
    where = "on the GPU" if options.on_gpu else f"{threads} thread{'s' if threads > 1 else ''} each"
    return Result(
        title=TITLE,
        columns=[*columns, Column("difference", "largest difference", 5)],
        rows=rows,
        conclusion=conclusion + doubt((last["naive"], last["flash"])),
        held_fixed=f"one causal layer with the model's {config.heads} query and {config.kv_heads} KV heads of "
        f"{config.head_dim}, the same random queries, keys and values, {where}",
        notes=[
            "naive is plain matmuls and a softmax that keep every score; flash is the engine's kernel on its paged "
            "cache, which keeps a tile of them, writes keys and values to pages first, and skips what the causal mask "
            "hides",
            "memory is the growth of the process (on a GPU, of its memory) at the peak, with all that a side allocates",
        ],
        charts=charts,
        rounds=len(rounds),
    )


def _chart(title: str, unit: str, suffix: str, lengths: list[int], rows: list[Row]) -> LineChart:
    curves = {
        side: [(n, max(value(row, f"{side}{suffix}"), 1e-3)) for n, row in zip(lengths, rows, strict=True)]
        for side in SIDES
    }
    return LineChart(title, "tokens", unit, curves, log_x=True, log_y=True)
