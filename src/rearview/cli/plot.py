"""The command plot: logged values as lines, in the terminal or in a file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rearview.cli.options import TakesRuns, open_history, some_names, some_runs
from rearview.cli.terminal import output
from rearview.cli.terminal.chart import COLORS, ChartLine, braille, frame_of, svg
from rearview.cli.terminal.progress import waiting
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview._history import History

INK = (output.CYAN, output.RED, output.GREEN, output.YELLOW)
"""Colours of lines on a terminal, in turn."""
LEGEND = 12
"""Lines that the legend in a terminal names; more are counted."""


@click.command(cls=TakesRuns)
@some_names(required=True)
@some_runs
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'epoch > 10'.")
@click.option(
    "-o", "--output", "destination", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write a picture instead: .svg, or .png if matplotlib is installed.",
)  # fmt: skip
def plot(
    names: tuple[str, ...], which: tuple[str, ...], where: str | None, destination: Path | None
) -> None:
    """Plot logged values, all runs in one picture, a line per run and name.

    Across is the loop that the values were logged in; for values of nested loops, how many had been
    logged before. Values that are no numbers are left out, and a line breaks at NaN.
    """
    if destination is not None and destination.suffix.lower() not in {".svg", ".png"}:
        raise click.BadParameter(
            f"{str(destination)!r} does not say how to draw it. End it with .svg or .png.",
            param_hint="--output",
        )
    past = open_history()
    with waiting("reading records"):
        lines, across = lines_of(past, names, where, list(which) or None)
    if frame_of(lines) is None:
        raise UsageError(
            f"There is nothing to plot: {', '.join(names)} has no numbers in these runs. "
            f"`rearview table {names[0]}` shows what there is.",
            slug="nothing-to-plot",
        )
    if destination is None:
        _draw(lines, across)
        return
    try:
        if destination.suffix.lower() == ".svg":
            destination.write_text(svg(lines, ", ".join(names), across), "utf-8")
        else:
            _png(lines, ", ".join(names), across, destination)
    except OSError as exc:
        raise UsageError(
            f"{destination} cannot be written: {exc.strerror or exc}. Name a file in a folder that is "
            "there and that you may write to.",
            slug="file-unwritable",
        ) from exc
    output.out(f"wrote {destination}")


def lines_of(
    past: History, names: Sequence[str], where: str | None, runs: list[str] | None
) -> tuple[list[ChartLine], str]:
    """Return a line per name and run, and what is across."""
    called = {run.id: run.name or run.id for run in past.runs()}
    out: list[ChartLine] = []
    labels: dict[str, None] = {}
    for name in names:
        table = past.table(name, where=where, runs=runs)
        column = next(c for c in reversed(table.columns) if c != table.mark)
        loops = table.columns[1 : table.columns.index(column)]
        across = loops[0] if len(loops) == 1 else ""
        lines: dict[str, ChartLine] = {}
        for row in table:
            value, x = row[column], row[across] if across else None
            if not isinstance(value, (int, float)):
                continue
            label = f"{name} {called[row['run']]}" if len(names) > 1 else called[row["run"]]
            line = lines.setdefault(row["run"], ChartLine(label, []))
            place = x if isinstance(x, (int, float)) else len(line.points)
            line.points.append((float(place), float(value)))
        out += [
            ChartLine(line.label, sorted(line.points, key=lambda p: p[0]))
            for line in lines.values()
        ]
        labels[across or "values logged"] = None
    return out, ", ".join(labels)


def _draw(lines: list[ChartLine], across: str) -> None:
    frame = frame_of(lines)
    assert frame is not None
    top, bottom = f"{frame.y1:.4g}", f"{frame.y0:.4g}"
    margin = max(len(top), len(bottom))
    width = max(20, min(output.width(), 120) - margin - 2)
    height = max(6, min(20, shutil.get_terminal_size((80, 24)).lines - 6))
    rows = braille(lines, width, height)
    for k, row in enumerate(rows):
        label = top if k == 0 else bottom if k == height - 1 else ""
        cells = [output.paint(c, INK[n % len(INK)]) if n >= 0 else c for c, n in row]
        output.out(f"{label:>{margin}} │{''.join(cells)}".rstrip())
    first, last = f"{frame.x0:.6g}", f"{frame.x1:.6g}"
    output.out(f"{'':>{margin}} └{'─' * width}")
    output.out(f"{'':>{margin}}  {first}{across:^{max(1, width - len(first) - len(last))}}{last}")
    for k, line in enumerate(lines[:LEGEND]):
        output.out(f"  {output.paint('━━', INK[k % len(INK)])} {line.label}")
    if len(lines) > LEGEND:
        output.out(f"  … and {len(lines) - LEGEND} more; `--runs` chooses, `-o plot.svg` shows all")


def _png(lines: list[ChartLine], title: str, across: str, file: Path) -> None:
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
    for k, line in enumerate(lines):
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, color=COLORS[k % len(COLORS)], label=line.label.replace("$", r"\$"))
    axes.set(title=title.replace("$", r"\$"), xlabel=across.replace("$", r"\$"))
    axes.legend()
    figure.savefig(file)
