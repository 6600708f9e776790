"""`quire bench latency`: one batch at a time on an idle engine; how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from quire.cli.bench.engine import BenchRun, EngineBench
from quire.cli.bench.prompts import random_prompts
from quire.cli.bench.report import check_target, phase, report, spent, spreads, surroundings
from quire.cli.bench.resources import Resources
from quire.cli.bench.setup import add_engine_flags, add_json_flag, check_bounds, progress, read_engine_options, start
from quire.cli.flags import add_flags, read_flags
from quire.cli.interrupts import first_interrupt_noted
from quire.cli.main import INTERRUPTED
from quire.cli.parser import Parser
from quire.engine.option import option
from quire.planning.percentiles import percentile

EXAMPLES = """\
  quire bench latency                                       8 prompts of 32 tokens, 128 tokens each
  quire bench latency --batch-size 1 --input-len 512 --output-len 64 --num-iters 5
  quire bench latency -m ./Llama-3.1-8B --load-format dummy --quantization fp8 --output-json result.json
"""

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFlags:
    input_len: int = option(32, "tokens of each prompt: random ids", minimum=1)
    output_len: int = option(128, "tokens sampled for each; nothing ends earlier", minimum=1)
    batch_size: int = option(8, "prompts at a time", minimum=1)
    num_iters: int = option(30, "batches, one after the other", minimum=1)
    num_iters_warmup: int = option(10, "batches before measuring begins", minimum=0)
    temperature: float = option(1.0, "sampling temperature; 0 takes the most likely token")
    output_json: str | None = option(
        None, "write the figures to this file; - prints them instead of text", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "bench latency",
        "Complete one batch of prompts after the other. Ctrl-C ends it with the batches that are done.",
        EXAMPLES,
    )
    add_flags(parser, LatencyFlags, "benchmark")
    add_json_flag(parser)
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    flags, options = read_flags(LatencyFlags, arguments), read_engine_options(arguments)
    check_target(flags.output_json)
    engine, start_seconds = start(options)
    bench = EngineBench(engine, flags.temperature, options.seed or 0)
    runs: list[BenchRun] = []
    total = flags.num_iters_warmup + flags.num_iters
    resources: Resources | None = None
    with first_interrupt_noted() as noted, progress(total, "batch") as one_more:
        for number in range(total):
            if number == flags.num_iters_warmup:
                resources = Resources()
            vocab_size, seed = engine.capacity.vocab_size, (options.seed or 0) + number
            requests = random_prompts(flags.batch_size, flags.input_len, flags.output_len, vocab_size, seed)
            batch = bench.run(requests, stopped=noted.is_set)
            if batch.interrupted:
                break
            one_more()
            if number >= flags.num_iters_warmup:
                runs.append(batch)
    interrupted = len(runs) < flags.num_iters
    if not runs or resources is None:
        print("interrupted before the first measured batch was done")
        return INTERRUPTED
    figures = surroundings(options, engine, start_seconds) | measured(runs, flags, interrupted)
    figures |= spent(resources, options)
    report(headline(figures), figures, flags.output_json)
    return INTERRUPTED if interrupted else 0


def measured(runs: Sequence[BenchRun], flags: LatencyFlags, interrupted: bool) -> dict[str, Any]:
    """The first keys are those of vLLM's file. Times are in seconds unless the key says otherwise."""
    latencies = [run.seconds for run in runs]
    return {
        "avg_latency": fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(share): percentile(latencies, share) for share in PERCENTILES},
        "input_len": flags.input_len,
        "output_len": flags.output_len,
        "batch_size": flags.batch_size,
        "output_tokens_per_second": sum(run.num_output for run in runs) / sum(latencies),
        "prefill": phase(runs, "prefill"),
        "decode": phase(runs, "decode"),
        **spreads(runs),
        "interrupted": interrupted,
    }


def headline(figures: dict[str, Any]) -> list[str]:
    so_far = "interrupted: " if figures["interrupted"] else ""
    middle, slow = figures["percentiles"]["50"], figures["percentiles"]["99"]
    return [
        f"latency     {figures['avg_latency']:.4f} s a batch, p50 {middle:.4f}, p99 {slow:.4f}; "
        f"{figures['output_tokens_per_second']:,.1f} output tok/s",
        f"load        {so_far}{len(figures['latencies'])} batches of {figures['batch_size']} prompts, "
        f"{figures['input_len']:,} tokens in, {figures['output_len']:,} out",
    ]
