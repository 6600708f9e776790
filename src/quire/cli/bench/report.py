"""The report of a benchmark: a few lines of text, and one JSON object."""

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from quire import __version__
from quire.cli import machine
from quire.cli.bench.engine import BenchRun, Phase
from quire.cli.bench.resources import Resources, own_peak_rss, resource_lines
from quire.cli.parser import UsageError
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import uses_gpu
from quire.planning.percentiles import percentile

PERCENTILES = (50, 90, 99)
STDOUT = "-"
_GIB = 1 << 30


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds, from seconds; None without values."""
    if not values:
        return None
    summary = {"mean": fmean(values), **{f"p{share}": percentile(values, share) for share in PERCENTILES}}
    return {name: 1e3 * value for name, value in {**summary, "max": max(values)}.items()}


def spreads(runs: Sequence[BenchRun]) -> dict[str, Any]:
    """Latencies of all requests. An unfinished request counts with the tokens it has."""
    timings = [timing for run in runs for timing in run.requests]
    return {
        "ttft_ms": spread([timing.ttft for timing in timings if timing.ttft is not None]),
        "tpot_ms": spread([timing.tpot for timing in timings if timing.tpot is not None]),
        "e2el_ms": spread([timing.last - timing.asked for timing in timings if timing.finished]),
    }


def phase(runs: Sequence[BenchRun], name: str) -> dict[str, Any]:
    total = Phase()
    for run in runs:
        part: Phase = getattr(run, name)
        total = Phase(total.steps + part.steps, total.tokens + part.tokens, total.seconds + part.seconds)
    return {
        "steps": total.steps,
        "tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": total.rate,
    }


def surroundings(options: EngineOptions, engine: Engine, start_seconds: float) -> dict[str, Any]:
    """The model, its options and the machine of a measurement."""
    cores, capacity = machine.cores(), engine.capacity
    figures: dict[str, Any] = {
        "quire": __version__,
        "model": options.model,
        "options": {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if getattr(options, field.name) != field.default
        },
        "weight_bytes": capacity.weight_bytes,
        "cache_bytes": capacity.cache_bytes,
        "max_model_len": capacity.max_model_len,
        "start_seconds": start_seconds,
        "machine": {
            "cpu": machine.cpu_model(machine.read(Path("/proc/cpuinfo"))),
            "cores": cores.usable,
            "python": platform.python_version(),
        },
    }
    if uses_gpu(options.device):
        from quire.ops.gpu.device import describe

        figures["machine"]["gpu"] = describe()
    return figures


def spent(resources: Resources, options: EngineOptions) -> dict[str, Any]:
    """Peak memory and energy of an engine in this process."""
    figures: dict[str, Any] = {"peak_rss_bytes": own_peak_rss(), "peak_gpu_allocated_bytes": None}
    figures |= resources.figures()
    if uses_gpu(options.device):
        from quire.ops.gpu.device import peak_allocated

        return figures | {"peak_gpu_allocated_bytes": peak_allocated()}
    figures["not_measured"] |= {"peak_gpu_allocated_bytes": "the engine runs on the CPU"}
    return figures


def lines(figures: dict[str, Any]) -> list[str]:
    """The report as text."""
    host = figures["machine"]
    if gpu := host.get("gpu"):
        device = f"{gpu['name']}, {gpu['memory'] / _GIB:.0f} GiB, torch {gpu['torch']}, triton {gpu['triton']}"
    else:
        device = f"{host['cpu']}, {figures['options'].get('threads') or host['cores']} threads"
    text = [
        f"model       {figures['model']}, weights {figures['weight_bytes'] / _GIB:.2f} GiB, "
        f"cache {figures['cache_bytes'] / _GIB:.2f} GiB, started in {figures['start_seconds']:.1f} s",
        f"machine     {device}",
        *resource_lines(figures),
    ]
    for name in ("prefill", "decode"):
        part = figures[name]
        what = "with prompts in them" if name == "prefill" else "without"
        text.append(
            f"{name:<11} {part['tokens_per_second']:,.1f} tok/s: {part['tokens']:,} tokens in {part['steps']:,} steps "
            f"{what}, {part['seconds']:.2f} s"
        )
    names = {"ttft_ms": "first token", "tpot_ms": "each later", "e2el_ms": "whole"}
    text += ["", f"{'ms':<11}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99", "max"))]
    for key, name in names.items():
        if figures[key] is not None:
            text.append(f"{name:<11}" + "".join(f"{value:12.2f}" for value in figures[key].values()))
    return text


def check_target(output_json: str | None) -> None:
    """Fail before anything is measured if the file cannot be written."""
    if output_json not in (None, STDOUT) and not Path(str(output_json)).absolute().parent.is_dir():
        raise UsageError(f"there is no folder to put {output_json} into", "make it first")
    if output_json not in (None, STDOUT) and Path(str(output_json)).is_dir():
        raise UsageError(f"{output_json} is a folder", "name a file")


def report(headline: Sequence[str], figures: dict[str, Any], output_json: str | None) -> None:
    """The lines to stdout and the object to the file; or, where the file is `-`, to stdout instead."""
    if output_json == STDOUT:
        print(json.dumps(figures))
        return
    print("\n".join([*headline, *lines(figures)]))
    if output_json is not None:
        Path(output_json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"written to {output_json}", file=sys.stderr)
