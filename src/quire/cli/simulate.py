"""`quire simulate`: how a fleet would serve a workload, by the engine's own scheduler on a virtual clock."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.planning_flags import add_target_flags, read_hardware, read_model

if TYPE_CHECKING:
    from quire.planning.step_times import StepTimes
    from quire.planning.summary import Summary
    from quire.planning.workload import Arrival

EXAMPLES = """\
  quire simulate --rate 2 --num-requests 200                       the default model on this machine
  quire simulate --shape llama-3.1-8b --hardware h200 --rate 20 --prompt 1000 --output 300
  quire simulate --shape llama-3.1-70b --format fp8 --hardware h100 --tp 4 --replicas 8 --rate 50
  quire simulate --shape qwen3-8b --hardware l4 --rates 1,2,4,8 --svg load.svg
  quire simulate --shape qwen3-8b --hardware h100 --trace trace.jsonl --json
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "simulate [MODEL]",
        "Show how engines would serve a workload: latencies, throughput, cache hits, queue.",
        EXAMPLES,
    )
    add_target_flags(parser)
    workload = parser.add_argument_group("workload")
    workload.add_argument("--rate", type=float, default=1.0, metavar="R", help="requests a second (inf: all at once)")
    workload.add_argument("--rates", metavar="R,R,...", help="several rates, one row each")
    workload.add_argument("--num-requests", type=int, default=200, metavar="N", help="(default: 200)")
    workload.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    workload.add_argument("--output", type=int, default=128, metavar="N", help="tokens of an output (default: 128)")
    workload.add_argument("--spread", type=float, default=0.5, metavar="S", help="lengths vary by this share (0.5)")
    workload.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that prompts begin with")
    workload.add_argument("--num-prefixes", type=int, default=1, metavar="N", help="different ones (default: 1)")
    workload.add_argument("--turns", type=int, default=1, metavar="N", help="of a conversation (default: 1)")
    workload.add_argument("--burst", type=int, default=1, metavar="N", help="requests that come together (default: 1)")
    workload.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines: timestamp, input_length, output_length"
    )
    workload.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=int, default=1, metavar="N", help="engines (default: 1)")
    fleet.add_argument("--router", default="least-busy", metavar="NAME", help="round-robin, least-busy or prefix")
    fleet.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="as `quire serve` has it")
    fleet.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="as `quire serve` has it")
    fleet.add_argument("--scheduling-policy", default="fcfs", metavar="NAME", help="as `quire serve` has it")
    fleet.add_argument("--price", type=float, metavar="DOLLARS", help="of one device for an hour")
    parser.add_argument("--calibrate", action="store_true", help="time steps of the model on this machine (20 s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture of latency against load")
    parser.add_argument("--json", action="store_true", help="one JSON object a rate")
    arguments = parser.parse(argv)
    if arguments.replicas < 1:
        raise UsageError(f"--replicas is {arguments.replicas}", "it must be at least 1")
    rows = _simulate(arguments)
    if arguments.json:
        for rate, summary in rows:
            print(json.dumps({"rate": rate, **summary.as_json()}))
    else:
        print(_table(rows))
    if arguments.svg:
        from quire.planning.picture import load_picture

        arguments.svg.write_text(load_picture(rows))
    return 0


def _simulate(arguments: Namespace) -> "list[tuple[float, Summary]]":
    from quire.planning.fleet import Fleet
    from quire.planning.step_times import roofline_times
    from quire.planning.summary import summarize

    hardware = read_hardware(arguments)
    model = read_model(arguments, hardware)
    max_num_batched_tokens = arguments.max_num_batched_tokens or (8192 if hardware.is_gpu else 512)
    if arguments.calibrate:
        times: StepTimes = _calibrated(arguments, max_num_batched_tokens)
    else:
        kv_dtype = arguments.kv_cache_dtype
        times = roofline_times(model, kv_dtype, hardware, tp=arguments.tp, eight_bit=not hardware.is_gpu)
    fleet = Fleet(
        model, hardware, times, tp=arguments.tp, num_replicas=arguments.replicas, router=arguments.router,
        kv_dtype=arguments.kv_cache_dtype, policy=arguments.scheduling_policy, max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    return [(rate, summarize(fleet.serve(_arrivals(arguments, rate)))) for rate in _rates(arguments)]


def _calibrated(arguments: Namespace, max_num_batched_tokens: int) -> "StepTimes":
    """Step times fitted to steps of the model, on this machine."""
    from quire.executors.local import LocalExecutor
    from quire.executors.options import ExecutorOptions
    from quire.hub import DEFAULT_MODEL, resolve_model
    from quire.planning.calibrate import measured_steps
    from quire.planning.fitted_times import fit

    if arguments.shape or arguments.hardware or (arguments.model or "").endswith("config.json"):
        raise UsageError(
            "--calibrate runs the model here", "leave out --shape and --hardware, and name a model's files"
        )
    options = ExecutorOptions(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
    )
    executor = LocalExecutor(resolve_model(arguments.model or DEFAULT_MODEL).path, options)
    capacity = executor.allocate(executor.load())
    print("timing steps of the model (20 seconds)", file=sys.stderr)
    limits = {"max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return fit(measured_steps(executor, capacity, block_size=options.block_size, **limits))


def _rates(arguments: Namespace) -> list[float]:
    if not arguments.rates:
        return [arguments.rate]
    try:
        return [float(rate) for rate in arguments.rates.split(",")]
    except ValueError:
        raise UsageError(f"--rates is `{arguments.rates}`", "write numbers with commas: 1,2,4") from None


def _arrivals(arguments: Namespace, rate: float) -> "list[Arrival]":
    from quire.planning.workload import WorkloadSpec, generate, read_trace

    if arguments.trace:
        return read_trace(arguments.trace)
    return generate(
        WorkloadSpec(
            rate=rate, num_requests=arguments.num_requests, prompt=arguments.prompt, output=arguments.output,
            spread=arguments.spread, shared_prefix=arguments.shared_prefix, num_prefixes=arguments.num_prefixes,
            turns=arguments.turns, burst=arguments.burst, seed=arguments.seed,
        )
    )  # fmt: skip


def _table(rows: "list[tuple[float, Summary]]") -> str:
    lines = [
        f"{'':>8} {'TTFT ms':^24} {'TPOT ms':^24} {'output':>9} {'cache':>6} {'busy':>5} {'pre-':>6}",
        f"{'req/s':>8} {'p50':>7} {'p90':>7} {'p99':>8} {'p50':>7} {'p90':>7} {'p99':>8} {'tokens/s':>9} {'hits':>6} "
        f"{'':>5} {'empted':>6}",
    ]
    for rate, summary in rows:
        times = [*(1e3 * value for value in summary.ttft.values()), *(1e3 * value for value in summary.tpot.values())]
        cells = " ".join(f"{value:>{8 if i % 3 == 2 else 7},.1f}" for i, value in enumerate(times))
        lines.append(
            f"{rate:>8g} {cells} {summary.output_tokens_per_second:>9,.0f} {summary.hit_rate:>6.0%} "
            f"{summary.utilization:>5.0%} {summary.preemptions:>6,}"
        )
    return "\n".join(lines)
