"""What `quire simulate` prints: a line for each load."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.planning.summary import Summary

_HEADER = (
    f"{'':>8} {'TTFT ms':^24} {'TPOT ms':^24} {'end to end s':^20} {'output':>8} {'cache':>5} {'':>5} {'mean':>6} "
    f"{'pre-':>6} {'$ for a':>8}\n"
    f"{'req/s':>8} {'p50':>7} {'p90':>7} {'p99':>8} {'p50':>7} {'p90':>7} {'p99':>8} {'p50':>6} {'p90':>6} "
    f"{'p99':>6} {'tokens/s':>8} {'hits':>5} {'busy':>5} {'queue':>6} {'empted':>6} {'million':>8}"
)


def header(goals: Mapping[str, float]) -> str:
    """With a column for what keeps these bounds, if there are any."""
    above, below = _HEADER.split("\n")
    return f"{above} {'good':>7}\n{below} {'req/s':>7}" if goals else _HEADER


def cost_of(summary: "Summary", hourly: float) -> dict[str, Any] | None:
    """What a run would cost in US dollars; None where no price is known."""
    if not hourly:
        return None
    tokens = summary.output_tokens_per_second * 3600
    return {"per_hour": hourly, "per_million_output_tokens": 1e6 * hourly / tokens}


def line_of(rate: float, summary: "Summary", hourly: float) -> str:
    times = [*(1e3 * value for value in summary.ttft.values()), *(1e3 * value for value in summary.tpot.values())]
    cells = " ".join(f"{value:>{8 if i % 3 == 2 else 7},.1f}" for i, value in enumerate(times))
    whole = " ".join(f"{value:>6,.1f}" for value in summary.latency.values())
    cost = cost_of(summary, hourly)
    line = (
        f"{rate:>8g} {cells} {whole} {summary.output_tokens_per_second:>8,.0f} {summary.hit_rate:>5.0%} "
        f"{summary.utilization:>5.0%} {summary.mean_queue:>6,.1f} {summary.preemptions:>6,} "
        + (f"{cost['per_million_output_tokens']:>8,.2f}" if cost else " " * 8)
        + (f" {summary.goodput:>7.2f}" if summary.goodput is not None else "")
    )
    return line.rstrip()
