"""The flags of `quire quantize`, and what they ask for."""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable
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
VALUE_READERS: dict[str, Callable[[str], bool | int | float | str]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": {"true": True, "false": False}.__getitem__,
}  # of --override-kv


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a directory, a GGUF file or a hub repository")
    add("out", nargs="?", metavar="OUT", help="a folder, or a file that ends in .gguf")
    add("type", nargs="?", metavar="METHOD", help="as --method, in llama-quantize's place")
    add("threads", nargs="?", help=argparse.SUPPRESS)
    add("--method", "--scheme", "--outtype", metavar="NAME", help="such as Q4_K_M, W4A16, FP8_DYNAMIC, NF4: see --list")
    add("--outfile", "--output", "-o", metavar="OUT", help="as OUT")
    add("--recipe", metavar="FILE", help="instead: which layers get which method, as llm-compressor's YAML says it")
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
    add(
        "--damping",
        type=float,
        default=0.2,
        metavar="X",
        help="of GPTQ's second moments (default: 0.2): less fits the calibration text better, others worse",
    )
    add("--smoothing-strength", type=float, metavar="X", help="of SmoothQuant: 0 to 1 (default: 0.5)")
    add("--double-quantization", action=argparse.BooleanOptionalAction, default=True, help="of NF4's and FP4's scales")
    add("--ignore", action="append", default=[], metavar="REGEX", help="names of weights that stay as they are")
    add(
        "--tensor-type",
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        help="weights that get another type or method, such as ffn_down=Q6_K or down_proj=W8A16; the first counts",
    )
    add("--tensor-type-file", metavar="FILE", help="a file with REGEX=TYPE in each line")
    add("--dtype", choices=("F32", "F16", "BF16"), help="of quantized tensors that the output has in floats")
    add("--pure", action="store_true", help="of GGUF: one type for all matrices")
    add("--output-tensor-type", metavar="TYPE", help="of GGUF: the type of the head")
    add("--leave-output-tensor", action="store_true", help="the head stays as it is")
    add("--token-embedding-type", metavar="TYPE", help="of GGUF: the type of the embedding table")
    add("--split-max-size", "--max-shard-size", metavar="SIZE", help="write files of at most so much, such as 2GB")
    add("--keep-split", action="store_true", help="of GGUF: as many files as the model has")
    add(
        "--override-kv",
        action="append",
        default=[],
        metavar="KEY=TYPE:VALUE",
        help="of GGUF: another value of a key; int, float, bool or str",
    )
    add("--prune-layers", metavar="LIST", help="of GGUF: layers to leave out, such as 20,21,22")
    add("--kv-cache-scales", action="store_true", help="of compressed-tensors: calibrated scales of an fp8 KV cache")
    add("--lora", metavar="PATH", help="an adapter to merge first")
    add("--requantize", "--allow-requantize", action="store_true", help="even if the model is quantized already")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU where there is one and torch",
    )
    add("--dry-run", action="store_true", help="say what would be written, tensor by tensor, and write nothing")
    add("--report-tokens", type=int, metavar="N", help="to measure the quality on (default: 1024); 0: do not")
    add("--table", action="store_true", help="compare methods on MODEL, without an output")
    add("--methods", metavar="LIST", help=f"of --table (default: {TABLE_METHODS}); of a mix: formats to choose from")
    add("--no-speed", action="store_true", help="of --table: measure neither memory nor tokens a second")
    add("--chart", metavar="FILE", help="of --table: draw it, as SVG")
    add("--list", action="store_true", help="list the methods")
    add("--json", action="store_true", help="one JSON object")
    add("-q", "--quiet", action="store_true", help="show no progress")


def settled(arguments: Namespace) -> Namespace:
    """What other tools write in other places, and what a recipe says, in the flags of their own."""
    given = Namespace(**vars(arguments))
    if given.threads is not None:
        raise UsageError(
            f"`{given.threads}` would be a number of threads, which is no argument here",
            "`taskset -c 0-3 quire quantize ...` limits the cores",
        )
    if given.outfile is not None:
        if given.out is not None and given.type is None and given.method is None:
            given.out, given.type = None, given.out
        if given.out is not None:
            raise UsageError(f"the output is {given.out} and {given.outfile}", "name it once")
        given.out = given.outfile
    if given.type is not None:
        if given.method is not None:
            raise UsageError(f"the method is {given.type} and {given.method}", "name it once")
        given.method = given.type
    return _with_recipe(given) if given.recipe is not None else given


def _with_recipe(arguments: Namespace) -> Namespace:
    from quire.quantize.recipe import read_recipe

    for flag in ("method", "target_bits", "target_size", "tensor_type_file", "tensor_type", "table"):
        if getattr(arguments, flag):
            raise UsageError(f"--recipe and --{flag.replace('_', '-')} exclude each other", "leave one of them out")
    recipe = read_recipe(Path(arguments.recipe))
    arguments.method, arguments.algorithm = recipe.method, arguments.algorithm or recipe.algorithm
    arguments.ignore = [*arguments.ignore, *recipe.ignore]
    arguments.tensor_type = [f"{pattern}={name}" for pattern, name in recipe.patterns]
    if arguments.group_size is None:
        arguments.group_size = recipe.group_size
    if recipe.smoothing_strength is not None:
        arguments.smoothing_strength = float(recipe.smoothing_strength)
    if recipe.damping is not None:
        arguments.damping = float(recipe.damping)
    arguments.act_order = arguments.act_order or recipe.act_order
    arguments.kv_cache_scales = arguments.kv_cache_scales or recipe.kv_scales
    return arguments


def make_run(arguments: Namespace, source: Path, out: Path, method: str) -> "QuantizeRun":
    from quire.quantize.device import find_device
    from quire.quantize.methods import FormatOptions, method_name
    from quire.quantize.plan import QuantizeOptions
    from quire.quantize.run import QuantizeRun

    to_gguf = out.suffix == ".gguf"
    head = (r"^output\.weight$",) if arguments.leave_output_tensor else ()
    options = QuantizeOptions(
        method=method_name(method, to_gguf=to_gguf),
        ignore=(*map(_regex, arguments.ignore), *head),
        dtype=arguments.dtype,
        pure=arguments.pure,
        head_type=_gguf_type(arguments.output_tensor_type, "--output-tensor-type"),
        table_type=_gguf_type(arguments.token_embedding_type, "--token-embedding-type"),
        requantize=arguments.requantize,
        lora=arguments.lora,
        kv_scales=arguments.kv_cache_scales,
        split_bytes=_size(arguments.split_max_size, "--split-max-size"),
        keep_split=arguments.keep_split,
        patterns=_patterns(arguments, to_gguf),
        overrides=tuple(map(_override, arguments.override_kv)),
        pruned=_layers(arguments.prune_layers),
        smoothing_strength=_strength(arguments),
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


def _regex(pattern: str, flag: str = "--ignore") -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{flag} {pattern} is no regex: {error}", "`lm_head` or `layers.0.` are") from error
    return pattern


def _patterns(arguments: Namespace, to_gguf: bool) -> tuple[tuple[str, str], ...]:
    from quire.quantize.methods import LINEAR_METHODS, method_name

    given = [*arguments.tensor_type]
    if arguments.tensor_type_file is not None:
        try:
            given += Path(arguments.tensor_type_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--tensor-type-file {arguments.tensor_type_file} cannot be read: {error}") from error
    patterns = []
    for each in given:
        pattern, _, name = each.rpartition("=")
        if not pattern or not name:
            raise UsageError(f"--tensor-type is {each}", "give REGEX=TYPE, such as ffn_down=Q6_K")
        kind = _gguf_type(name, "--tensor-type") if to_gguf else method_name(name, to_gguf=False)
        assert kind is not None
        if not to_gguf and kind not in LINEAR_METHODS:
            raise UsageError(
                f"--tensor-type {each}: {kind} is no method of a folder", "--ignore keeps layers in floats"
            )
        patterns.append((_regex(pattern, "--tensor-type"), kind))
    return tuple(patterns)


def _override(text: str) -> tuple[str, bool | int | float | str]:
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not (key and equals and colon and kind in VALUE_READERS):
        raise UsageError(f"--override-kv is {text}", "give KEY=TYPE:VALUE, and int, float, bool or str as TYPE")
    try:
        return key, VALUE_READERS[kind](value)
    except (ValueError, KeyError) as error:
        raise UsageError(f"--override-kv {key}: `{value}` is no {kind}", "such as 4096, 0.5, true or text") from error


def _strength(arguments: Namespace) -> float:
    strength: float | None = arguments.smoothing_strength
    if strength is None:
        return 0.5
    if arguments.algorithm != "smoothquant":
        raise UsageError("--smoothing-strength is of SmoothQuant", "add `--algorithm smoothquant`")
    if not 0 <= strength <= 1:
        raise UsageError(f"--smoothing-strength is {strength:g}", "give 0 (weights stay) to 1 (inputs become even)")
    return strength


def _layers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise UsageError(f"--prune-layers is {text}", "give numbers from 0, with commas between: 20,21,22")
    return tuple(sorted({int(part) for part in text.split(",")}))


def _gguf_type(name: str | None, flag: str) -> str | None:
    from quire.quantize.gguf_types import ENCODERS

    if name is None or name.upper() in ENCODERS:
        return name.upper() if name else None
    raise UsageError(f"{flag} is {name}", f"use one of {', '.join(ENCODERS)}")
