"""What a comparison gives: rows of figures, charts, one sentence, and what was held fixed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from quire.cli.bench.compare.charts import Bar, Chart


@dataclass(frozen=True, slots=True)
class Figure:
    """What the rounds gave, in their order."""

    rounds: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Figure":
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "rounds": list(self.rounds)}


Cell = Figure | float | int | str | None
Row = dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    label: str
    digits: int = 0  # after the point


@dataclass(slots=True, kw_only=True)
class Result:
    """One comparison, done. The first column names a row."""

    title: str
    columns: Sequence[Column]
    rows: list[Row]
    conclusion: str
    held_fixed: str
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    computed: bool = False  # nothing was timed
    rounds: int = 0
    name: str = ""  # as the command line has it; the command fills in this and what follows
    command: str = ""
    seconds: float = 0.0
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        rows = [
            {key: cell.as_json() if isinstance(cell, Figure) else cell for key, cell in row.items()}
            for row in self.rows
        ]
        return {
            "comparison": self.name,
            "title": self.title,
            "conclusion": self.conclusion,
            "held_fixed": self.held_fixed,
            "computed": self.computed,
            "rounds": self.rounds,
            "interrupted": self.interrupted,
            "rows": rows,
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
            "command": self.command,
        }

    def as_text(self) -> str:
        how = "computed" if self.computed else f"measured, {counted(self.rounds, 'round')}: median (lowest - highest)"
        lines = [f"{self.title} ({how})", "", *_table(self.cells()), "", self.conclusion]
        lines += [f"held fixed: {self.held_fixed}", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)

    def cells(self) -> list[list[str]]:
        """The table as texts, labels first."""
        head = [column.label for column in self.columns]
        return [head, *([as_text(row.get(c.key), c.digits) for c in self.columns] for row in self.rows)]


def as_text(cell: Cell, digits: int) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Figure):
        middle, low, high = (f"{value:,.{digits}f}" for value in (cell.median, cell.low, cell.high))
        return middle if low == high else f"{middle} ({low} - {high})"
    return f"{cell:,.{digits}f}"


def value(row: Row, key: str) -> float:
    """A figure of a row as one number."""
    cell = row[key]
    assert isinstance(cell, Figure | float | int), key
    return cell.median if isinstance(cell, Figure) else cell


def bars(rows: Sequence[Row], key: str, label: str = "side") -> list[Bar]:
    """One bar a row; rows without this figure have none."""
    drawn = []
    for row in rows:
        cell = row[key]
        if isinstance(cell, Figure):
            drawn.append(Bar(str(row[label]), cell.median, cell.low, cell.high))
        elif isinstance(cell, float | int):
            drawn.append(Bar(str(row[label]), cell, cell, cell))
    return drawn


def ratio(one: Cell, other: Cell) -> Figure:
    """Round by round: the two sides of a round ran next to each other, so what slows the machine slows both."""
    assert isinstance(one, Figure | float | int) and isinstance(other, Figure | float | int)
    if isinstance(one, Figure) and isinstance(other, Figure):
        return Figure.of(a / b for a, b in zip(one.rounds, other.rounds, strict=True))
    a, b = (side.median if isinstance(side, Figure) else side for side in (one, other))
    return Figure.of([a / b])


def doubt(*pairs: tuple[Cell, Cell]) -> str:
    """A warning behind a conclusion where not all rounds agree on which side is greater."""
    for one, other in pairs:
        factor = ratio(one, other)
        if factor.low <= 1 <= factor.high:
            return " (the rounds do not agree on which is greater: give more --repeats)"
    return ""


def times(larger: Cell, smaller: Cell) -> str:
    """A factor as it is read: 1.58, 12, 340."""
    factor = ratio(larger, smaller).median
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2f}"


def _table(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, figures to the right."""
    padded = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
    return [f"{row[0]:<{widths[0]}}", *padded[1:]]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
