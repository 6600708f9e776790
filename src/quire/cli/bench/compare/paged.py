"""Contiguous reservation against pages: what a KV cache of one size holds, and what of it is wasted.

The contiguous side is the engine with blocks as long as the context: a sequence then holds all of its reservation from
its first token on, as engines without pages do."""

from collections.abc import Sequence
from dataclasses import replace

from quire.cli.bench.compare.batching import spread_requests
from quire.cli.bench.compare.charts import BarChart, StackedChart
from quire.cli.bench.compare.lab import Lab, RunTrace, in_turn, same_tokens
from quire.cli.bench.compare.result import Column, Figure, Result, Row, bars, times, value
from quire.cli.bench.prompts import BenchRequest

TITLE = "contiguous reservation against pages"
RESERVED, EXACT, PAGES = "context reserved", "prompt + max_tokens", "pages"
MIB = 1 << 20


def compare(lab: Lab) -> Result:
    sizes = lab.sizes
    lab.check_length(sizes.context)
    page_size = lab.options.block_size
    spec = lab.kv_spec(replace(lab.options, block_size=page_size))
    token_bytes = spec.block_bytes / page_size
    context = -(-sizes.context // page_size) * page_size
    cache_bytes = round(sizes.batch_size * context * token_bytes)
    engines = {
        side: lab.engine(
            length=context, num_seqs=sizes.num_prompts, block_size=block_size, kv_cache_memory_bytes=cache_bytes
        )
        for side, block_size in ((RESERVED, context), (PAGES, page_size))
    }
    vocab_size = engines[PAGES].capacity.vocab_size
    requests = spread_requests(sizes.num_prompts, sizes.input_len, sizes.output_len, vocab_size, lab.seed)

    def one_round(number: int) -> dict[str, RunTrace]:
        return {side: lab.run(engines[side], requests) for side in in_turn(number, list(engines))}

    rounds = lab.rounds(one_round)
    measured = {side: _measured(side, [done[side] for done in rounds], token_bytes) for side in engines}
    exact = _exact(requests, sizes.input_len + sizes.output_len, cache_bytes, token_bytes)
    rows = [measured[RESERVED], exact, measured[PAGES]]
    for row in rows:
        row["wasted"] = 100 * (1 - value(row, "used") / value(row, "reserved"))
        row["fit"] = cache_bytes / MIB / (value(row, "reserved") / value(row, "mean_running"))
    reserved, paged = rows[0], rows[-1]
    return Result(
        title=TITLE,
        columns=[
            Column("side", ""),
            Column("how", ""),
            Column("sequences", "sequences at once"),
            Column("fit", "sequences that fit"),
            Column("reserved", "reserved MiB", 2),
            Column("used", "used MiB", 2),
            Column("wasted", "wasted %", 1),
            Column("tokens_per_second", "output tok/s", 1),
        ],
        rows=rows,
        conclusion=f"of the memory that is held, {value(reserved, 'wasted'):.0f} % is wasted by reserving the context, "
        f"{value(exact, 'wasted'):.0f} % by reserving prompt + max_tokens and {value(paged, 'wasted'):.1f} % in pages; "
        f"pages hold {times(paged['fit'], reserved['fit'])} times the sequences",
        held_fixed=f"the model, a KV cache of {cache_bytes / MIB:.1f} MiB, {len(requests)} requests that all come at "
        f"once, prompts of {sizes.input_len} tokens, at most {sizes.output_len} tokens each, greedy; pages hold "
        f"{page_size} tokens, a reserved context {context:,}",
        notes=[
            "reserved and used are means over the steps of a run, from the engine's own block pool; for "
            "prompt + max_tokens they are computed from the lengths, with every row taken",
            "at once: the most that ran together here, of all requests; fit: the cache over what a sequence holds on "
            "average",
            same_tokens(
                rounds[0][RESERVED], rounds[0][PAGES], "attention adds up in another order in blocks that long"
            ),
        ],
        charts=[
            StackedChart(
                "memory held by each sequence",
                "MiB, mean over a run",
                ("used", "wasted"),
                [
                    (str(row["side"]), [value(row, key) / value(row, "mean_running") for key in ("used", "unused")])
                    for row in rows
                ],
            ),
            BarChart("sequences that fit", "into the same cache, higher is better", bars(rows, "fit")),
        ],
        rounds=len(rounds),
    )


def _measured(side: str, runs: Sequence[RunTrace], token_bytes: float) -> Row:
    stats = [record.scheduler for record in runs[0].records if record.scheduler.running]
    held = sum(one.held_slots for one in stats) / len(stats) * token_bytes / MIB
    used = sum(one.used_slots for one in stats) / len(stats) * token_bytes / MIB
    return {
        "side": side,
        "how": "measured",
        "sequences": max(one.running for one in stats),
        "mean_running": sum(one.running for one in stats) / len(stats),
        "reserved": held,
        "used": used,
        "unused": held - used,
        "tokens_per_second": Figure.of([run.num_output / run.seconds for run in runs]),
        "preemptions": stats[-1].preemptions,
    }


def _exact(requests: Sequence[BenchRequest], reservation: int, cache_bytes: int, token_bytes: float) -> Row:
    """Each sequence reserves its prompt and the most it may sample, as long as it runs."""
    sequences = min(int(cache_bytes / (reservation * token_bytes)), len(requests))
    steps = sum(request.output_len for request in requests)
    tokens = sum(len(r.prompt_ids) + sampled for r in requests for sampled in range(r.output_len))
    held, used = (sequences * slots * token_bytes / MIB for slots in (reservation, tokens / steps))
    return {
        "side": EXACT,
        "how": "computed",
        "sequences": sequences,
        "mean_running": sequences,
        "reserved": held,
        "used": used,
        "unused": held - used,
        "tokens_per_second": None,
    }
