"""Plots of logged values as lines over the iterations of a loop, drawn as text (braille dots), SVG or PNG.

`rearview plot` and `History.plot` use this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rearview.errors import UsageError
from rearview.model.wording import plural, printable

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot in the code of a braille character: `_DOTS[column][row]`."""
_WIDE, _HIGH, _LEFT, _TOP, _BELOW = 800, 400, 80, 30, 50
"""Sizes of an SVG in pixels: width and height of the area of the lines, and its left, top and lower margin."""


class ChartLine(NamedTuple):
    """One line to draw: its label, and its points (x, y) sorted by x."""

    label: str
    points: list[tuple[float, float]]


class Frame(NamedTuple):
    """The rectangle that a plot shows: its least and greatest x, its least and greatest y."""

    x0: float
    x1: float
    y0: float
    y1: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return (across, down) of the point (x, y): its position in the frame, each from 0 (left, top) to 1."""
        return _fraction(x, self.x0, self.x1), 1 - _fraction(y, self.y0, self.y1)


def frame_of(lines: Sequence[ChartLine]) -> Frame | None:
    """Return the smallest frame around all points with finite x and y, or None if there is no such point."""
    finite = [point for line in lines for point in line.points if all(map(math.isfinite, point))]
    if not finite:
        return None
    xs, ys = zip(*finite, strict=True)
    return Frame(*_widened(min(xs), max(xs)), *_widened(min(ys), max(ys)))


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return (low, high), or an interval around `low` if `low` equals `high`."""
    if high > low:
        return low, high
    reach = abs(low) / 2 or 1.0
    if math.isfinite(low - reach) and math.isfinite(high + reach):
        return low - reach, high + reach
    return min(low, low / 2), max(low, low / 2)


def _fraction(value: float, low: float, high: float) -> float:
    """Return the position of `value` between `low` (0) and `high` (1), even if `high - low` overflows."""
    if math.isfinite(high - low):
        return (value - low) / (high - low)
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def braille(lines: Sequence[ChartLine], width: int, height: int) -> list[list[tuple[str, int]]]:
    """Return a plot of the lines as `height` rows of `width` pairs (braille character, number of its line).

    A pair without a line is (" ", -1).

    >>> rows = braille([ChartLine("a", [(0, 0), (1, 1)])], 2, 1)
    >>> "".join(char for char, _ in rows[0])
    '⡠⠊'
    """
    cells = [[(0, -1)] * width for _ in range(height)]
    frame = frame_of(lines)
    if frame is not None:
        for number, line in enumerate(lines):
            for x, y in _dots(line, frame, width * 2 - 1, height * 4 - 1):
                bits, _ = cells[y // 4][x // 2]
                cells[y // 4][x // 2] = (bits | _DOTS[x % 2][y % 4], number)
    return [[(chr(0x2800 + bits) if bits else " ", n) for bits, n in row] for row in cells]


def _dots(line: ChartLine, frame: Frame, right: int, bottom: int) -> set[tuple[int, int]]:
    """Return the (column, row) of each braille dot on a line; the line is interrupted at values that are not finite.

    `right` and `bottom` are the last column and row.
    """
    out: set[tuple[int, int]] = set()
    previous_dot: tuple[int, int] | None = None
    for x, y in line.points:
        if not (math.isfinite(x) and math.isfinite(y)):
            previous_dot = None
            continue
        across, down = frame.at(x, y)
        dot = (round(across * right), round(down * bottom))
        start = previous_dot or dot
        steps = max(abs(dot[0] - start[0]), abs(dot[1] - start[1]), 1)
        for k in range(steps + 1):
            out.add(
                (
                    round(start[0] + (dot[0] - start[0]) * k / steps),
                    round(start[1] + (dot[1] - start[1]) * k / steps),
                )
            )
        previous_dot = dot
    return out


def svg(lines: Sequence[ChartLine], title: str, x_label: str) -> str:
    """Return a picture of the lines with axes and a legend, as the text of an SVG file."""
    frame = frame_of(lines) or Frame(0, 1, 0, 1)
    high = _TOP + _HIGH + _BELOW + 20 * len(lines)
    wide = _LEFT + _WIDE + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">'
    )
    out = [
        head,
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{_text(title)}</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDE}" height="{_HIGH}" fill="none" stroke="#999"/>',
    ]
    for k in range(5):
        x, y = _LEFT + _WIDE * k / 4, _TOP + _HIGH * (4 - k) / 4
        at_x = frame.x0 * (1 - k / 4) + frame.x1 * (k / 4)
        at_y = frame.y0 * (1 - k / 4) + frame.y1 * (k / 4)
        out += [
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y:g}" y2="{y:g}" stroke="#eee"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{at_y:.4g}</text>',
            f'<text x="{x:g}" y="{_TOP + _HIGH + 16}" text-anchor="middle">{at_x:.4g}</text>',
        ]
    middle = _LEFT + _WIDE / 2
    out.append(
        f'<text x="{middle:g}" y="{_TOP + _HIGH + 34}" text-anchor="middle">{_text(x_label)}</text>'
    )
    for k, line in enumerate(lines):
        color = COLORS[k % len(COLORS)]
        for piece in _unbroken_parts(line):
            places = [frame.at(x, y) for x, y in piece]
            points = " ".join(f"{_LEFT + x * _WIDE:.2f},{_TOP + y * _HIGH:.2f}" for x, y in places)
            if len(piece) == 1:
                across, down = points.split(",")
                out.append(f'<circle cx="{across}" cy="{down}" r="3" fill="{color}"/>')
            else:
                out.append(
                    f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
                )
        y = _TOP + _HIGH + _BELOW + 20 * k
        out += [
            f'<rect x="{_LEFT}" y="{y}" width="18" height="4" fill="{color}"/>',
            f'<text x="{_LEFT + 26}" y="{y + 6}">{_text(line.label)}</text>',
        ]
    return "\n".join([*out, "</svg>\n"])


def _unbroken_parts(line: ChartLine) -> list[list[tuple[float, float]]]:
    """Return the points of a line, as one list per part of the line between values that are not finite."""
    out: list[list[tuple[float, float]]] = [[]]
    for point in line.points:
        if all(map(math.isfinite, point)):
            out[-1].append(point)
        else:
            out.append([])
    return [piece for piece in out if piece]


def _text(text: str) -> str:
    return escape(printable(text, line=True))


class PlottableHistory(Protocol):
    """The two methods of `History` that a plot needs."""

    def runs(self) -> Any:
        """Return all runs."""

    def table(self, *names: str, where: str | None, runs: Sequence[str] | None) -> Any:
        """Return a table of `names` with one row per point."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Logged values of `names` as lines to draw; a notebook shows a Plot as a picture."""

    names: tuple[str, ...]
    lines: tuple[ChartLine, ...]
    across: str
    """The label of the x axis: the name of the loop, or "values logged" if the values are in no or several loops."""

    def __repr__(self) -> str:
        points = sum(len(line.points) for line in self.lines)
        return f"<Plot of {', '.join(self.names)}: {plural(len(self.lines), 'line')}, {plural(points, 'point')}>"

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """Return the picture as SVG."""
        return svg(self.lines, ", ".join(self.names), self.across)

    def save(self, file: Path | str) -> Path:
        """Write the picture to `file` and return its path. The name ends in .svg, or in .png (needs matplotlib)."""
        file = Path(file)
        if file.suffix.lower() not in {".svg", ".png"}:
            raise UsageError(
                f"{str(file)!r} does not say how to draw it. End it with .svg or .png.",
                slug="usage",
            )
        try:
            if file.suffix.lower() == ".svg":
                file.write_text(self.svg(), "utf-8")
            else:
                self._png(file)
        except OSError as exc:
            raise UsageError(
                f"{file} cannot be written: {exc.strerror or exc}. Name a file in an existing folder "
                "that you may write to.",
                slug="file-unwritable",
            ) from exc
        return file

    def _png(self, file: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise UsageError(
                "matplotlib is not installed, so there is no PNG. Write a `.svg` instead, or install it "
                "with `pip install matplotlib`.",
                slug="missing-library",
            ) from exc
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        for k, line in enumerate(self.lines):
            xs, ys = zip(*line.points, strict=True)
            axes.plot(xs, ys, color=COLORS[k % len(COLORS)], label=line.label.replace("$", r"\$"))
        title = ", ".join(self.names).replace("$", r"\$")
        axes.set(title=title, xlabel=self.across.replace("$", r"\$"))
        axes.legend()
        figure.savefig(file)


def plot_of(
    history: PlottableHistory,
    names: Sequence[str],
    *,
    where: str | None = None,
    runs: Sequence[str] | None = None,
    by: str | None = None,
) -> Plot:
    """Return a plot of `names` with one line per run.

    If `by` is the name of an argument, there is one line per value of the argument: the mean of its runs.
    """
    all_runs = history.runs()
    label_of_run = {run.id: run.name or run.id for run in all_runs}
    if by is not None:
        if not any(by in run.args for run in all_runs):
            arguments = sorted({name for run in all_runs for name in run.args})
            raise UsageError(
                f"No run has an argument {by!r}. There are {', '.join(arguments) or 'none'}.",
                slug="unknown-name",
            )
        label_of_run = {run.id: f"{by}={run.args.get(by)}" for run in all_runs}
    out: list[ChartLine] = []
    labels: dict[str, None] = {}
    for name in names:
        table = history.table(name, where=where, runs=runs)
        column = next(c for c in reversed(table.columns) if c != table.mark)
        loops = table.columns[1 : table.columns.index(column)]
        across = loops[0] if len(loops) == 1 else ""
        row_counts: dict[str, int] = {}
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in table:
            value, x, run = row[column], row[across] if across else None, row["run"]
            if not isinstance(value, (int, float)):
                continue
            count = row_counts[run] = row_counts.get(run, -1) + 1
            place = float(x) if isinstance(x, (int, float)) else float(count)
            key = run if by is None else label_of_run[run]
            lines.setdefault(key, []).append((place, float(value)))
        for key, points in lines.items():
            label = label_of_run.get(key, key)
            label = f"{name} {label}" if len(names) > 1 else label
            sorted_points = sorted(points if by is None else _means(points), key=lambda p: p[0])
            out.append(ChartLine(label, sorted_points))
        labels[across or "values logged"] = None
    if frame_of(out) is None:
        raise UsageError(
            f"There is nothing to plot: {', '.join(names)} has no numbers in these runs. "
            f"`rearview table {names[0] if names else ''}` shows their values.",
            slug="nothing-to-plot",
        )
    return Plot(tuple(names), tuple(out), ", ".join(labels))


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (x, mean of the values at x) for each different x in `points`.

    >>> _means([(0.0, 1.0), (1.0, 5.0), (0.0, 3.0)])
    [(0.0, 2.0), (1.0, 5.0)]
    """
    values_by_x: dict[float, list[float]] = {}
    for x, y in points:
        values_by_x.setdefault(x, []).append(y)
    return [(x, sum(values) / len(values)) for x, values in values_by_x.items()]
