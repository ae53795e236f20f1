"""The command plot: logged values as lines, in the terminal or in a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from rearview._history.chart import ChartLine, braille, frame_of
from rearview._history.plots import plot_of
from rearview.cli.options import TakesRuns, open_history, some_names, some_runs
from rearview.cli.terminal import output
from rearview.cli.terminal.progress import waiting

INK = (output.CYAN, output.RED, output.GREEN, output.YELLOW)
"""Colours of the lines on a terminal, in order."""
LEGEND = 12
"""Lines that the legend in a terminal names; more are counted."""


@click.command(cls=TakesRuns)
@some_names(required=True)
@some_runs
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'epoch > 10'.")
@click.option(
    "--by", metavar="ARG", help="One line per value of this argument: the mean of its runs."
)
@click.option(
    "-o", "--output", "destination", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write a picture instead: .svg, or .png if matplotlib is installed.",
)  # fmt: skip
def plot(
    names: tuple[str, ...],
    which: tuple[str, ...],
    where: str | None,
    by: str | None,
    destination: Path | None,
) -> None:
    """Plot logged values, all runs in one picture, a line per run and name.

    With --by, a line per value of an argument: the mean of its runs.

    Across is the loop that the values were logged in; for values of nested loops, how many had been
    logged before. Values that are no numbers are left out, and a line breaks at NaN.
    """
    if destination is not None and destination.suffix.lower() not in {".svg", ".png"}:
        raise click.BadParameter(
            f"{str(destination)!r} does not say how to draw it. End it with .svg or .png.",
            param_hint="--output",
        )
    with waiting("reading records"):
        picture = plot_of(open_history(), names, where=where, runs=list(which) or None, by=by)
    if destination is None:
        _draw(list(picture.lines), picture.across)
        return
    output.out(f"wrote {picture.save(destination)}")


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
