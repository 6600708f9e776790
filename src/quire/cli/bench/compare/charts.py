"""Charts as SVG, written by hand: bars, stacked bars, lines and timelines, in light and in dark."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Protocol

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 76, 36, 58, 48
BAR, GAP, LABELS = 22, 12, 170
PLOT_HEIGHT = 230
MAX_SERIES = 6
BASELINE, ACCENT = 0, 1  # colours

STYLE = """
.chart{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;--ink:#1f2937;--soft:#6b7280;--grid:#e5e7eb;--paper:#fff;
--c0:#94a3b8;--c1:#2563eb;--c2:#059669;--c3:#d97706;--c4:#7c3aed;--c5:#dc2626}
@media(prefers-color-scheme:dark){.chart{--ink:#e5e7eb;--soft:#9ca3af;--grid:#374151;--paper:#111827;--c0:#64748b;
--c1:#60a5fa;--c2:#34d399;--c3:#fbbf24;--c4:#a78bfa;--c5:#f87171}}
.chart text{fill:var(--ink)}.chart .soft{fill:var(--soft)}.chart .title{font-weight:600;font-size:13px}
.chart .grid{stroke:var(--grid)}.chart .paper{fill:var(--paper)}.chart .whisker{stroke:var(--ink);stroke-width:1.5}
""" + "".join(
    f".chart .f{i}{{fill:var(--c{i})}}.chart .s{i}{{stroke:var(--c{i});fill:none}}" for i in range(MAX_SERIES)
)


class Chart(Protocol):
    @property
    def title(self) -> str: ...

    def draw(self) -> tuple[list[str], float]:
        """-> elements of a picture that is WIDTH wide, and its height."""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class BarChart:
    """One bar a row, with a whisker from the lowest to the highest round. What the others are held against is gray."""

    title: str
    unit: str
    bars: Sequence[Bar]
    baselines: Sequence[int] = (0,)

    def draw(self) -> tuple[list[str], float]:
        most = max(*(bar.high for bar in self.bars), 0.0) or 1.0
        room = WIDTH - LABELS - 120
        parts = [_title(self.title, self.unit)]
        for index, bar in enumerate(self.bars):
            y, width = 40 + index * (BAR + GAP), room * bar.value / most
            color = BASELINE if index in self.baselines else ACCENT
            parts += [
                _text(LABELS - 8, y + 15, bar.label, anchor="end"),
                f'<rect class="f{color}" x="{LABELS}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}" rx="2"/>',
                _text(LABELS + room * max(bar.high, bar.value) / most + 8, y + 15, number(bar.value)),
            ]
            if bar.high > bar.low:
                x1, x2 = (LABELS + room * end / most for end in (bar.low, bar.high))
                parts.append(f'<line class="whisker" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y + 11}" y2="{y + 11}"/>')
        return parts, 40 + len(self.bars) * (BAR + GAP)


@dataclass(frozen=True, slots=True)
class StackedChart:
    """One bar a row, made of named parts: the first is the one that counts."""

    title: str
    unit: str
    parts: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]

    def draw(self) -> tuple[list[str], float]:
        most = max(sum(values) for _, values in self.bars) or 1.0
        room = WIDTH - LABELS - 120
        colors = (ACCENT, BASELINE, *range(2, MAX_SERIES))
        parts = [_title(self.title, self.unit), _legend(self.parts, colors, 40)]
        for index, (label, values) in enumerate(self.bars):
            x, y = float(LABELS), 62 + index * (BAR + GAP)
            parts.append(_text(LABELS - 8, y + 15, label, anchor="end"))
            for color, value in zip(colors, values, strict=False):
                width = room * value / most
                parts.append(f'<rect class="f{color}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>')
                x += width
            parts.append(_text(x + 8, y + 15, number(sum(values))))
        return parts, 62 + len(self.bars) * (BAR + GAP)


@dataclass(frozen=True, slots=True)
class LineChart:
    """Curves over a common axis."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False

    def draw(self) -> tuple[list[str], float]:
        points = [point for curve in self.series.values() for point in curve]
        xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
        left, right = min(xs), max(xs)
        ticks = log_ticks(min(ys), max(ys)) if self.log_y else even_ticks(max(ys))
        across = _axis(left, right, LEFT, WIDTH - RIGHT, self.log_x)
        up = _axis(ticks[0], ticks[-1], TOP + PLOT_HEIGHT, TOP, self.log_y)
        colors = [ACCENT] if len(self.series) == 1 else range(len(self.series))
        parts = [_title(self.title, self.y_label), _legend(list(self.series), colors, 40)]
        for tick in ticks:
            y = up(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(LEFT - 8, y + 4, number(tick), anchor="end", soft=True))
        for x, label in self._x_labels(xs, across):
            parts.append(_text(x, TOP + PLOT_HEIGHT + 18, label, anchor="middle", soft=True))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, TOP + PLOT_HEIGHT + 38, self.x_label, anchor="middle"))
        for color, curve in zip(colors, self.series.values(), strict=True):
            corners = [(across(x), up(y)) for x, y in curve]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            parts.append(f'<polyline class="s{color}" points="{line}" stroke-width="2" stroke-linejoin="round"/>')
            if len(corners) <= 24:
                parts += [f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in corners]
        return parts, TOP + PLOT_HEIGHT + BOTTOM

    def _x_labels(self, xs: Sequence[float], across: Callable[[float], float]) -> list[tuple[float, str]]:
        """Where points are, or at round numbers where there are many; none on top of the one before."""
        ticks = xs if len(xs) <= 12 else [tick for tick in even_ticks(xs[-1]) if xs[0] <= tick]
        labels: list[tuple[float, str]] = []
        for tick in ticks:
            if across(tick) <= WIDTH - RIGHT + 1 and (not labels or across(tick) - labels[-1][0] > 48):
                labels.append((across(tick), number(tick)))
        return labels


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Which sequence held which row when. A lane has spans of (start, end), in seconds."""

    title: str
    groups: Sequence[tuple[str, Sequence[Sequence[tuple[float, float]]]]]

    def draw(self) -> tuple[list[str], float]:
        last = max(end for _, lanes in self.groups for lane in lanes for _, end in lane)
        ticks = even_ticks(last)
        across = _axis(0.0, max(last, ticks[-1]), LEFT, WIDTH - RIGHT, False)
        parts, y, height = [_title(self.title, "seconds")], 44.0, 11
        for color, (name, lanes) in enumerate(self.groups):
            parts.append(_text(LEFT, y + 8, name))
            y += 14
            for lane in lanes:
                for start, end in lane:
                    place = f'x="{across(start):.1f}" width="{max(across(end) - across(start) - 1, 1):.1f}"'
                    parts.append(f'<rect class="f{color}" {place} y="{y:.0f}" height="9" rx="2"/>')
                y += height
            y += 10
        for tick in ticks:
            x = across(tick)
            parts.append(_text(x, y + 8, number(tick), anchor="middle", soft=True))
        return parts, y + 16


def svg(charts: Sequence[Chart], *, style: bool = True) -> str:
    """One picture, the charts below each other. Without `style` the page around it has the style."""
    parts, y = [], 8.0
    for chart in charts:
        drawn, height = chart.draw()
        parts.append(f'<g transform="translate(0,{y:.0f})">{"".join(drawn)}</g>')
        y += height + 18
    names = "; ".join(chart.title for chart in charts)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="{escape(names)}">'
    )
    css = f"<style>{STYLE}</style>" if style else ""
    return f'{head}{css}<rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>\n'


def number(value: float) -> str:
    """As short as it can be read."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    if abs(value) >= 0.01:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1g}"


def even_ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / count
    power = 10.0 ** floor(log10(raw))
    step = next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= raw)
    return [index * step for index in range(ceil(most / step - 1e-9) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Powers of ten around both."""
    low = floor(log10(max(least, 1e-9)))
    return [10.0**power for power in range(low, max(ceil(log10(max(most, 1e-9))), low + 1) + 1)]


def _axis(low: float, high: float, start: float, end: float, logarithmic: bool) -> Callable[[float], float]:
    """From a value to a place."""

    def scale(value: float) -> float:
        return log10(max(value, 1e-9)) if logarithmic else value

    span = scale(high) - scale(low) or 1.0
    return lambda value: start + (end - start) * (scale(value) - scale(low)) / span


def _title(title: str, unit: str) -> str:
    unit_part = f'<tspan class="soft" font-weight="400">{escape(unit)}</tspan>'
    return f'<text class="title" x="12" y="18">{escape(title)} {unit_part}</text>'


def _legend(names: Sequence[str], colors: Iterable[int], y: float) -> str:
    parts, x = [], float(LEFT)
    for color, name in zip(colors, names, strict=False):
        parts.append(f'<rect class="f{color}" x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" rx="2"/>')
        parts.append(_text(x + 15, y, name))
        x += 34 + 6.6 * len(name)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
