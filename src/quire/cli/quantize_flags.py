"""The flags of `quire quantize`, and what they ask for."""

import argparse
import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.values import read_bytes

if TYPE_CHECKING:
    from quire.quantize.command import CalibrationOptions
    from quire.quantize.gptq import GPTQOptions
    from quire.quantize.mix import MixTarget
    from quire.quantize.run import QuantizeRun

MIN_SIZE = 1000
TABLE_METHODS = "Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q4_0,Q3_K_M,Q2_K"


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a directory, a GGUF file or a hub repository")
    add("out", nargs="?", metavar="OUT", help="a folder, or a file that ends in .gguf")
    add("--method", metavar="NAME", help="such as Q4_K_M, W4A16, FP8_DYNAMIC, NF4: see --list")
    add("--target-bits", type=float, metavar="X", help="instead: the best mix of formats with X bits a weight")
    add("--target-size", metavar="SIZE", help="instead: the best mix that takes so much, such as 80MB or 4.5GB")
    add(
        "--algorithm",
        choices=("nearest", "gptq", "awq", "smoothquant"),
        help="how weights are rounded (default: the method's own)",
    )
    add("--calibrate", nargs="?", const="", metavar="FILE", help="weigh errors by the inputs that a text gives")
    add("--calibration-tokens", type=int, default=16384, metavar="N", help="of the text (default: 16384)")
    add("--sequence-length", type=int, default=512, metavar="N", help="tokens of a sequence (default: 512)")
    add("--imatrix", metavar="FILE", help="importance of inputs, as llama.cpp keeps it")
    add("--save-imatrix", metavar="FILE", help="write the importance of inputs there")
    add("--bits", type=int, metavar="N", help="of GPTQ: 2, 3, 4 or 8")
    add("--group-size", type=int, metavar="N", help="weights that share a scale; -1: a whole row")
    add("--symmetric", action=argparse.BooleanOptionalAction, default=None, help="without zero points")
    add(
        "--act-order",
        nargs="?",
        const="activation",
        choices=("activation", "group", "inputs"),
        help="of GPTQ: the inputs that matter most first; `group` (default): within groups that stay as they are; "
        "`inputs`: as they are",
    )
    add("--damping", type=float, default=0.05, metavar="X", help="of GPTQ's second moments (default: 0.05)")
    add("--double-quantization", action=argparse.BooleanOptionalAction, default=True, help="of NF4's and FP4's scales")
    add("--ignore", action="append", default=[], metavar="REGEX", help="names of weights that stay as they are")
    add("--dtype", choices=("F32", "F16", "BF16"), help="of quantized tensors that the output has in floats")
    add("--pure", action="store_true", help="of GGUF: one type for all matrices")
    add("--output-tensor-type", metavar="TYPE", help="of GGUF: the type of the head")
    add("--token-embedding-type", metavar="TYPE", help="of GGUF: the type of the embedding table")
    add("--split-max-size", metavar="SIZE", help="of GGUF: write splits of at most so much, such as 2GB")
    add("--kv-cache-scales", action="store_true", help="of compressed-tensors: calibrated scales of an fp8 KV cache")
    add("--lora", metavar="PATH", help="an adapter to merge first")
    add("--requantize", "--allow-requantize", action="store_true", help="even if the model is quantized already")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU where there is one and torch",
    )
    add("--report-tokens", type=int, metavar="N", help="to measure the quality on (default: 1024); 0: do not")
    add("--table", action="store_true", help="compare methods on MODEL, without an output")
    add("--methods", metavar="LIST", help=f"of --table (default: {TABLE_METHODS}); of a mix: formats to choose from")
    add("--no-speed", action="store_true", help="of --table: measure neither memory nor tokens a second")
    add("--chart", metavar="FILE", help="of --table: draw it, as SVG")
    add("--list", action="store_true", help="list the methods")
    add("--json", action="store_true", help="one JSON object")
    add("-q", "--quiet", action="store_true", help="show no progress")


def make_run(arguments: Namespace, source: Path, out: Path, method: str) -> "QuantizeRun":
    from quire.quantize.device import find_device
    from quire.quantize.methods import FormatOptions, method_name
    from quire.quantize.plan import QuantizeOptions
    from quire.quantize.run import QuantizeRun

    options = QuantizeOptions(
        method=method_name(method, to_gguf=out.suffix == ".gguf"),
        ignore=tuple(map(_regex, arguments.ignore)),
        dtype=arguments.dtype,
        pure=arguments.pure,
        head_type=_gguf_type(arguments.output_tensor_type, "--output-tensor-type"),
        table_type=_gguf_type(arguments.token_embedding_type, "--token-embedding-type"),
        requantize=arguments.requantize,
        lora=arguments.lora,
        kv_scales=arguments.kv_cache_scales,
        split_bytes=_size(arguments.split_max_size, "--split-max-size"),
    )
    formats = FormatOptions(
        bits=arguments.bits,
        group_size=arguments.group_size,
        symmetric=arguments.symmetric,
        act_order=arguments.act_order == "activation",
        double_quantization=arguments.double_quantization,
    )
    return QuantizeRun(source, out, options, formats, device=find_device(arguments.device))


def mix_target(arguments: Namespace) -> "MixTarget | None":
    """None where one method is asked for."""
    from quire.quantize.mix import MixTarget

    bits, size = arguments.target_bits, _size(arguments.target_size, "--target-size")
    if bits is None and size is None:
        return None
    if arguments.method is not None or (bits is not None and size is not None):
        raise UsageError(
            "--method, --target-bits and --target-size exclude each other", "name the formats of a mix with --methods"
        )
    if bits is not None and not 1 <= bits <= 16:
        raise UsageError(f"--target-bits is {bits:g}", "give 1 to 16")
    names = (arguments.methods or "").upper().replace("-", "_").split(",")
    return MixTarget(bits, size, tuple(name.strip() for name in names if name.strip()))


def gptq_options(arguments: Namespace) -> "GPTQOptions":
    from quire.quantize.gptq import GPTQOptions

    if not 0 <= arguments.damping <= 1:
        raise UsageError(f"--damping is {arguments.damping:g}", "give 0 to 1, a share of the mean second moment")
    return GPTQOptions(damping=arguments.damping, order=arguments.act_order)


def calibration_options(arguments: Namespace) -> "CalibrationOptions":
    from quire.quantize.command import CalibrationOptions

    for flag, least in (("calibration_tokens", 64), ("sequence_length", 16)):
        if (value := getattr(arguments, flag)) < least:
            raise UsageError(f"--{flag.replace('_', '-')} is {value}", f"give {least} or more")
    return CalibrationOptions(
        wanted=arguments.calibrate is not None or arguments.save_imatrix is not None,
        text=Path(arguments.calibrate) if arguments.calibrate else None,
        num_tokens=arguments.calibration_tokens,
        length=arguments.sequence_length,
        imatrix=Path(arguments.imatrix) if arguments.imatrix else None,
        save_imatrix=Path(arguments.save_imatrix) if arguments.save_imatrix else None,
        measured_tokens=arguments.report_tokens,
    )


def _size(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    try:
        size = read_bytes(text)
    except ValueError as error:
        raise UsageError(f"{flag} is {text}", str(error)) from error
    if size < MIN_SIZE:
        raise UsageError(f"{flag} is {text}", f"give {MIN_SIZE} bytes or more")
    return size


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--ignore {pattern} is no regex: {error}", "`lm_head` or `layers.0.` are") from error
    return pattern


def _gguf_type(name: str | None, flag: str) -> str | None:
    from quire.quantize.gguf_types import ENCODERS

    if name is None or name.upper() in ENCODERS:
        return name.upper() if name else None
    raise UsageError(f"{flag} is {name}", f"use one of {', '.join(ENCODERS)}")
