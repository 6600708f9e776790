"""What `quire plan` and `quire simulate` share on the command line: a model, and the machine it would run on."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.hub import DEFAULT_MODEL, cache_dir, resolve_model

if TYPE_CHECKING:
    from quire.planning.hardware import Hardware
    from quire.planning.planned_model import PlannedModel


def add_target_flags(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model that is here, or a config.json")
    parser.add_argument("--shape", metavar="NAME", help="a well-known model by its sizes, without its files")
    parser.add_argument("--format", metavar="NAME", help="how its weights are stored, for --shape and config.json")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4", "nf4"), help="as `quire serve` has it")
    parser.add_argument("--hardware", metavar="NAME", help="another machine than this one")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="devices that share every matrix")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="NAME", help="as `quire serve` has it")
    parser.add_argument("--measure", action="store_true", help="measure this machine again")


def read_hardware(arguments: Namespace) -> "Hardware":
    """This machine, measured once, or the one that is named."""
    from quire.planning.hardware import find_hardware

    if arguments.tp < 1:
        raise UsageError(f"--tp is {arguments.tp}", "it must be at least 1")
    if arguments.hardware:
        return find_hardware(arguments.hardware)
    from quire.planning.this_machine import this_machine

    kept = cache_dir() / "machine.json"
    if arguments.measure or not kept.exists():
        print("measuring this machine (a few seconds, once)", file=sys.stderr)
    return this_machine(kept, measure_again=arguments.measure)


def read_model(arguments: Namespace, hardware: "Hardware") -> "PlannedModel":
    """Counted for the backend of that hardware."""
    from quire.planning.packed_bytes import GpuFormat, NativeFormat, PackedFormat
    from quire.planning.planned_model import plan_model
    from quire.planning.shape_checkpoint import shape_checkpoint
    from quire.planning.shapes import shape_config
    from quire.weights.checkpoint import Checkpoint, open_checkpoint
    from quire.weights.huggingface import read_config

    if arguments.model and arguments.shape:
        raise UsageError("a model and --shape are given", "give one of them")
    packing: PackedFormat = GpuFormat() if hardware.is_gpu else NativeFormat()
    checkpoint: Checkpoint
    if arguments.shape:
        checkpoint, name = shape_checkpoint(shape_config(arguments.shape), arguments.format), arguments.shape
    elif arguments.model and arguments.model.endswith("config.json"):
        path = Path(arguments.model)
        checkpoint, name = shape_checkpoint(read_config(path.parent), arguments.format), path.parent.resolve().name
    else:
        if arguments.format:
            raise UsageError("--format is given for a model with files", "its files say how it is stored")
        files = resolve_model(arguments.model or DEFAULT_MODEL)
        checkpoint, name = open_checkpoint(files.path), files.name
    return plan_model(name, checkpoint, packing, arguments.quantization)
