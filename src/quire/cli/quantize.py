"""`quire quantize`: a checkpoint in another format, with what that costs in quality."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, UsageError
from quire.cli.progress import ProgressLine
from quire.cli.quantize_flags import add_flags, calibration_options, gptq_options, make_run, mix_target, settled
from quire.cli.quantize_table import print_table

if TYPE_CHECKING:
    from quire.quantize.command import QuantizeResult

MAX_NOTE = 500  # characters
EXAMPLES = """\
  quire quantize ./llama llama-q4.gguf --method Q4_K_M --calibrate       ranges weighted by importance
  quire quantize ./llama ./llama-w4 --method W4A16 --algorithm gptq --calibrate texts.txt
  quire quantize ./llama ./llama-fp8 --method FP8_DYNAMIC
  quire quantize ./llama llama.gguf --target-size 4.5GB                  the best mix of types of that size
  quire quantize model.gguf small.gguf Q4_K_M                            as llama-quantize is called
  quire quantize ./llama ./mixed --recipe recipe.yaml                    some layers in other formats
  quire quantize ./llama --calibrate texts.txt --save-imatrix i.gguf     the importance of inputs alone
  quire quantize ./llama llama.gguf --method F16                         only convert
  quire quantize model.gguf ./folder --method BF16                       and back
  quire quantize ./llama ./merged --method BF16 --lora ./adapter         merge an adapter
  quire quantize --table ./llama --methods Q8_0,Q4_K_M,W4A16 --chart methods.svg   compare methods
  quire quantize --list                                                  the methods
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "quantize [MODEL] [OUT] [METHOD]",
        "Quantize or convert a checkpoint, and measure what it lost.",
        EXAMPLES,
        intermixed=True,
    )
    add_flags(parser)
    arguments = parser.parse(argv)
    if arguments.list:
        print(_methods())
        return 0
    if arguments.model is None:
        raise UsageError(
            "there is no model to quantize", "name one: `quire quantize ./llama llama.gguf --method Q4_K_M`"
        )
    arguments = settled(arguments)
    if arguments.table:
        return print_table(arguments)
    _check_of_table(arguments)
    methods = (arguments.method, arguments.target_bits, arguments.target_size)
    if arguments.out is None and all(method is None for method in methods) and arguments.save_imatrix:
        return _save_importance(arguments)
    if arguments.out is None or all(method is None for method in methods):
        raise _missing(arguments)
    return _quantize(arguments)


def _check_of_table(arguments: Namespace) -> None:
    is_mix = arguments.target_bits is not None or arguments.target_size is not None
    for flag, given in (("--chart", arguments.chart), ("--no-speed", arguments.no_speed)):
        if given:
            raise UsageError(f"{flag} is of --table", "add --table, and leave out the output")
    if arguments.methods is not None and not is_mix:
        raise UsageError("--methods is of --table and of mixes", "for one format there is --method")


def _missing(arguments: Namespace) -> UsageError:
    from quire.quantize.methods import UnknownMethod, method_name

    if arguments.out is not None:
        try:
            name = method_name(arguments.out)
        except UnknownMethod:
            hint = f"for example `quire quantize {arguments.model} {arguments.out} --method Q4_K_M`"
            return UsageError("--method is missing", hint)
        out = f"{Path(arguments.model).stem}-{name}.gguf"
        return UsageError(
            f"{name} is a method, and an output is missing", f"`quire quantize {arguments.model} {out} {name}`"
        )
    return UsageError("an output is missing", "for example `quire quantize ./llama llama.gguf --method Q4_K_M`")


def _save_importance(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.quantize.command import check_calibration, save_importance

    out = Path(arguments.save_imatrix)
    calibration = calibration_options(arguments)
    job = make_run(arguments, Path(arguments.model), out.with_suffix(".gguf"), "F16")
    check_calibration(calibration)
    job = replace(job, source=resolve_model(arguments.model, progress=not arguments.quiet).path)
    with ProgressLine(quiet=arguments.quiet) as progress:
        count = save_importance(job, calibration, progress.update)
    print(json.dumps({"output": str(out), "matrices": count}) if arguments.json else f"{out}: {count} matrices")
    return 0


def _quantize(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.quantize.command import check_request, quantize
    from quire.quantize.huggingface_plan import half_precision
    from quire.quantize.mix_plan import usual_method

    target, out = mix_target(arguments), Path(arguments.out)
    is_auto = target is None and arguments.method.lower() == "auto"  # as converters have it
    method = "F16" if is_auto else arguments.method if target is None else usual_method(out)
    job = make_run(arguments, Path(arguments.model), out, method)
    calibration, options = calibration_options(arguments), gptq_options(arguments)
    check_request(job, calibration, arguments.algorithm, options)
    job = replace(job, source=resolve_model(arguments.model, progress=not arguments.quiet).path)
    if is_auto:
        job = replace(job, options=replace(job.options, method=half_precision(job.open())))
    with ProgressLine(quiet=arguments.quiet) as progress:
        dry = arguments.dry_run
        outcome = quantize(job, calibration, arguments.algorithm, options, progress.update, target, dry=dry)
    if arguments.json:
        print(json.dumps(outcome.as_json(), indent=2))
    else:
        print(report(outcome))
    return 0


def report(outcome: "QuantizeResult") -> str:
    plan, quality = outcome.written.plan, outcome.quality
    lines = [f"{plan.out}: {plan.nbytes / 1e6:,.1f} MB, {plan.bits_a_weight:.2f} bits a weight"]
    if outcome.dry:
        lines = [f"{t.name:<60} {t.type:<8} {t.nbytes / 1e6:>10,.3f} MB  {[*t.shape]}" for t in plan.tensors]
        files = f" in {len(plan.files)} files" if len(plan.files) > 1 else ""
        lines.append(
            f"{plan.out} would have {plan.nbytes / 1e6:,.1f} MB{files}, {plan.bits_a_weight:.2f} bits a weight"
        )
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
