"""`quire quantize --table`: several methods on one model, side by side."""

import json
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench.compare.charts import Bar, BarChart, svg
from quire.cli.parser import UsageError
from quire.cli.progress import ProgressLine
from quire.cli.quantize_flags import TABLE_METHODS, calibration_options, gptq_options, make_run

if TYPE_CHECKING:
    from quire.quantize.run import QuantizeRun

COLUMNS = (
    ("method", -12), ("bits", 6), ("MB", 9), ("memory MB", 10), ("tok/s", 8), ("perplexity", 11), ("ratio", 18),
    ("KL mean", 19), ("KL p99", 8), ("same top", 14),
)  # fmt: skip
SPEED = ("--batch-size", "1", "--input-len", "64", "--output-len", "32", "--num-iters-warmup", "1", "--num-iters", "3")


def print_table(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.quantize.command import MethodComparison
    from quire.quantize.methods import method_name

    methods = [method_name(name) for name in (arguments.methods or TABLE_METHODS).split(",") if name.strip()]
    chart = _chart_path(arguments.chart)
    source = resolve_model(arguments.model, progress=not arguments.quiet).path
    options = gptq_options(arguments)
    table = _Table(live=not arguments.json, measures_speed=not arguments.no_speed)
    folder = Path(tempfile.mkdtemp(prefix="quire-quantize-"))
    try:
        with ProgressLine(quiet=arguments.quiet) as progress:
            runs = [_run(arguments, source, folder, method) for method in methods]
            comparison = MethodComparison(runs[0], calibration_options(arguments), progress.update)
            table.add(comparison.original(), source)
            for run in runs:
                row, out = comparison.row(run, arguments.algorithm, options)
                table.add(row, out)
                shutil.rmtree(run.out, ignore_errors=True)
                run.out.unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps({"model": str(source), "methods": table.rows}, indent=2))
    else:
        print(f"on {table.rows[0]['quality']['num_tokens']} tokens of held-out text", file=sys.stderr)
    if chart is not None:
        chart.write_text(svg(charts(table.rows)), encoding="utf-8")
    return 0


def _chart_path(given: str | None) -> Path | None:
    if given is not None and not given.endswith(".svg"):
        raise UsageError(f"--chart is {given}", "name a file that ends in .svg")
    return None if given is None else Path(given)


def _run(arguments: Namespace, source: Path, folder: Path, method: str) -> "QuantizeRun":
    from quire.quantize.methods import LINEAR_METHODS

    name = method if method in LINEAR_METHODS else f"{method}.gguf"
    run = make_run(arguments, source, folder / name, method)
    return replace(run, options=replace(run.options, requantize=True))


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows are printed as they come, if `live`."""

    live: bool
    measures_speed: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any], path: Path) -> None:
        measured = speed(path) if self.measures_speed else {"memory_bytes": None, "tokens_per_second": None}
        self.rows.append(row | measured)
        if self.live:
            if len(self.rows) == 1:
                print(_line([name for name, _ in COLUMNS]))
            print(_line(_cells(self.rows[-1])), flush=True)


def speed(path: Path) -> dict[str, Any]:
    """Peak memory, and tokens a second of one sequence, in a process of its own, as `quire bench latency` measures
    them; None where the engine cannot run the model here."""
    command = [sys.executable, "-m", "quire.cli.main", "bench", "latency", "-m", str(path), "--max-model-len", "128"]
    done = subprocess.run([*command, *SPEED, "--output-json", "-"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        return {"memory_bytes": None, "tokens_per_second": None, "not_measured": reason[-1] if reason else ""}
    figures = json.loads(done.stdout)
    return {
        "memory_bytes": figures["peak_gpu_allocated_bytes"] or figures["peak_rss_bytes"],
        "tokens_per_second": round(figures["decode"]["tokens_per_second"], 2),
    }


def charts(rows: Sequence[dict[str, Any]]) -> list[BarChart]:
    """What methods cost and gain; the original is gray."""

    def bars(value: Any, error: Any = lambda row: 0.0) -> list[Bar]:
        shown = [row for row in rows if value(row) is not None]
        return [
            Bar(row["method"], value(row), max(value(row) - error(row), 0), value(row) + error(row)) for row in shown
        ]

    divergence = bars(lambda row: row["quality"]["kl"]["value"], lambda row: row["quality"]["kl"]["error"])
    drawn = [
        BarChart("Mean KL divergence from the original", "nats", divergence[1:], ()),
        BarChart("Size", "MB", bars(lambda row: row["bytes"] / 1e6)),
        BarChart("Peak memory", "MB", bars(lambda row: row["memory_bytes"] and row["memory_bytes"] / 1e6)),
        BarChart("Speed of one sequence", "tokens a second", bars(lambda row: row["tokens_per_second"])),
    ]
    return [chart for chart in drawn if chart.bars]


def _cells(row: dict[str, Any]) -> list[str]:
    quality = row["quality"]
    ratio, kl, top = quality["perplexity_ratio"], quality["kl"], quality["same_top"]
    memory, rate = row["memory_bytes"], row["tokens_per_second"]
    return [
        row["method"],
        f"{row['bits_per_weight']:.2f}",
        f"{row['bytes'] / 1e6:,.1f}",
        "-" if memory is None else f"{memory / 1e6:,.0f}",
        "-" if rate is None else f"{rate:,.1f}",
        f"{quality['perplexity'] * ratio['value']:.3f}",
        f"{ratio['value']:.4f} ± {ratio['error']:.4f}",
        f"{kl['value']:.5f} ± {kl['error']:.5f}",
        f"{quality['kl_p99']:.4f}",
        f"{100 * top['value']:.1f} ± {100 * top['error']:.1f} %",
    ]


def _line(cells: Sequence[str]) -> str:
    return " ".join(
        f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)
    )
