"""`quire quantize --table`: several methods on one model, side by side."""

import json
import shutil
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.cli.progress import ProgressLine
from quire.cli.quantize_flags import calibration_options, make_run

COLUMNS = ("method", "bits", "MB", "perplexity", "KL mean", "KL p99", "same top")


def print_table(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.quantize.command import MethodComparison
    from quire.quantize.gptq import GPTQOptions
    from quire.quantize.methods import LINEAR_METHODS, method_name

    methods = [method_name(name) for name in arguments.methods.split(",") if name.strip()]
    source = resolve_model(arguments.model, progress=not arguments.quiet).path
    options = GPTQOptions(damping=arguments.damping, act_order=arguments.act_order)
    rows: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="quire-quantize-"))
    try:
        with ProgressLine(quiet=arguments.quiet) as progress:
            runs = []
            for method in methods:
                name = method if method in LINEAR_METHODS else f"{method}.gguf"
                run = make_run(arguments, source, folder / name, method)
                runs.append(replace(run, options=replace(run.options, requantize=True)))
            comparison = MethodComparison(runs[0], calibration_options(arguments), progress.update)
            for run in runs:
                rows.append(comparison.row(run, arguments.algorithm, options))
                if not arguments.json:
                    if len(rows) == 1:
                        print(_line(COLUMNS))
                    print(_line(_cells(rows[-1])), flush=True)
                shutil.rmtree(run.out, ignore_errors=True)
                run.out.unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps({"model": str(source), "methods": rows}, indent=2))
    else:
        print(f"on {rows[0]['quality']['num_tokens']} tokens of held-out text", file=sys.stderr)
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    quality = row["quality"]
    ratio, kl, top = quality["perplexity_ratio"], quality["kl"], quality["same_top"]
    return (
        row["method"],
        f"{row['bits_per_weight']:.2f}",
        f"{row['bytes'] / 1e6:,.1f}",
        f"x {ratio['value']:.4f} ± {ratio['error']:.4f}",
        f"{kl['value']:.5f} ± {kl['error']:.5f}",
        f"{quality['kl_p99']:.4f}",
        f"{100 * top['value']:.1f} ± {100 * top['error']:.1f} %",
    )


def _line(cells: tuple[str, ...]) -> str:
    widths = (-12, 6, 10, 20, 20, 8, 14)
    return " ".join(
        f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, width in zip(cells, widths, strict=True)
    )
