"""What `quire plan` and `quire simulate` share on the command line: a model, and the machine it would run on."""

import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from dataclasses import fields
from math import inf
from os import getloadavg
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.planned_checkpoint import planned_checkpoint, takes_format
from quire.cli.values import read_count
from quire.engine.options import QUANTIZE, EngineOptions
from quire.hub import DEFAULT_MODEL, cache_dir

THIS = "this"  # the name of this machine
TP_NAMES = ("--tp", "-tp", "--tensor-parallel-size")  # the last two as `quire serve` has them
PP_NAMES = ("--pp", "-pp", "--pipeline-parallel-size")

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

    from quire.planning.drafting import Draft
    from quire.planning.hardware import Hardware
    from quire.planning.planned_model import PlannedModel


def add_target_flags(parser: Parser, several_degrees: bool = False) -> None:
    """`several_degrees`: --tp may be a list, which the command reads."""
    parser.add_argument(
        "named",
        nargs="?",
        metavar="MODEL",
        default=SUPPRESS,
        help="a path, a config.json, or a name of the hub",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help="the same")
    parser.add_argument("--shape", metavar="NAME", help="a well-known model by its sizes, without its files")
    parser.add_argument(
        "--format", metavar="NAME", help="how weights are stored, of a shape or a config.json (default: as published)"
    )
    parser.add_argument("--quantization", choices=QUANTIZE, help="as `quire serve` has it")
    parser.add_argument(
        "--hardware", "--gpu", metavar="NAME", help="another machine than this one, as `quire plan --list` names it"
    )
    if several_degrees:
        words = "devices that share every matrix; several, as 2,4,8: a table of what each would gain"
        parser.add_argument(*TP_NAMES, type=degrees, default=(1,), metavar="N[,N]", help=words)
    else:
        parser.add_argument(*TP_NAMES, type=int, default=1, metavar="N", help="devices that share every matrix")
    kv = ("--kv-cache-dtype", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v")
    words = "as `quire serve` has it"
    parser.add_argument(*kv, dest="kv_cache_dtype", type=kv_name, default="auto", metavar="NAME", help=words)
    parser.add_argument("--measure", action="store_true", help="measure this machine again")


def take_named(arguments: Namespace) -> None:
    """MODEL is --model MODEL."""
    if hasattr(arguments, "named"):
        if arguments.model is not None:
            raise UsageError(f"{arguments.named} and --model {arguments.model} are given", "give one of them")
        arguments.model = arguments.named


def check_price(arguments: Namespace) -> None:
    if arguments.price is not None and not 0 <= arguments.price < inf:
        raise UsageError(f"--price is {arguments.price:g}", "it is in dollars an hour, and at least 0")


def add_draft_flags(group: "_ArgumentGroup") -> None:
    group.add_argument("--draft-model", metavar="MODEL", help="a model, or a shape, that proposes draft tokens")
    group.add_argument(
        "--draft-head", action="store_true", help="a head that has one layer, as EAGLE and MTP have, proposes them"
    )


def read_draft(arguments: Namespace, model: "PlannedModel", hardware: "Hardware") -> "Draft | None":
    """What proposes draft tokens; None: nothing that takes time. A shape has the format of the model, where that is
    given."""
    from quire.planning.drafting import Draft
    from quire.planning.shapes import SHAPES

    if arguments.draft_model and arguments.draft_head:
        raise UsageError("--draft-model and --draft-head are given", "one of them proposes draft tokens")
    if not arguments.draft_model and not arguments.draft_head:
        return None
    if (num_tokens := arguments.num_speculative_tokens) < 1:
        raise UsageError(f"--num-speculative-tokens is {num_tokens}", "it must be at least 1")
    if num_tokens > (most := model.config.max_length - 2):
        raise UsageError(f"--num-speculative-tokens is {num_tokens:,}", f"{model.name} has room for {most:,}")
    small, name = model, arguments.draft_model
    if name:
        is_shape = name.lower() in SHAPES
        has_format = is_shape or takes_format(name)
        small = count_model(name, hardware, arguments.format if has_format else None, is_shape=is_shape)
    _check_draft(model, small)
    return Draft(small, small.kv_spec(kv_dtype(arguments, hardware)), num_tokens, is_head=arguments.draft_head)


def _check_draft(model: "PlannedModel", small: "PlannedModel") -> None:
    """Refuse a draft model that an engine would refuse when it starts."""
    if small.config.vocab != model.config.vocab:
        raise UsageError(
            f"the draft model {small.name} has {small.config.vocab:,} logits, and the model {model.config.vocab:,}",
            "draft with a smaller model of the same family",
        )
    if small.config.has_states:
        raise UsageError(
            f"{small.name} has states, which cannot take rejected drafts back",
            "draft with a model that has attention in all layers",
        )


def count(text: str) -> int:
    """The value of a flag that counts tokens or requests: 32k as `quire serve` reads it."""
    try:
        return read_count(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def kv_name(text: str) -> str:
    """The value of --kv-cache-dtype, by vLLM's or llama-server's name of it, too."""
    from quire.engine.peers.reasons import KV_TYPES

    (option,) = (spec for spec in fields(EngineOptions) if spec.name == "kv_cache_dtype")
    names: dict[str, str] = {**KV_TYPES, **option.metadata["synonyms"]}
    return names.get(text, text)


def degrees(text: str) -> tuple[int, ...]:
    """The value of --tp or --pp: numbers with commas between them."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"`{text}` is no number such as 4, or several such as 2,4,8") from None


def check_degrees(model: "PlannedModel", tp: int, pp: int) -> None:
    """Refuse numbers of devices that an engine would refuse when it starts."""
    for flag, given, most, of in (
        ("--tp", tp, model.config.heads, "heads"),
        ("--pp", pp, model.config.layers, "layers"),
    ):
        if given > most:
            raise UsageError(f"{flag} is {given}, and the model has {most} {of}", f"use 1 to {most}")


def read_hardware(arguments: Namespace) -> "Hardware":
    """This machine, measured once, or the one that is named."""
    if arguments.tp < 1:
        raise UsageError(f"--tp is {arguments.tp}", "it must be at least 1")
    if "," in (arguments.hardware or ""):
        raise UsageError(f"--hardware is {arguments.hardware}", "name one, or search several with `quire plan --slo`")
    hardware = hardware_called(arguments.hardware or THIS, measure_again=arguments.measure)
    if arguments.tp > 1 and not hardware.link:
        raise UsageError(f"--tp is {arguments.tp}", f"{hardware.name} is one device: leave it out")
    return hardware


def hardware_called(name: str, *, measure_again: bool = False) -> "Hardware":
    from quire.planning.hardware import find_hardware

    if name.strip().lower() != THIS:
        return find_hardware(name)
    from quire.planning.this_machine import load_while_measured, this_machine

    kept = cache_dir() / "machine.json"
    if measure_again or not kept.exists():
        print("measuring this machine (a few seconds, once)", file=sys.stderr)
    hardware = this_machine(kept, measure_again=measure_again)
    if (load := load_while_measured(kept)) is not None:
        warn_if_busy("--measure", load)
    return hardware


def warn_if_busy(flag: str, load: float | None = None) -> None:
    """`flag`: what measures again. `load`: programs that ran at the time; without it, those that run now."""
    from quire.ops.native.cpus import available_cpus

    load, num_cpus = getloadavg()[0] if load is None else load, available_cpus()
    if load > 0.5 * num_cpus:
        print(
            f"warning: this machine is measured while {load:.1f} programs run on its {num_cpus} CPUs, and so too slow; "
            f"measure again with {flag} when it is idle",
            file=sys.stderr,
        )


def read_model(arguments: Namespace, hardware: "Hardware") -> "PlannedModel":
    """Counted for the backend of that hardware."""
    if arguments.model and arguments.shape:
        raise UsageError("a model and --shape are given", "give one of them")
    return count_model(arguments.shape or arguments.model or DEFAULT_MODEL, hardware, arguments.format,
                       arguments.quantization, is_shape=bool(arguments.shape))  # fmt: skip


def count_model(
    name: str, hardware: "Hardware", format_name: str | None = None, quantization: str | None = None, *,
    is_shape: bool = False,
) -> "PlannedModel":  # fmt: skip
    """Count the model of a path, a name of the hub, a config.json or, with `is_shape`, a known shape."""
    from quire.executors.backends import ON_GPU_ONLY
    from quire.planning.packed_bytes import packing_of
    from quire.planning.planned_model import plan_model

    if quantization in ON_GPU_ONLY and not hardware.is_gpu:
        raise UsageError(f"--quantization is {quantization}, which is for GPUs", "on a CPU, use int8, int4 or nf4")
    with TemporaryDirectory() as folder:
        checkpoint, short = planned_checkpoint(name, format_name, is_shape, Path(folder))
        return plan_model(short, checkpoint, packing_of(checkpoint.config, on_gpu=hardware.is_gpu), quantization)


def kv_dtype(arguments: Namespace, hardware: "Hardware") -> str:
    from quire.planning.hardware import kv_dtype_on

    return kv_dtype_on(hardware, arguments.kv_cache_dtype)
