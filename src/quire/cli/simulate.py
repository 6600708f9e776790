"""`quire simulate`: how a fleet would serve a workload, by the engine's own scheduler on a virtual clock."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import add_flags, read_flags
from quire.cli.parser import Parser, UsageError
from quire.cli.planning_flags import (
    add_draft_flags,
    add_target_flags,
    check_price,
    count,
    read_draft,
    read_hardware,
    read_model,
    take_named,
)
from quire.cli.simulate_table import cost_of, header, line_of
from quire.engine.options import TARGET_ITL_MS, EngineOptions
from quire.engine.start import uses_gpu
from quire.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from quire.planning.calibration import Calibration
    from quire.planning.drafting import Draft
    from quire.planning.fleet import Fleet
    from quire.planning.hardware import Hardware
    from quire.planning.planned_model import PlannedModel
    from quire.planning.step_times import StepTimes
    from quire.planning.summary import Summary
    from quire.planning.workload import Arrival

EXAMPLES = """\
  quire simulate --rate 2 --num-requests 200                       the default model on this machine
  quire simulate --calibrate --rates 0.5,1,2                       with step times measured here (20 s, once)
  quire simulate --shape llama-3.1-8b --hardware h200 --rate 20 --prompt 1000 --output 300
  quire simulate --shape llama-3.1-70b --format fp8 --hardware h100 --tp 4 --replicas 8 --rate 50
  quire simulate --shape qwen3-8b --hardware l4 --rates 1,2,4,8 --svg load.svg
  quire simulate --shape qwen3-8b --hardware h100 --num-speculative-tokens 3 --acceptance 0.7
  quire simulate --shape qwen3-8b --hardware h100 --draft-model qwen3-0.6b --num-speculative-tokens 3 --acceptance 0.7
  quire simulate --shape qwen3-8b --hardware h100 --turns 5 --replicas 4 --router prefix
  quire simulate --shape qwen3-8b --hardware h100 --trace trace.jsonl --json
  quire simulate --shape qwen3-8b --hardware h100 --request-rate inf --max-concurrency 16 --num-prompts 100
  quire simulate --shape qwen3-8b --hardware l4 --rates 1,2,4,8 --goodput ttft:500 tpot:60
"""

# The engine's options that a simulation heeds; the others change no plan and no time.
ENGINE = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "target_itl_ms",
    "block_size", "enable_prefix_caching", "kv_cache_memory_bytes", "swap_space", "gpu_memory_utilization",
    "scheduling_policy", "threads", "device", "dtype", "enforce_eager", "batch_invariant",
)  # fmt: skip


# Fields of WorkloadSpec: what they are read as, the default, and words.
WORKLOAD: dict[str, tuple[Callable[[str], float], float, str, str]] = {
    "rate": (float, 1.0, "R", "requests a second (default: 1; inf: all at once)"),
    "num_requests": (count, 200, "N", "(default: 200)"),
    "prompt": (count, 512, "N", "tokens of a prompt (default: 512)"),
    "output": (count, 128, "N", "tokens of an output (default: 128)"),
    "spread": (float, 0.5, "S", "lengths vary by this share (0.5)"),
    "shared_prefix": (count, 0, "N", "tokens that prompts begin with"),
    "num_prefixes": (count, 1, "N", "different ones (default: 1)"),
    "turns": (count, 1, "N", "of a conversation: each follows the answer before (1)"),
    "think_seconds": (float, 5.0, "S", "from an answer to the next turn (default: 5)"),
    "burst": (count, 1, "N", "requests that come together (default: 1)"),
    "priorities": (count, 1, "N", "levels of priority (default: 1)"),
    "seed": (count, 0, "N", "of the workload"),
}
# The same in `quire bench serve`: the command that measures what this one predicts.
SYNONYMS = {
    "rate": ("--request-rate",),
    "num_requests": ("--num-prompts",),
    "prompt": ("--random-input-len", "--input-len"),
    "output": ("--random-output-len", "--output-len"),
    "spread": ("--random-range-ratio",),
    "shared_prefix": ("--random-prefix-len",),
    "num_prefixes": ("--simulated-num-prefixes",),
    "burst": ("--simulated-burst",),
}


def run(argv: Sequence[str]) -> int:
    arguments = _parser().parse(argv)
    take_named(arguments)
    if arguments.replicas < 1:
        raise UsageError(f"--replicas is {arguments.replicas}", "it must be at least 1")
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise UsageError(f"--max-concurrency is {arguments.max_concurrency}", "it must be at least 1")
    check_price(arguments)
    _check_drafts(arguments)
    goals = read_goals(arguments.goodput)
    rates = _rates(arguments)
    workloads = [(rate, _workload(arguments, rate)) for rate in rates]
    _check_picture(arguments, rates)
    hardware, model, fleet, source = _fleet(arguments)
    print(f"step times: {source}", file=sys.stderr)
    price = hardware.price if arguments.price is None else arguments.price
    hourly = price * arguments.tp * arguments.replicas
    rows: list[tuple[float, Summary]] = []
    try:
        for rate, workload in workloads:
            arrivals = workload()
            check_lengths(arguments.trace, arrivals, fleet.engine.max_model_len)
            summary = _summary(fleet, arrivals, goals)
            if not rows and not arguments.json:
                print(header(goals))
            rows.append((round(summary.requests_per_second, 3) if arguments.trace else rate, summary))
            if not arguments.json:
                print(line_of(*rows[-1], hourly), flush=True)
    finally:  # after Ctrl-C, the loads that are done
        if arguments.json and rows:
            loads = [{"rate": rate, **summary.as_json(), "cost": cost_of(summary, hourly)} for rate, summary in rows]
            print(json.dumps({"model": model.name, "hardware": hardware.name, "step_times": source, "loads": loads}))
        if arguments.svg and rows:
            from quire.planning.picture import load_picture

            arguments.svg.write_text(load_picture(rows))
    return 0


def _check_drafts(arguments: Namespace) -> None:
    flag = "--draft-model" if arguments.draft_model else "--draft-head" if arguments.draft_head else ""
    if flag and not arguments.num_speculative_tokens:
        raise UsageError(f"{flag} is given", "say how many draft tokens a step: --num-speculative-tokens 3")
    if arguments.num_speculative_tokens and arguments.acceptance is None:
        raise UsageError("--num-speculative-tokens is given", "say how likely a draft is accepted: --acceptance 0.7")
    if arguments.acceptance is not None and not arguments.num_speculative_tokens:
        raise UsageError("--acceptance is given", "say how many draft tokens a step: --num-speculative-tokens 3")


def _parser() -> Parser:
    parser = Parser(
        "simulate [MODEL]",
        "Show how engines would serve a workload: latencies, throughput, cache hits, queue, cost.",
        EXAMPLES,
    )
    add_target_flags(parser)
    workload = parser.add_argument_group("workload")
    for name, (kind, _, metavar, words) in WORKLOAD.items():
        names = ("--" + name.replace("_", "-"), *SYNONYMS.get(name, ()))
        workload.add_argument(*names, dest=name, type=kind, metavar=metavar, help=words)
    workload.add_argument("--rates", metavar="R,R,...", help="several rates, one row each")
    workload.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests in flight at most; others wait at their clients"
    )
    workload.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines: timestamp, input_length, output_length; or CSV of Azure or BurstGPT",
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=int, default=1, metavar="N", help="engines (default: 1)")
    fleet.add_argument(
        "--router", default="least-busy", metavar="NAME", help="round-robin, least-busy, power-of-two or prefix"
    )
    fleet.add_argument("--price", type=float, metavar="DOLLARS", help="of one device for an hour")
    fleet.add_argument(
        "--num-speculative-tokens", type=int, default=0, metavar="N", help="draft tokens of a sequence a step"
    )
    fleet.add_argument("--acceptance", type=float, metavar="P", help="how likely a draft token is accepted")
    add_draft_flags(fleet)
    add_flags(
        parser, EngineOptions, "engine", skip=[spec.name for spec in fields(EngineOptions) if spec.name not in ENGINE]
    )
    parser.add_argument("--calibrate", action="store_true", help="time steps of the model on this machine (20 s)")
    parser.add_argument("--roofline", action="store_true", help="compute step times even if measured ones are kept")
    parser.add_argument(
        "--goodput", nargs="+", default=(), metavar="M:MS",
        help="requests a second that keep these bounds, in ms: ttft:500 tpot:40 e2el:5000",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture of latency against load")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def read_engine(arguments: Namespace) -> EngineOptions:
    """The options of the engine that is simulated, or measured."""
    given = {"model": arguments.model or DEFAULT_MODEL, "kv_cache_dtype": arguments.kv_cache_dtype}
    if arguments.quantization:
        given["quantization"] = arguments.quantization
    own = Namespace(**{name: value for name, value in vars(arguments).items() if name in ENGINE})
    return read_flags(EngineOptions, own, given=given)


def _fleet(arguments: Namespace) -> "tuple[Hardware, PlannedModel, Fleet, str]":
    """-> also what its step times are."""
    from quire.cli.calibrate import describe
    from quire.planning.fleet import EngineFlags, Fleet, plan_engine
    from quire.planning.step_times import SWAP_BANDWIDTH, default_costs, roofline_times

    options = read_engine(arguments)
    calibration = _calibration(arguments, options)
    hardware = _hardware(arguments, options, measured=calibration is not None)
    model = read_model(arguments, hardware)
    if calibration is not None:
        times: StepTimes = calibration.times
        costs, source = calibration.costs, describe(calibration)
    else:
        times = roofline_times(model, options.kv_cache_dtype, hardware, tp=arguments.tp, eight_bit=not hardware.is_gpu)
        hint = " (`--calibrate` measures them)" if _is_here(arguments) else ""
        costs, source = default_costs(hardware), f"computed from the rates of {hardware.name}{hint}"
    block_bytes = model.kv_spec(options.kv_cache_dtype, options.block_size).block_bytes
    costs = replace(costs, swapped_block=block_bytes / SWAP_BANDWIDTH)
    flags = {spec.name: getattr(options, spec.name) for spec in fields(EngineFlags)}
    if options.target_itl_ms is None:
        flags["target_itl_ms"] = TARGET_ITL_MS
    draft = read_draft(arguments, model, hardware)
    engine = plan_engine(
        model, hardware, EngineFlags(**flags), tp=arguments.tp, acceptance=arguments.acceptance or 0.0,
        num_speculative_tokens=arguments.num_speculative_tokens, draft=draft,
    )  # fmt: skip
    draft_times, of_draft = _draft_times(arguments, options, hardware, draft, calibration) if draft else (None, "")
    fleet = Fleet(engine, times, costs, arguments.replicas, arguments.router, draft_times, arguments.max_concurrency)
    return hardware, model, fleet, source + of_draft


def _draft_times(
    arguments: Namespace, options: EngineOptions, hardware: "Hardware", draft: "Draft", target: "Calibration | None"
) -> "tuple[StepTimes, str]":
    """The times of the steps that draft: measured like those of the model, or computed. -> also what they are"""
    from quire.cli.calibrate import kept_calibration

    if target is None:
        return draft.times(hardware, eight_bit=not hardware.is_gpu), f"; those of {draft.name}, too"
    if draft.is_head:
        return target.times.scaled(draft.step_share), f"; those of {draft.name}: {draft.step_share:.1%} of these"
    kept = kept_calibration(replace(options, model=arguments.draft_model))
    if kept is None:
        raise UsageError(
            f"step times of the model are measured, and those of {draft.name} are not",
            f"measure them: `quire plan --calibrate {arguments.draft_model}`; or compute both: --roofline",
        )
    return kept.times, f"; those of {draft.name} are measured, too"


def _is_here(arguments: Namespace) -> bool:
    """Whether the model can run on this machine, so that its steps can be timed."""
    elsewhere = arguments.shape or arguments.hardware or (arguments.model or "").endswith("config.json")
    return not elsewhere and arguments.tp == 1


def _calibration(arguments: Namespace, options: EngineOptions) -> "Calibration | None":
    """What is measured now, or was and is kept; None: times are computed."""
    from quire.cli.calibrate import calibrate, check_target, kept_calibration

    if arguments.calibrate:
        check_target(arguments)
        return calibrate(options)
    return kept_calibration(options) if _is_here(arguments) and not arguments.roofline else None


def _hardware(arguments: Namespace, options: EngineOptions, measured: bool) -> "Hardware":
    """`measured`: step times are known, so that the rates of this machine are not needed."""
    if arguments.hardware or not (measured or uses_gpu(options.device)):
        return read_hardware(arguments)
    if uses_gpu(options.device):
        return own_gpu()
    from quire.planning.hardware import Hardware
    from quire.runtime.available_memory import available_memory

    return Hardware("this machine", available_memory(), 0, 0, 0, 0, measured=True, is_gpu=False)


def own_gpu() -> "Hardware":
    """This machine's GPU, by the data sheet of its name."""
    from quire.planning.calibration import gpu_names
    from quire.planning.hardware import HARDWARE

    name = next(iter(gpu_names()), "")
    words = name.lower().replace("-", " ").split()
    known = [row for row in HARDWARE.values() if all(part in words for part in row.name.split("-"))]
    if not known:
        raise UsageError(f"the GPU of this machine is `{name}`, and its rates are not known", "give --hardware")
    return known[0]


def read_goals(given: Sequence[str]) -> dict[str, float]:
    """Seconds that a request may take, as `quire bench serve` has them in milliseconds: ttft:500 tpot:40 e2el:5000."""
    from quire.cli.bench.serve.flags import ResultFlags

    return {name: value / 1000 for name, value in ResultFlags(goodput=list(given)).goals.items()}


def check_lengths(path: Path | None, arrivals: "list[Arrival]", most: int) -> None:
    """Refuse a request that is longer than the model's context. `path`: of the trace that it stands in."""
    for arrival in arrivals:
        if (length := len(arrival.prompt_ids) + arrival.output) > most:
            if path is None:
                raise UsageError(
                    f"a request has {length:,} tokens, and the context holds {most:,}",
                    "give a smaller --prompt, --output, --shared-prefix or --spread",
                )
            raise UsageError(
                f"{path}: line {arrival.line} has {length:,} tokens, and the context holds {most:,}",
                "give a greater --max-model-len, if the model has it, or leave out longer requests",
            )


def _summary(fleet: "Fleet", arrivals: "list[Arrival]", goals: dict[str, float]) -> "Summary":
    from quire.cli.bench.setup import progress
    from quire.planning.summary import summarize

    with progress(sum(arrival.num_turns for arrival in arrivals), "request") as advance:
        return summarize(fleet.serve(arrivals, advance), goals)


def _check_picture(arguments: Namespace, rates: list[float]) -> None:
    """Before anything is simulated: a picture that cannot be drawn or written is refused."""
    from quire.cli.bench.report import check_target

    check_target(arguments.svg)
    if arguments.svg and arguments.svg.suffix.lower() != ".svg":
        raise UsageError(f"--svg is `{arguments.svg}`", f"a picture is SVG: write {arguments.svg.with_suffix('.svg')}")
    if arguments.svg and not all(map(isfinite, rates)):
        raise UsageError("--svg draws latency by rate, and a rate is inf", "leave out inf, or --svg")


def _rates(arguments: Namespace) -> list[float]:
    if arguments.rates is None:
        return [WORKLOAD["rate"][1] if arguments.rate is None else arguments.rate]
    if arguments.rate is not None:
        raise UsageError("--rate and --rates are given", "give one of them")
    if arguments.trace:
        raise UsageError("--rates and --trace are given", "a trace has its own rate")
    try:
        return [float(rate) for rate in arguments.rates.split(",")]
    except ValueError:
        raise UsageError(f"--rates is `{arguments.rates}`", "write numbers with commas: 1,2,4") from None


def _workload(arguments: Namespace, rate: float) -> "Callable[[], list[Arrival]]":
    """What makes the arrivals. A wrong workload is refused here, before anything is simulated."""
    from quire.planning.workload import WorkloadSpec, generate, read_trace

    given = {name: getattr(arguments, name) for name in WORKLOAD if getattr(arguments, name) is not None}
    if arguments.trace:
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            print(f"no effect: {flags}; the requests are those of {arguments.trace}", file=sys.stderr)
        arrivals = read_trace(arguments.trace)
        return lambda: arrivals
    usual: dict[str, Any] = {name: default for name, (_, default, *_) in WORKLOAD.items()}
    return partial(generate, WorkloadSpec(**{**usual, **given, "rate": rate}))
