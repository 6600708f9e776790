"""`quire quantize`: a checkpoint in another format, with what that costs in quality."""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.progress import ProgressLine

if TYPE_CHECKING:
    from quire.quantize.command import CalibrationOptions, Outcome
    from quire.quantize.run import QuantizeRun

EXAMPLES = """\
  quire quantize ./llama llama-q4.gguf --method Q4_K_M --calibrate       ranges weighted by importance
  quire quantize ./llama ./llama-w4 --method W4A16 --algorithm gptq --calibrate texts.txt
  quire quantize ./llama ./llama-fp8 --method FP8_DYNAMIC
  quire quantize ./llama llama.gguf --method F16                         only convert
  quire quantize model.gguf ./folder --method BF16                       and back
  quire quantize ./llama ./merged --method BF16 --lora ./adapter         merge an adapter
  quire quantize --table ./llama --methods Q8_0,Q4_K_M,W4A16             compare methods
  quire quantize --list                                                  the methods
"""
TABLE_METHODS = "Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q4_0,Q3_K_M,Q2_K"


def run(argv: Sequence[str]) -> int:
    parser = Parser("quantize [MODEL] [OUT]", "Quantize or convert a checkpoint, and measure what it lost.", EXAMPLES)
    add_flags(parser)
    arguments = parser.parse(argv)
    if arguments.list:
        print(_methods())
        return 0
    if arguments.model is None:
        raise UsageError(
            "there is no model to quantize", "name one: `quire quantize ./llama llama.gguf --method Q4_K_M`"
        )
    if arguments.table:
        from quire.cli.quantize_table import print_table

        return print_table(arguments)
    if arguments.out is None or arguments.method is None:
        missing = "an output" if arguments.out is None else "--method"
        raise UsageError(f"{missing} is missing", "for example `quire quantize ./llama llama.gguf --method Q4_K_M`")
    return _quantize(arguments)


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a directory, a GGUF file or a hub repository")
    add("out", nargs="?", metavar="OUT", help="a folder, or a file that ends in .gguf")
    add("--method", metavar="NAME", help="such as Q4_K_M, W4A16, FP8_DYNAMIC, NF4: see --list")
    add("--algorithm", choices=("nearest", "gptq"), help="how weights are rounded (default: the method's own)")
    add("--calibrate", nargs="?", const="", metavar="FILE", help="weigh errors by the inputs that a text gives")
    add("--calibration-tokens", type=int, default=16384, metavar="N", help="of the text (default: 16384)")
    add("--sequence-length", type=int, default=512, metavar="N", help="tokens of a sequence (default: 512)")
    add("--imatrix", metavar="FILE", help="importance of inputs, as llama.cpp keeps it")
    add("--save-imatrix", metavar="FILE", help="write the importance of inputs there")
    add("--bits", type=int, metavar="N", help="of GPTQ: 2, 3, 4 or 8")
    add("--group-size", type=int, metavar="N", help="weights that share a scale; -1: a whole row")
    add("--symmetric", action=argparse.BooleanOptionalAction, default=None, help="without zero points")
    add("--act-order", action="store_true", help="of GPTQ: the inputs that matter most first")
    add("--damping", type=float, default=0.01, metavar="X", help="of GPTQ's second moments (default: 0.01)")
    add("--double-quantization", action=argparse.BooleanOptionalAction, default=True, help="of NF4's and FP4's scales")
    add("--ignore", action="append", default=[], metavar="REGEX", help="names of weights that stay as they are")
    add("--dtype", choices=("F32", "F16", "BF16"), help="of quantized tensors that the output has in floats")
    add("--pure", action="store_true", help="of GGUF: one type for all matrices")
    add("--output-tensor-type", metavar="TYPE", help="of GGUF: the type of the head")
    add("--token-embedding-type", metavar="TYPE", help="of GGUF: the type of the embedding table")
    add("--lora", metavar="PATH", help="an adapter to merge first")
    add("--requantize", "--allow-requantize", action="store_true", help="even if the model is quantized already")
    add("--report-tokens", type=int, metavar="N", help="to measure the quality on (default: 1024); 0: do not")
    add("--table", action="store_true", help="compare methods on MODEL, without an output")
    add("--methods", default=TABLE_METHODS, metavar="LIST", help=f"of --table (default: {TABLE_METHODS})")
    add("--list", action="store_true", help="list the methods")
    add("--json", action="store_true", help="one JSON object")
    add("-q", "--quiet", action="store_true", help="show no progress")


def _quantize(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.quantize.command import quantize
    from quire.quantize.gptq import GPTQOptions

    source = resolve_model(arguments.model, progress=not arguments.quiet).path
    job = make_run(arguments, source, Path(arguments.out), arguments.method)
    options = GPTQOptions(damping=arguments.damping, act_order=arguments.act_order)
    with ProgressLine(quiet=arguments.quiet) as progress:
        outcome = quantize(job, calibration_options(arguments), arguments.algorithm, options, progress.update)
    if arguments.json:
        print(json.dumps(outcome.as_json(), indent=2))
    else:
        print(report(outcome))
    return 0


def make_run(arguments: Namespace, source: Path, out: Path, method: str) -> "QuantizeRun":
    from quire.quantize.methods import FormatOptions, method_name
    from quire.quantize.plan import QuantizeOptions
    from quire.quantize.run import QuantizeRun

    options = QuantizeOptions(
        method=method_name(method),
        ignore=tuple(map(_regex, arguments.ignore)),
        dtype=arguments.dtype,
        pure=arguments.pure,
        head_type=_gguf_type(arguments.output_tensor_type, "--output-tensor-type"),
        table_type=_gguf_type(arguments.token_embedding_type, "--token-embedding-type"),
        requantize=arguments.requantize,
        lora=arguments.lora,
    )
    formats = FormatOptions(
        arguments.bits, arguments.group_size, arguments.symmetric, arguments.act_order, arguments.double_quantization
    )
    return QuantizeRun(source, out, options, formats)


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


def _regex(pattern: str) -> str:
    import re

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


def report(outcome: "Outcome") -> str:
    plan, quality = outcome.written.plan, outcome.quality
    lines = [f"{plan.out}: {plan.nbytes / 1e6:,.1f} MB, {plan.bits_a_weight:.2f} bits a weight"]
    lines += [f"  {kind:<10} {tensors:>5} tensors {weights / 1e6:>9,.1f} M weights"
              for kind, (tensors, weights) in plan.types().items()]  # fmt: skip
    if outcome.written.resumed:
        lines.append(f"  {outcome.written.resumed} tensors were there from an earlier run")
    if quality is not None:
        lines.append(f"against the original, on {quality.num_tokens} tokens of held-out text:")
        ratio, kl, top = quality.perplexity_ratio, quality.kl, quality.same_top
        lines.append(f"  perplexity {quality.perplexity:.3f} x {ratio.value:.4f} ± {ratio.error:.4f}")
        lines.append(f"  KL divergence {kl.value:.5f} ± {kl.error:.5f}, p99 {quality.kl_p99:.4f}")
        lines.append(f"  same top token {100 * top.value:.1f} ± {100 * top.error:.1f} %")
    if outcome.losses:
        worst = sorted(outcome.losses.items(), key=lambda item: -item[1])[:5]
        lines.append("layers that lost most, as a share of what they compute:")
        lines += [f"  {100 * loss:6.2f} %  {name}" for name, loss in worst]
    lines += [f"note: {note}" for note in (*plan.notes, *outcome.notes)]
    return "\n".join(lines)


def _methods() -> str:
    from quire.quantize.methods import LINEAR_METHODS
    from quire.quantize.mixtures import FILE_TYPES

    rows = [f"  {name:<12} {method.bits:>5.2f} bits  {method.about}" for name, method in LINEAR_METHODS.items()]
    return "\n".join(["GGUF files:", f"  {', '.join(FILE_TYPES)}", "folders in Hugging Face's layout:", *rows])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
