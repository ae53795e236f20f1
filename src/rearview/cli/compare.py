"""The command compare: two runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview.cli import formats, show
from rearview.cli.options import TakesRuns, a_run, asked, complete_run, json_option
from rearview.cli.progress import waiting

if TYPE_CHECKING:
    from rearview.past.comparing import Comparison, Row


@click.command(cls=TakesRuns)
@click.argument("a", metavar="A", type=a_run, shell_complete=complete_run)
@click.argument("b", metavar="[B]", default="latest", type=a_run, shell_complete=complete_run)
@click.option("--all", "every", is_flag=True, help="Also what is the same in both.")
@json_option
def compare(a: str, b: str, every: bool, as_json: bool) -> int:
    """Compare two runs: arguments, results, source, environment.

    From run A to run B (the newest). Results are the last values logged. Only what differs is shown,
    and results in any case; `rearview diff A B` shows the lines of the source. Exit code 0: they are
    alike in all of it, 1: they differ.
    """
    with waiting("comparing", quiet=as_json):
        found = asked().compare(a, b)
    if as_json:
        show.json_document(
            {
                "a": found.a.id,
                "b": found.b.id,
                **{
                    part: [{**row._asdict(), "differs": row.differs} for row in rows]
                    for part, rows in _parts(found).items()
                },
            }
        )
    else:
        _print(found, every=every)
    return 1 if any(row.differs for rows in _parts(found).values() for row in rows) else 0


def _parts(found: Comparison) -> dict[str, list[Row]]:
    return {
        "arguments": found.arguments,
        "results": found.results,
        "source": found.source,
        "environment": found.environment,
    }


def _print(found: Comparison, *, every: bool) -> None:
    columns = ["", found.a.name or found.a.id, found.b.name or found.b.id]
    rows: list[list[str]] = []
    same: list[str] = []
    for part, all_rows in _parts(found).items():
        chosen = [row for row in all_rows if every or row.differs or part == "results"]
        if len(chosen) < len(all_rows) or not all_rows:
            same.append(f"{len(all_rows) - len(chosen)} of {part}" if all_rows else part)
        if not chosen:
            continue
        rows.append([part, "", ""])
        for row in chosen:
            cells = [_content(row, k) if part == "source" else formats.cell(row[k]) for k in (1, 2)]
            rows.append([f"  {row.name}", *cells])
    room = show.room(3)
    longest = max((len(row[0]) for row in rows), default=0)
    each = max(12, (room - min(longest, 30)) // 2)
    rows = [[_cut(row[0], 30), _cut(row[1], each), _cut(row[2], each)] for row in rows]
    show.table([_cut(name, each) for name in columns], rows, right=[False] * 3)
    if same and not every:
        show.note(f"The same in both: {', '.join(same)}. `--all` shows them.")


def _content(row: Row, side: int) -> str:
    """Return what a run had of a file: the beginning of git's name of it."""
    return row[side][:10] if row[side] else "(no such file)"


def _cut(text: str, most: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= most else text[: most - 1] + "…"
