"""`quire quantize`: a checkpoint in another format, with what that costs in quality."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.progress import ProgressLine
from quire.cli.quantize_flags import add_flags, calibration_options, gptq_options, make_run, mix_target
from quire.cli.quantize_table import print_table

if TYPE_CHECKING:
    from quire.quantize.command import QuantizeResult

MAX_NOTE = 500  # characters
EXAMPLES = """\
  quire quantize ./llama llama-q4.gguf --method Q4_K_M --calibrate       ranges weighted by importance
  quire quantize ./llama ./llama-w4 --method W4A16 --algorithm gptq --calibrate texts.txt
  quire quantize ./llama ./llama-fp8 --method FP8_DYNAMIC
  quire quantize ./llama llama.gguf --target-size 4.5GB                  the best mix of types of that size
  quire quantize ./llama llama.gguf --method F16                         only convert
  quire quantize model.gguf ./folder --method BF16                       and back
  quire quantize ./llama ./merged --method BF16 --lora ./adapter         merge an adapter
  quire quantize --table ./llama --methods Q8_0,Q4_K_M,W4A16 --chart methods.svg   compare methods
  quire quantize --list                                                  the methods
"""


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
        return print_table(arguments)
    methods = (arguments.method, arguments.target_bits, arguments.target_size)
    if arguments.out is None or all(method is None for method in methods):
        missing = "an output" if arguments.out is None else "--method"
        raise UsageError(f"{missing} is missing", "for example `quire quantize ./llama llama.gguf --method Q4_K_M`")
    return _quantize(arguments)


def _quantize(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.quantize.command import check_request, quantize
    from quire.quantize.mix_plan import usual_method

    target, out = mix_target(arguments), Path(arguments.out)
    job = make_run(arguments, Path(arguments.model), out, arguments.method if target is None else usual_method(out))
    calibration, options = calibration_options(arguments), gptq_options(arguments)
    check_request(job, calibration, arguments.algorithm, options)
    job = replace(job, source=resolve_model(arguments.model, progress=not arguments.quiet).path)
    with ProgressLine(quiet=arguments.quiet) as progress:
        outcome = quantize(job, calibration, arguments.algorithm, options, progress.update, target)
    if arguments.json:
        print(json.dumps(outcome.as_json(), indent=2))
    else:
        print(report(outcome))
    return 0


def report(outcome: "QuantizeResult") -> str:
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
    lines += [f"note: {shorten(note)}" for note in (*plan.notes, *outcome.notes)]
    return "\n".join(lines)


def shorten(note: str) -> str:
    """Hundreds of layers may be named."""
    return note if len(note) <= MAX_NOTE else f"{note[:MAX_NOTE]} ... (--json has all)"


def _methods() -> str:
    from quire.quantize.file_types import FILE_TYPES
    from quire.quantize.methods import LINEAR_METHODS

    rows = [f"  {name:<12} {method.bits:>5.2f} bits  {method.about}" for name, method in LINEAR_METHODS.items()]
    return "\n".join(["GGUF files:", f"  {', '.join(FILE_TYPES)}", "folders in Hugging Face's layout:", *rows])
