"""The report of a load: the table that users of vLLM know, and a file of the figures."""

import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.cli.bench.serve.flags import LoadFlags, ResultFlags
from quire.cli.parser import UsageError

WIDTH = 50
MAX_FAILURES_SHOWN = 5
_GIB = 1 << 30
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def table(figures: dict[str, Any], load: LoadFlags, result: ResultFlags) -> list[str]:
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
    ]
    if load.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", load.max_concurrency))
    if math.isfinite(load.request_rate):
        rows.append(("Request rate configured (RPS):", load.request_rate))
    rows += [
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", figures["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
        *_resource_rows(figures),
    ]
    lines += [_row(name, value) for name, value in rows]
    for metric in result.metrics if figures["completed"] else ():
        lines += _latencies(metric, figures, result)
    if figures["failures"]:
        lines += [f"{'Failures':-^{WIDTH}}", *_failures(figures["failures"])]
    return [*lines, "=" * WIDTH, *(f"note: {note}" for note in figures["notes"])]


def _row(name: str, value: Any) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def _resource_rows(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    names = {
        "peak_rss_bytes": ("Peak memory of the server (GiB):", _GIB),
        "peak_gpu_used_bytes": ("Peak GPU memory in use (GiB):", _GIB),
        "cpu_energy_joules": ("Energy of the CPU (J):", 1),
        "gpu_energy_joules": ("Energy of the GPU (J):", 1),
    }
    reasons = figures["not_measured"]
    return [
        (name, f"- ({reasons[key]})" if figures[key] is None else figures[key] / unit)
        for key, (name, unit) in names.items()
    ]


def _latencies(metric: str, figures: dict[str, Any], result: ResultFlags) -> list[str]:
    rows = [
        (f"Mean {metric.upper()} (ms):", f"mean_{metric}_ms"),
        (f"Median {metric.upper()} (ms):", f"median_{metric}_ms"),
    ]
    rows += [(f"P{share:g} {metric.upper()} (ms):", f"p{share:g}_{metric}_ms") for share in result.percentiles]
    told = [_row(name, figures[key]) for name, key in rows if figures[key] is not None]
    return [f"{_TITLES[metric]:-^{WIDTH}}", *told] if told else []


def _failures(failures: dict[str, int]) -> list[str]:
    shown = list(failures.items())[:MAX_FAILURES_SHOWN]
    lines = [f"{count:>6} x {reason}" for reason, count in shown]
    if rest := len(failures) - len(shown):
        lines.append(f"{rest:>6} more reasons")
    return lines


def result_path(result: ResultFlags, load: LoadFlags, backend: str, model: str, now: datetime) -> Path | None:
    """Where the figures go. Raises UsageError, before anything is measured, if they cannot go there."""
    if not (result.save_result or result.append_result or result.result_dir or result.result_filename):
        return None
    path = Path(result.result_dir or ".") / (result.result_filename or _file_name(result, load, backend, model, now))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {path.parent} cannot be made: {error.strerror}", "give another one") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written", "give another --result-dir or --result-filename")
    return path


def _file_name(result: ResultFlags, load: LoadFlags, backend: str, model: str, now: datetime) -> str:
    rate = f"{load.request_rate}qps"
    if load.ramp_up_strategy is not None:
        rate = f"ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps:g}qps-{load.ramp_up_end_rps:g}qps"
    concurrency = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    return f"{result.label or backend}-{rate}{concurrency}-{Path(model).name}-{now:%Y%m%d-%H%M%S}.json"


def as_json(figures: dict[str, Any]) -> str:
    return json.dumps(figures, allow_nan=False)
