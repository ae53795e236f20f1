"""Logged values as lines over a loop: what `rearview plot` and `History.plot` draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rearview._history.chart import COLORS, ChartLine, frame_of, svg
from rearview.errors import UsageError
from rearview.model.wording import plural


class PlottableHistory(Protocol):
    """The two methods of `History` that a plot needs."""

    def runs(self) -> Any:
        """Return all runs."""

    def table(self, *names: str, where: str | None, runs: Sequence[str] | None) -> Any:
        """Return one row per point."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over a loop; a notebook shows them as a picture."""

    names: tuple[str, ...]
    lines: tuple[ChartLine, ...]
    across: str
    """The label of the x axis: the loop, or "values logged"."""

    def __repr__(self) -> str:
        points = sum(len(line.points) for line in self.lines)
        return f"<Plot of {', '.join(self.names)}: {plural(len(self.lines), 'line')}, {plural(points, 'point')}>"

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """Return the picture as SVG."""
        return svg(self.lines, ", ".join(self.names), self.across)

    def save(self, file: Path | str) -> Path:
        """Write the picture to a file that ends in .svg, or in .png if matplotlib is installed."""
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
    past: PlottableHistory,
    names: Sequence[str],
    *,
    where: str | None = None,
    runs: Sequence[str] | None = None,
    by: str | None = None,
) -> Plot:
    """Return the lines of `names`: one per run, or one per value of the argument `by`, a mean of runs."""
    all_runs = past.runs()
    label_of_run = {run.id: run.name or run.id for run in all_runs}
    if by is not None:
        if not any(by in run.args for run in all_runs):
            some = sorted({name for run in all_runs for name in run.args})
            raise UsageError(
                f"No run has an argument {by!r}. There are {', '.join(some) or 'none'}.",
                slug="unknown-name",
            )
        label_of_run = {run.id: f"{by}={run.args.get(by)}" for run in all_runs}
    out: list[ChartLine] = []
    labels: dict[str, None] = {}
    for name in names:
        table = past.table(name, where=where, runs=runs)
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
            f"`rearview table {names[0] if names else ''}` shows what there is.",
            slug="nothing-to-plot",
        )
    return Plot(tuple(names), tuple(out), ", ".join(labels))


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean of the values at each place.

    >>> _means([(0.0, 1.0), (1.0, 5.0), (0.0, 3.0)])
    [(0.0, 2.0), (1.0, 5.0)]
    """
    at: dict[float, list[float]] = {}
    for x, y in points:
        at.setdefault(x, []).append(y)
    return [(x, sum(values) / len(values)) for x, values in at.items()]
