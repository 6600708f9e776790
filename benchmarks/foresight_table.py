"""Errors of predictions as lines for a terminal, and as tables for docs/planning.md."""

from collections.abc import Sequence
from typing import Any

from benchmarks.foresight_cases import CLOSE_TO_CAPACITY
from benchmarks.foresight_record import AIMS, Record

WITHOUT_CALIBRATION = 0.15  # what a prediction from rates may be off by
KINDS = {
    "errors": "calibrated",
    "observed": "with the speed of each moment",
    "uncalibrated": "without calibration",
}


def header() -> str:
    return f"{'':<34} {' '.join(f'{name[:8]:>8}' for name in _short_names())}"


def line_of(row: dict[str, Any]) -> str:
    real, (num_steps, num_simulated) = row["real"], row["steps"]
    lines = [f"{row['workload']:<20} {row['requests']:>5} {row['seconds']:>5.0f} s {_cells(row['errors'])}"]
    lines += [f"  {KINDS[kind]:<31} {_cells(row[kind])}" for kind in ("observed", "uncalibrated")]
    lines.append(
        f"  load {_load_of(row)}, busy {row['busy']:.0%}; drift {row['drift']:+.1%}, sum of steps "
        f"{row['steps_error']:+.1%} (without prompts {row['decode_error']:+.1%}); "
        f"{num_steps} steps ({num_simulated} simulated), mean {1e3 * row['step_seconds']:.2f} ms, "
        f"TTFT p50 {1e3 * real['TTFT p50']:.0f} ms, "
        f"TPOT p50 {1e3 * real['TPOT p50']:.1f} ms, {real['output tokens/s']:.0f} tokens/s"
    )
    return "\n".join(lines)


def summary_of(rows: Sequence[dict[str, Any]]) -> str:
    """How many runs are within the aims."""
    lines = []
    for kind, name in KINDS.items():
        cells = (f"{count:>4}/{len(rows):<3}" for count in _num_within(rows, kind))
        lines.append(f"{name + ', within the aim':<33} {' '.join(cells)}")
    return "\n".join(lines)


def replay_lines(record: Record) -> str:
    return "\n".join(
        f"{workload:<20} kept {_cells(kept)}\n{'':<20} now  {_cells(now)}" for workload, kept, now in record.replay()
    )


def markdown_of(rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Two tables: errors as they are, and those that are left with the speed that the machine had at each moment."""
    columns = [f"{name} (aim {aim:.0%})" for name, aim in zip(_short_names(), AIMS.values(), strict=True)]
    parts = [f"{machine['cpus']} CPUs of {machine['cpu']}, {len(rows)} workloads, {machine['commit']}.", ""]
    parts += _table(rows, "errors", ["workload", "load", "busy", "drift", "sum of steps", *columns])
    parts += ["", "The same with the speed that the machine had at each moment:", ""]
    parts += _table(rows, "observed", ["workload", "load", "busy", *columns])
    within = _num_within(rows, "uncalibrated")
    counts = ", ".join(f"{name} {count}" for name, count in zip(_short_names(), within, strict=True))
    parts += ["", f"Without calibration, of {len(rows)} within {WITHOUT_CALIBRATION:.0%}: {counts}."]
    return "\n".join(parts) + "\n"


def _table(rows: Sequence[dict[str, Any]], kind: str, columns: Sequence[str]) -> list[str]:
    """Workloads that an engine is planned for, and below them those that come close to what it can serve."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    shares = ("drift", "steps_error") if kind == "errors" else ()
    blanks = [""] * (2 + len(shares))
    usual = [row for row in rows if 0 < row["load"] < CLOSE_TO_CAPACITY]
    for title, group in (("", usual), ("close to capacity", [row for row in rows if row not in usual])):
        if title and group:
            lines.append("| " + " | ".join([f"*{title}*", *[""] * (len(columns) - 1)]) + " |")
        for row in group:
            errors = [row[name] for name in shares] + [row[kind][name] for name in AIMS]
            cells = [_load_of(row), f"{100 * row['busy']:.0f} %", *(f"{100 * share:+.1f} %" for share in errors)]
            lines.append("| " + " | ".join([row["workload"], *cells]) + " |")
        if group:
            counts = [f"{count} of {len(group)}" for count in _num_within(group, kind)]
            lines.append("| " + " | ".join(["within the aim", *blanks, *counts]) + " |")
    return lines


def _load_of(row: dict[str, Any]) -> str:
    return f"{100 * row['load']:.0f} %" if row["load"] else "all"


def _num_within(rows: Sequence[dict[str, Any]], kind: str) -> list[int]:
    aims = dict.fromkeys(AIMS, WITHOUT_CALIBRATION) if kind == "uncalibrated" else AIMS
    return [sum(abs(row[kind][name]) <= aim for row in rows) for name, aim in aims.items()]


def _short_names() -> list[str]:
    return [name.replace("end to end", "E2E").replace("output ", "") for name in AIMS]


def _cells(errors: dict[str, float]) -> str:
    return " ".join(f"{errors[name]:>+8.1%}" for name in AIMS)
