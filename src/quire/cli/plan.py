"""`quire plan`: what fits, how fast it can be, what it costs, before anything is started."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.planned_checkpoint import takes_format
from quire.cli.planning_flags import (
    PP_NAMES,
    add_draft_flags,
    add_target_flags,
    check_degrees,
    check_price,
    count,
    count_model,
    degrees,
    hardware_called,
    kv_dtype,
    read_draft,
    read_hardware,
    read_model,
    take_named,
)
from quire.hub import DEFAULT_MODEL
from quire.planning.words import counted

if TYPE_CHECKING:
    from quire.ops.kv_spec import KVSpec
    from quire.planning.hardware import Hardware
    from quire.planning.memory import EngineLimits, Load
    from quire.planning.plan import Setup
    from quire.planning.planned_model import PlannedModel
    from quire.planning.slo import Slo

DRAFT_TOKENS = 4  # of a step, where nothing is said
USUAL_PROMPT, USUAL_OUTPUT = 1024, 256  # tokens
USUAL_TPOT = 0.05  # seconds: 20 tokens a second are faster than people read
EXAMPLES = """\
  quire plan                                                 the default model on this machine
  quire plan ./model.gguf --users 8 --context 8192
  quire plan --shape llama-3.1-70b --format awq --hardware h100 --tp 2 --users 64
  quire plan --shape qwen3-8b --hardware h200 --users 32 --explain
  quire plan --shape llama-3.1-70b --hardware h100 --tp 2,4,8 --users 64    what each number of GPUs would gain
  quire plan --shape llama-3.1-70b --hardware h100 --pp 2,4,8 --users 64    the same, with some layers on each
  quire plan --shape llama-3.1-70b --format fp8 --hardware h100 --tp 2 --draft-model llama-3.2-1b --explain
  quire plan --shape llama-3.1-8b --hardware h100 --draft-head --explain        a head of one layer drafts
  quire plan --shape llama-3.1-8b --hardware this,l4,h100 --slo ttft=500ms,tpot=40ms --rate 20
  quire plan --calibrate ./model.gguf                        time its steps here, for `quire simulate`
  quire plan --list                                          the shapes, formats and hardware that are known
  quire plan ./config.json --format q4_k_m --json | jq .memory
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "plan [MODEL]",
        "Show what a model needs, how fast it can be at best, and what it costs, on a machine.",
        EXAMPLES,
    )
    _add_flags(parser)
    arguments = parser.parse(argv)
    take_named(arguments)
    _check(arguments)
    given, stages = arguments.tp, arguments.pp
    arguments.tp, arguments.pp = max(given), max(stages)
    is_search = arguments.slo is not None
    if arguments.list:
        print(_list(arguments.json))
    elif arguments.calibrate:
        from quire.cli.calibrate import calibrate_target

        print(calibrate_target(arguments))
    elif is_search and len(given) > 1:
        raise UsageError("--slo searches numbers of devices, and --tp names several", "leave --tp out")
    elif len(stages) > 1 and (is_search or arguments.tp > 1):
        raise UsageError("--pp names several numbers of devices", "leave out --slo and --tp")
    elif is_search or len(stages) > 1 or len(given) > 1:
        _check_unused(arguments, is_search)
        if is_search:
            _search(arguments)
        elif len(stages) > 1:
            _scale_stages(arguments, stages)
        else:
            _scale(arguments, given)
    else:
        _plan(arguments)
    return 0


def _check_unused(arguments: Namespace, is_search: bool) -> None:
    """Refuse a flag that would be without effect in a search, or in a table of several degrees."""
    usual: dict[str, object] = {"explain": False, "tensors": False, "draft_model": None, "draft_head": False}
    if is_search:
        usual |= {"pp": 1, "max_loras": 0, "max_num_batched_tokens": 512, "state_checkpoint_dtype": "float32"}
    else:
        usual |= {"rate": None, "price": None}
    what = "--slo searches configurations" if is_search else "several degrees are a table"
    for name, value in usual.items():
        if getattr(arguments, name) != value:
            raise UsageError(f"{what}, and --{name.replace('_', '-')} is of a single plan", "leave it out")


def _add_flags(parser: Parser) -> None:
    add_target_flags(parser, several_degrees=True)
    words = "stages of layers, one device after the other; several, as 2,4,8: a table of what each would gain"
    parser.add_argument(*PP_NAMES, type=degrees, default=(1,), metavar="N[,N]", help=words)
    load = parser.add_argument_group("load")
    users, context = ("--users", "--max-num-seqs", "-np", "--parallel"), ("--context", "--max-model-len", "-c")
    load.add_argument(
        *users, dest="users", type=count, default=1, metavar="N", help="requests in flight at once (default: 1)"
    )
    load.add_argument(
        *context, "--ctx-size", dest="context", type=count, metavar="N",
        help="tokens of a user at most (default: prompt and output)",
    )  # fmt: skip
    shorter = "or what fits, where the context is shorter"
    load.add_argument(
        "--prompt",
        "--isl",
        dest="prompt",
        type=count,
        metavar="N",
        help=f"tokens of a prompt (default: 1024, {shorter})",
    )
    load.add_argument(
        "--output",
        "--osl",
        dest="output",
        type=count,
        metavar="N",
        help=f"tokens of an output (default: 256, {shorter})",
    )
    load.add_argument("--rate", type=float, metavar="R", help="requests a second that are to be served")
    load.add_argument(
        "--slo", metavar="LIMITS", help="search what serves --rate (or --users) within ttft=500ms,tpot=40ms,e2e=10s"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-num-batched-tokens", type=count, default=512, metavar="N", help="as `quire serve` has it (default: 512)"
    )
    engine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="X", help="share of a GPU's memory that is taken (default: 0.9)"
    )
    engine.add_argument(
        "--state-checkpoint-dtype",
        choices=("float32", "bfloat16", "int8"),
        default="float32",
        help="of recurrent states, as `quire serve` has it (default: float32)",
    )
    engine.add_argument("--max-loras", type=int, default=0, metavar="N", help="LoRA adapters in memory")
    engine.add_argument("--max-lora-rank", type=int, default=16, metavar="N", help="their rank (default: 16)")
    add_draft_flags(engine)
    engine.add_argument("--num-speculative-tokens", type=int, metavar="N", help="of a step (default: 4)")
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of one device for an hour")
    parser.add_argument("--explain", action="store_true", help="show the formulas with their numbers")
    parser.add_argument("--tensors", action="store_true", help="list every weight with its type and bytes")
    parser.add_argument(
        "--calibrate", action="store_true", help="time steps of the model here (20 s) for `quire simulate`, and end"
    )
    parser.add_argument("--list", action="store_true", help="list known shapes, formats and hardware with its rates")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _check(arguments: Namespace) -> None:
    for flag, numbers in (("--tp", arguments.tp), ("--pp", arguments.pp)):
        if min(numbers) < 1 or len(set(numbers)) < len(numbers):
            raise UsageError(f"{flag} is {','.join(map(str, numbers))}", "name numbers of at least 1, each once")
    check_price(arguments)
    _check_drafts(arguments)
    if arguments.max_loras and arguments.max_lora_rank < 1:
        raise UsageError(f"--max-lora-rank is {arguments.max_lora_rank}", "it must be at least 1")


def _check_drafts(arguments: Namespace) -> None:
    drafts = arguments.draft_model or arguments.draft_head
    if arguments.num_speculative_tokens is None:
        arguments.num_speculative_tokens = DRAFT_TOKENS if drafts else 0
    elif not drafts:
        raise UsageError("--num-speculative-tokens is given", "say what proposes them: --draft-model or --draft-head")


def _own_share(arguments: Namespace, hardware: "Hardware") -> "Hardware":
    """With the share of its memory that an engine takes."""
    share = arguments.gpu_memory_utilization
    if share is None:
        return hardware
    if not 0 < share <= 1:
        raise UsageError(f"--gpu-memory-utilization is {share:g}", "it is a share: above 0, and 1 at most")
    if not hardware.is_gpu:
        raise UsageError(f"--gpu-memory-utilization is given, and {hardware.name} is a CPU", "leave it out")
    return replace(hardware, utilization=share)


def _check_context(arguments: Namespace, model: "PlannedModel") -> None:
    """Refuse what is longer than the model's positions, or than --context."""
    asked, most = arguments.context, model.config.max_length
    if asked is not None and asked < 1:
        return  # as any other count: `Load` says so
    if asked is not None and asked > most:
        raise UsageError(f"--context is {asked:,}, and {model.name} has {most:,} positions", f"give at most {most}")
    prompt, output = _lengths(arguments, most)
    if asked is not None and prompt + output > asked:
        raise UsageError(
            f"a prompt of {prompt:,} and an output of {output:,} tokens are more than --context, {asked:,}",
            "give a shorter --prompt or --output, or leave out --context",
        )
    if prompt + output > most:
        raise UsageError(
            f"a prompt of {prompt:,} and an output of {output:,} tokens, and {model.name} has {most:,} positions",
            "give a shorter --prompt or --output",
        )


def _lengths(arguments: Namespace, most: int | None = None) -> tuple[int, int]:
    """Tokens of a prompt and of an output. Where one is not given, it is the usual one, or what the context holds."""
    held = most if arguments.context is None else arguments.context
    prompt, output = arguments.prompt, arguments.output
    if prompt is None:
        room = held and (held * 3 // 4 if output is None else held - output)
        prompt = USUAL_PROMPT if room is None else max(1, min(USUAL_PROMPT, room))
    if output is None:
        output = USUAL_OUTPUT if held is None else max(1, min(USUAL_OUTPUT, held - prompt))
    return prompt, output


def _plan(arguments: Namespace) -> None:
    from quire.planning.explain import explain
    from quire.planning.planner import make_plan
    from quire.planning.report import as_json, as_text

    hardware = _own_share(arguments, read_hardware(arguments))
    model = read_model(arguments, hardware)
    check_degrees(model, arguments.tp, arguments.pp)
    _check_context(arguments, model)
    setup = _setup(arguments, hardware)
    draft = read_draft(arguments, model, hardware)
    kv = _kv_spec(model, arguments, hardware, drafts=draft is not None)
    plan = make_plan(model, kv, _load(arguments, model), setup, draft)
    if arguments.json:
        print(json.dumps(as_json(plan), indent=2))
        return
    print(as_text(plan))
    if arguments.explain:
        print(f"\n{explain(plan)}")
    if arguments.tensors:
        for tensor in model.tensors:
            print(f"{tensor.nbytes:>14,}  {tensor.type:<9} {[*tensor.shape]!s:<20} {tensor.name}")


def _kv_spec(model: "PlannedModel", arguments: Namespace, hardware: "Hardware", drafts: bool = False) -> "KVSpec":
    dtype = kv_dtype(arguments, hardware)
    return model.kv_spec(dtype, checkpoint_dtype=arguments.state_checkpoint_dtype, drafts=drafts)


def _setup(arguments: Namespace, hardware: "Hardware") -> "Setup":
    from quire.planning.plan import Setup

    return Setup(
        hardware=hardware, tp=arguments.tp, pp=arguments.pp, limits=_limits(arguments, hardware),
        price=arguments.price, eight_bit=not hardware.is_gpu, rate=arguments.rate,
    )  # fmt: skip


def _scale(arguments: Namespace, given: Sequence[int]) -> None:
    """One device beside each number of them."""
    from quire.planning.planner import make_plan
    from quire.planning.scaling import as_json, as_text, scaling

    hardware = _own_share(arguments, read_hardware(arguments))
    model = read_model(arguments, hardware)
    _check_context(arguments, model)
    kv, load = _kv_spec(model, arguments, hardware), _load(arguments, model)
    setups = [replace(_setup(arguments, hardware), tp=tp) for tp in sorted({1, *given})]
    found = scaling([make_plan(model, kv, load, setup) for setup in setups])
    print(json.dumps({"scaling": as_json(found)}, indent=2) if arguments.json else as_text(found))


def _scale_stages(arguments: Namespace, given: Sequence[int]) -> None:
    """One device beside each number of stages."""
    from quire.planning.planner import make_plan
    from quire.planning.stage_scaling import as_json, as_text, stage_scaling

    hardware = _own_share(arguments, read_hardware(arguments))
    model = read_model(arguments, hardware)
    _check_context(arguments, model)
    setup = _setup(arguments, hardware)  # the largest number: refused where there is one device
    one = make_plan(model, _kv_spec(model, arguments, hardware), _load(arguments, model), replace(setup, pp=1))
    found = stage_scaling(one, sorted({1, *given}))
    print(json.dumps({"scaling": as_json(found)}, indent=2) if arguments.json else as_text(found))


def _load(arguments: Namespace, model: "PlannedModel | None" = None) -> "Load":
    """`model`: the one whose positions bound it; None: several are tried."""
    from quire.planning.memory import Load

    prompt, output = _lengths(arguments, None if model is None else model.config.max_length)
    context = prompt + output if arguments.context is None else arguments.context
    return Load(users=arguments.users, context=context, prompt=prompt, output=output)


def _limits(arguments: Namespace, hardware: "Hardware") -> "EngineLimits":
    from quire.planning.memory import EngineLimits

    return EngineLimits(
        max_num_batched_tokens=arguments.max_num_batched_tokens, num_loras=arguments.max_loras,
        lora_rank=arguments.max_lora_rank, threads=hardware.threads,
        num_drafts=arguments.num_speculative_tokens,
    )  # fmt: skip


def _search(arguments: Namespace) -> None:
    """Print the configurations that keep the limits of --slo, the cheapest first."""
    from quire.planning.hardware import HARDWARE
    from quire.planning.search import Demand, search
    from quire.planning.search_report import as_json, as_text
    from quire.planning.shapes import QUANTIZED
    from quire.planning.slo import read_slo

    slo = read_slo(arguments.slo)
    if arguments.model and arguments.shape:
        raise UsageError("a model and --shape are given", "give one of them")
    load = _load(arguments)
    rate = arguments.rate if arguments.rate is not None else users_rate(load, slo)
    demand = Demand(rate=rate, prompt=load.prompt, output=load.output, slo=slo)
    if arguments.hardware:
        names = arguments.hardware.split(",")
        machines = [hardware_called(name.strip(), measure_again=arguments.measure) for name in names]
    else:
        machines = [row for row in HARDWARE.values() if row.is_gpu and row.price]
    if arguments.gpu_memory_utilization is not None:
        raise UsageError("--slo takes 90 % of a GPU's memory", "leave out --gpu-memory-utilization")
    name = arguments.shape or arguments.model or DEFAULT_MODEL

    @cache
    def counted(is_gpu: bool, format_name: str) -> "PlannedModel":
        hardware = next(machine for machine in machines if machine.is_gpu == is_gpu)
        return count_model(name, hardware, format_name or None, arguments.quantization, is_shape=bool(arguments.shape))

    stored = arguments.shape.lower() in QUANTIZED if arguments.shape else not takes_format(name)
    found = search(
        demand,
        machines,
        lambda hardware, format_name: counted(hardware.is_gpu, format_name),
        formats=[arguments.format] if arguments.format else [""] if stored else None,
        kv_dtype=None if arguments.kv_cache_dtype == "auto" else arguments.kv_cache_dtype,
        tp=arguments.tp if arguments.tp > 1 else None,
        price=arguments.price,
    )
    print(json.dumps(as_json(demand, found), indent=2) if arguments.json else as_text(demand, found))


def users_rate(load: "Load", slo: "Slo") -> float:
    """Requests a second of users who each send the next when they have an answer, just within the limits."""
    limits = slo.limits
    if "e2e" not in limits and "tpot" not in limits:
        users, rate = counted(load.users, "user"), f"{1 / USUAL_TPOT:g} tokens a second"
        print(f"{users}: an answer is taken to come at {rate} (or give tpot)", file=sys.stderr)
    seconds = limits.get("e2e") or limits.get("ttft", 0.0) + load.output * limits.get("tpot", USUAL_TPOT)
    return load.users / seconds


def _list(as_json: bool) -> str:
    """Shapes and formats by name, hardware with what decides: memory, bandwidth, arithmetic, price."""
    from quire.planning.formats import FORMATS
    from quire.planning.hardware import GIB, HARDWARE
    from quire.planning.shapes import SHAPES
    from quire.planning.words import figure

    if as_json:
        rows = [asdict(row) for row in HARDWARE.values()]
        return json.dumps({"shapes": list(SHAPES), "formats": list(FORMATS), "hardware": rows}, indent=2)
    lines = [f"shapes: {', '.join(SHAPES)}", f"formats: {', '.join(FORMATS)}", ""]
    lines.append(f"{'hardware':<16}{'GiB':>8}{'GB/s':>8}{'TFLOP/s':>10}{'in 8 bits':>11}{'$/hour':>9}")
    for row in HARDWARE.values():
        rates = f"{figure(row.flops / 1e12, 3):>10}{figure(row.flops_8bit / 1e12, 3):>11}"
        price = f"{row.price:.2f}" if row.price else "-"
        lines.append(f"{row.name:<16}{row.memory / GIB:>8,.1f}{row.bandwidth / 1e9:>8,.0f}{rates}{price:>9}")
    return "\n".join(lines)
