"""Commands about logged values: table, sql, plot."""

from __future__ import annotations

import shlex
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview._history.text_and_svg_plots import ChartLine, braille, frame_of, plot_of
from rearview.cli.options import (
    TakesRuns,
    names_argument,
    open_history,
    order_option,
    runs_option,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, plural
from rearview.cli.terminal.progress import waiting
from rearview.errors import RearviewError

if TYPE_CHECKING:
    from rearview._history import History, Table

SCREEN = 200
"""Maximum number of rows that a table on the terminal shows; a note gives the number of further rows."""
CAPTURED = 8
"""Maximum number of captured columns (values not logged with Rearview) per origin that are named below a table."""
SIGN = "*"
"""Sign printed after a value that could not be proved."""
FILLED_SIGN = "~"
"""Sign printed after a value that was interpolated."""
LEGENDS = {
    SIGN: f"{SIGN} unproved: the run recorded nothing to compare it with, or its replay did not end",
    FILLED_SIGN: f"{FILLED_SIGN} interpolated: never logged, computed from the values before and after it",
}


def _unproved_option(command: Any) -> Any:
    return click.option(
        "--unproved",
        is_flag=True,
        help="Also show values of replays that were found not to be exact.",
    )(command)


def _format_option(command: Any) -> Any:
    return click.option(
        "-f",
        "--format",
        "form",
        type=click.Choice(output.FORMATS),
        default="table",
        help="json and csv keep every digit; table and markdown are for people.",
    )(command)


@click.command(cls=TakesRuns)
@names_argument(required=False)
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'acc < 0.9'.")
@runs_option
@order_option
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many rows.")
@click.option(
    "--interpolate",
    is_flag=True,
    help="Fill in numbers that are missing between two known ones, marked with ~.",
)
@_unproved_option
@_format_option
def table(
    *,
    names: tuple[str, ...],
    where: str | None,
    which: tuple[str, ...],
    order: tuple[str, ...],
    limit: int | None,
    interpolate: bool,
    unproved: bool,
    form: str,
) -> None:
    """Show logged values, one row per point, in the order they were logged.

    Columns are the run, one per loop, one per name; without NAMES, all of them. A name that the
    newest source logs but that has no values yet is an empty column; if it was named, how many
    cells are missing and what they cost follows on stderr. `rearview backfill` fills it.
    JSON has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity".

    Values of replays that were not exact are left out. Those that could not be proved carry a `*`;
    in csv and json the column `unproved` names them.

    --order-by takes columns separated by commas, each followed by desc if large values come first:
    `--order-by "acc desc, epoch"`. Names, loops, arguments and facts of runs will do, also those that
    are not shown. Rows without a value come last; with --limit, the first rows of that order are shown.

    --interpolate fills numbers that are missing between two known ones of the same run and loop, on a
    straight line by iterations; nothing is filled before the first or after the last. They carry a `~`;
    in csv and json the column `interpolated` names them. --where and --order-by see them.
    """
    history = open_history()
    run_ids = list(which) or None
    with waiting("reading records"):
        answer = history.table(
            *names,
            where=where,
            runs=run_ids,
            limit=limit,
            order=order or None,
            unproved=unproved,
            interpolate=interpolate,
        )
    print_table(answer, form)
    print_damage(history)
    if form == "table":
        _print_captured(history, answer.columns, every=not names)
        for name in history.empty(names):
            _print_missing(history, name, where, run_ids)


def _print_captured(history: History, columns: list[str], *, every: bool) -> None:
    """Print which of `columns` have captured values, that is, values that were not logged with Rearview.

    With `every`, also print which captured columns are not among `columns`.
    """
    captured = history.captured()
    by_origin: dict[str, list[str]] = {}
    for name in columns:
        if name in captured:
            by_origin.setdefault(str(captured[name]), []).append(name)
    if by_origin:
        texts = [f"{', '.join(names[:CAPTURED])} ({origin})" for origin, names in by_origin.items()]
        output.note(f"captured: {'; '.join(texts)}")
    not_shown = [name for name in captured if name not in columns] if every else []
    if not_shown:
        more = ", …" if len(not_shown) > CAPTURED else ""
        output.note(
            f"also captured: {', '.join(not_shown[:CAPTURED])}{more}; name them to see them"
        )


def _print_missing(history: History, name: str, where: str | None, which: list[str] | None) -> None:
    """Print how many cells of the empty column `name` a backfill can fill, and its cost."""
    try:
        with waiting("counting what is missing"):
            plan = history.plan([name], where=where, runs=which)
    except RearviewError as exc:
        output.note(f"{name}: no values yet, and none can be filled: {exc}")
        return
    refused = f"; {plural(len(plan.refusals), 'run')} refused" if plan.refusals else ""
    if plan.nothing:
        output.note(f"{name}: no values yet{refused}.")
        return
    output.note(
        f"{name}: {plan.missing} missing, about {duration(plan.plan.seconds)} of "
        f"computing to fill{refused}: `rearview backfill {shlex.quote(name)}`."
    )


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="QUERY")
@_unproved_option
@_format_option
def sql(words: tuple[str, ...], unproved: bool, form: str) -> None:
    """Ask the records and runs in SQL.

    DuckDB's dialect. The tables are described in docs/schema.md: `rearview sql "select run,
    max(acc) from full_pivot group by run"`. EXPLAIN, DESCRIBE, SHOW and SUMMARIZE work too;
    nothing can be written.
    """
    history = open_history()
    query = " ".join(words)  # several words if the user did not quote the query
    with waiting("asking"):
        answer = history.sql(query, unproved=unproved)
    print_table(answer, form)
    print_damage(history)


def print_damage(history: History) -> None:
    """Print on stderr which files are damaged, so that their values are not in the answer."""
    for text in history.problems():
        output.note(f"damaged: {text}")


class Marks:
    """Adds signs to unproved and interpolated values, row by row, and collects the names with such values."""

    def __init__(self, table: Table) -> None:
        sign_columns = {SIGN: table.mark, FILLED_SIGN: table.interpolated}
        self.columns = {sign: column for sign, column in sign_columns.items() if column}
        """Sign -> column of the table that lists, in each row, the names whose values get the sign."""
        self.names: dict[str, set[str]] = {sign: set() for sign in self.columns}
        """Sign -> names of which a value got the sign in the rows so far."""

    @property
    def legends(self) -> list[str]:
        """The explanation of each sign that occurred in the rows so far."""
        return [LEGENDS[sign] for sign, names in self.names.items() if names]

    def collect(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return `row` unchanged, and add to `self.names` the names whose values get signs in this row."""
        for sign, column in self.columns.items():
            self.names[sign].update(filter(None, (row[column] or "").split(", ")))
        return row

    def with_signs(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return `row` for display: with signs after values, and without the columns that list names."""
        self.collect(row)
        out = {name: row[name] for name in row if name not in self.columns.values()}
        for sign, column in self.columns.items():
            for name in filter(None, (row[column] or "").split(", ")):
                out[name] = f"{output.cell(out[name])}{sign}"
        return out


def _print_unproved(table: Table, marks: Marks) -> None:
    """Print on stderr the names with values in `table` that are not proved; print nothing if there are none."""
    names = sorted(marks.names[SIGN]) if table.mark else table.unproved
    if names:
        certainty = "are" if table.mark else "may be"
        output.note(
            f"unproved: values of {', '.join(names)} {certainty} among these that were not found equal to "
            "the run; `rearview show` says why, `rearview backfill --again` runs them again."
        )


def print_table(table: Table, form: str) -> None:
    """Print a table in one of `output.FORMATS`."""
    columns = list(table.columns)
    marks = Marks(table)
    rows = (tuple(row.values()) for row in map(marks.collect, table.described()))
    if form != "table":
        if form == "markdown":
            columns = [column for column in columns if column not in marks.columns.values()]
            rows = (tuple(row.values()) for row in map(marks.with_signs, table.described()))
        lines = {
            "json": output.json_lines,
            "csv": output.csv_lines,
            "markdown": output.markdown_lines,
        }[form]
        say = output.out if form == "markdown" else output.data
        for line in lines(columns, rows):
            say(line)
        if form == "markdown" and marks.legends:
            output.out("\n" + "\n".join(marks.legends))
        _print_unproved(table, marks)
        return
    if columns == ["explain_key", "explain_value"]:  # an EXPLAIN: print its text without a table
        for _, plan in rows:
            output.out(plan)
        return
    all_rows = table.described()
    first = list(islice(all_rows, SCREEN))
    columns = [column for column in columns if column not in marks.columns.values()]
    head = [[row[column] for column in columns] for row in first]
    right = [output.numeric(column) for column in zip(*head, strict=True)] if head else []
    cells = [
        [output.cell(value) for column, value in marks.with_signs(row).items()] for row in first
    ]
    output.table(columns, cells, right=right or [False] * len(columns))
    for legend in marks.legends:
        output.out(legend)
    more = sum(1 for _ in map(marks.collect, all_rows))
    _print_unproved(table, marks)
    if more:
        output.note(
            f"… and {plural(more, 'row')} more. Narrow it with --where or --runs, "
            "or take all of it with --format csv."
        )
    elif not head:
        output.note("No rows.")


INK = (output.CYAN, output.RED, output.GREEN, output.YELLOW)
"""Colours of the lines on a terminal, in order."""
LEGEND = 12
"""Maximum number of lines that the legend on a terminal names; then follows the number of further lines."""


@click.command(cls=TakesRuns)
@names_argument(required=True)
@runs_option
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

    With --by, there is a line per value of an argument: the mean of the runs with this value.

    The horizontal axis is the loop in which the values were logged; for values of nested loops, it is the
    number of values logged before. Values that are not numbers are left out, and a line breaks at NaN.
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
