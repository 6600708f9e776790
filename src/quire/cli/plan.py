"""`quire plan`: what fits, how fast it can be, what it costs, before anything is started."""

import json
from argparse import Namespace
from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.cli.planning_flags import add_target_flags, read_hardware, read_model

EXAMPLES = """\
  quire plan                                                 the default model on this machine
  quire plan ./model.gguf --users 8 --context 8192
  quire plan --shape llama-3.1-70b --format awq --hardware h100 --tp 2 --users 64
  quire plan --shape qwen3-8b --hardware h200 --users 32 --explain
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
    add_target_flags(parser)
    parser.add_argument("--users", type=int, default=1, metavar="N", help="requests in flight at once (default: 1)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a user at most (default: prompt and output)"
    )
    parser.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens of a prompt (default: 1024)")
    parser.add_argument("--output", type=int, default=256, metavar="N", help="tokens of an output (default: 256)")
    parser.add_argument("--max-loras", type=int, default=0, metavar="N", help="LoRA adapters in memory")
    parser.add_argument("--max-lora-rank", type=int, default=16, metavar="N", help="their rank (default: 16)")
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of one device for an hour")
    parser.add_argument("--explain", action="store_true", help="show the formulas with their numbers")
    parser.add_argument("--tensors", action="store_true", help="list every weight with its type and bytes")
    parser.add_argument(
        "--calibrate", action="store_true", help="time steps of the model here (20 s) for `quire simulate`, and end"
    )
    parser.add_argument("--list", action="store_true", help="list known shapes, formats and hardware")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse(argv)
    if arguments.list:
        print(_known())
        return 0
    if arguments.calibrate:
        from quire.cli.calibrate import calibrate_target

        print(calibrate_target(arguments))
        return 0
    _plan(arguments)
    return 0


def _plan(arguments: Namespace) -> None:
    from quire.planning.memory import Load
    from quire.planning.plan import make_plan
    from quire.planning.report import as_json, as_text, explain

    hardware = read_hardware(arguments)
    model = read_model(arguments, hardware)
    context = arguments.context or arguments.prompt + arguments.output
    load = Load(users=arguments.users, context=context, prompt=arguments.prompt, output=arguments.output)
    plan = make_plan(
        model, model.kv_spec(arguments.kv_cache_dtype), load, hardware, tp=arguments.tp, price=arguments.price,
        lora_rank=arguments.max_lora_rank, num_loras=arguments.max_loras, eight_bit=not hardware.is_gpu,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(as_json(plan), indent=2))
        return
    print(as_text(plan))
    if arguments.explain:
        print(f"\n{explain(plan)}")
    if arguments.tensors:
        for tensor in model.tensors:
            print(f"{tensor.nbytes:>14,}  {tensor.type:<9} {[*tensor.shape]!s:<20} {tensor.name}")


def _known() -> str:
    from quire.planning.formats import FORMATS
    from quire.planning.hardware import HARDWARE
    from quire.planning.shapes import SHAPES

    rows = [("shapes", list(SHAPES)), ("formats", list(FORMATS)), ("hardware", list(HARDWARE))]
    return "\n".join(f"{name}: {', '.join(known)}" for name, known in rows)
