"""Measured figures, engines side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

OURS = "quire"


@dataclass(slots=True)
class Row:
    """One figure of every engine, once a round."""

    name: str
    rounds: dict[str, list[float]] = field(default_factory=dict)  # engine -> figures
    less_is_better: bool = False
    per_unit: dict[str, float] = field(default_factory=dict)  # engine -> share of the ceiling that a figure of 1 is

    def add(self, engine: str, figure: float) -> None:
        self.rounds.setdefault(engine, []).append(figure)

    def median(self, engine: str) -> float:
        return statistics.median(self.rounds[engine])

    def lead(self, peer: str) -> float | None:
        """How many times better ours is than the peer's."""
        if OURS not in self.rounds or peer not in self.rounds:
            return None
        ours, theirs = self.median(OURS), self.median(peer)
        return theirs / ours if self.less_is_better else ours / theirs

    def cell(self, engine: str) -> str:
        """Median, lowest and highest."""
        if engine not in self.rounds:
            return "-"
        figures = self.rounds[engine]
        digits = _digits(self.median(engine))
        spread = f" ({min(figures):.{digits}f} - {max(figures):.{digits}f})" if len(figures) > 1 else ""
        return f"{self.median(engine):.{digits}f}{spread}"

    def share(self, engine: str) -> str:
        """Of the machine's ceiling, what the median is."""
        known = engine in self.rounds and engine in self.per_unit
        return f"{self.median(engine) * self.per_unit[engine]:.0%}" if known else ""


@dataclass(slots=True)
class Section:
    title: str
    rows: list[Row] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # share of the machine that was not idle before each round

    def row(self, name: str, *, less_is_better: bool = False) -> Row:
        """The row of that name, a new one if there is none yet."""
        for row in self.rows:
            if row.name == name:
                return row
        self.rows.append(Row(name, less_is_better=less_is_better))
        return self.rows[-1]


def render(sections: Sequence[Section], engines: Sequence[str]) -> str:
    """One table; behind the engines' columns, how many times better ours is than each peer."""
    peers = [engine for engine in engines if engine != OURS] if OURS in engines else []
    width = 5 if any(row.per_unit for section in sections for row in section.rows) else 0  # of the shares
    lines = [["", *(f"{engine}{'':{width}}" for engine in engines), *(f"{OURS} : {peer}" for peer in peers)]]
    for section in sections:
        lines += [[], [section.title]]
        for row in section.rows:
            leads = [row.lead(peer) for peer in peers]
            lines.append(
                [
                    f"  {row.name}",
                    *(f"{row.cell(engine)}{row.share(engine):>{width}}" for engine in engines),
                    *("-" if lead is None else f"{lead:.2f}x" for lead in leads),
                ]
            )
    widths = [max((len(line[i]) for line in lines if len(line) > max(i, 1)), default=0) for i in range(len(lines[0]))]
    return "\n".join(
        "".join(f"{word:{'<' if i == 0 else '>'}{widths[i] + (3 if i else 0)}}" for i, word in enumerate(line)).rstrip()
        for line in lines
    )


def _digits(figure: float) -> int:
    """Three figures that count."""
    return 0 if figure >= 100 else 1 if figure >= 10 else 2
