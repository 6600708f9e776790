"""A picture of load against latency, as SVG."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from quire.planning.summary import Summary

WIDTH, HEIGHT, MARGIN = 720, 360, 60
COLORS = {"TTFT p50": "#2563eb", "TTFT p99": "#93c5fd", "TPOT p50": "#dc2626", "TPOT p99": "#fca5a5"}


def load_picture(rows: Sequence[tuple[float, Summary]]) -> str:
    """Milliseconds by requests a second; the vertical axis is logarithmic."""
    curves = {
        "TTFT p50": [summary.ttft[50] for _, summary in rows],
        "TTFT p99": [summary.ttft[99] for _, summary in rows],
        "TPOT p50": [summary.tpot[50] for _, summary in rows],
        "TPOT p99": [summary.tpot[99] for _, summary in rows],
    }
    rates = [rate for rate, _ in rows]
    values = [max(1e3 * value, 0.01) for curve in curves.values() for value in curve]
    low, high = floor(log10(min(values))), max(ceil(log10(max(values))), floor(log10(min(values))) + 1)
    most = max(rates)

    def x(rate: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * rate / most

    def y(seconds: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (log10(max(1e3 * seconds, 0.01)) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for power in range(low, high + 1):
        at = y(10.0**power / 1e3)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for rate in rates:
        parts.append(f'<text x="{x(rate):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{rate:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">requests a second</text>')
    for index, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(rate):.1f},{y(value):.1f}" for rate, value in zip(rates, curve, strict=True))
        color = COLORS[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(rate):.1f}" cy="{y(value):.1f}" r="3" fill="{color}"/>'
            for rate, value in zip(rates, curve, strict=True)
        ]
        parts.append(f'<text x="{MARGIN + 10 + 140 * index}" y="24" fill="{color}">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"
