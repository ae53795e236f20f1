"""The command that shows where a statement goes in past versions: propagate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview.cli import show
from rearview.cli.options import (
    TakesRuns,
    a_run,
    asked,
    complete_run,
    json_option,
    pair,
    some_names,
)

if TYPE_CHECKING:
    from rearview.past import Correction, History, Propagated


@click.command(cls=TakesRuns)
@some_names(required=False)
@click.option(
    "--to",
    "which",
    metavar="RUN",
    type=a_run,
    multiple=True,
    shell_complete=complete_run,
    help="Only the versions of these runs; may be repeated.",
)
@click.option("--explain", is_flag=True, help="Say why each place was chosen.")
@click.option(
    "--correct",
    nargs=2,
    metavar="RUN FILE:LINE",
    help="Put the statement before that line in the version of RUN; its neighbours follow.",
)
@click.option("--after", is_flag=True, help="With --correct: behind the statement on that line.")
@click.option(
    "--rename",
    "renames",
    metavar="NEW=OLD",
    type=pair,
    multiple=True,
    help="With --correct: what a variable is called in that version; may be repeated.",
)
@click.option(
    "--statement",
    metavar="FILE:LINE",
    help="With --correct: the statement of the work tree, where several log the name.",
)
@click.option("--corrections", is_flag=True, help="List the places given by hand.")
@click.option(
    "--undo",
    metavar="RUN",
    type=a_run,
    shell_complete=complete_run,
    help="Forget the places given by hand in the version of RUN.",
)
@json_option
def propagate(
    *,
    names: tuple[str, ...],
    which: tuple[str, ...],
    explain: bool,
    correct: tuple[str, str] | None,
    after: bool,
    renames: tuple[tuple[str, str], ...],
    statement: str | None,
    corrections: bool,
    undo: str | None,
    as_json: bool,
) -> int:
    """Show where the statements that log NAMES go in past versions.

    For each version the diff that a backfill would apply, or why there is no certain place.
    Nothing runs and no file changes. Exit code 0: all have a place; 1: some are refused.

    A correction is a place for the statement that logs a name: it stays when you change the
    statement, and serves no other name. `--corrections` and `--undo` work with or without NAMES;
    exit code 1: there is nothing to undo.
    """
    past = asked()
    if correct is None and (after or renames or statement):
        raise click.UsageError("--after, --rename and --statement belong to --correct.")
    if past.correction_note:
        show.note(past.correction_note)
    if undo is not None:
        return _undone(past, undo, names, as_json=as_json)
    if corrections:
        kept = past.corrections(names)
        if as_json:
            show.json_document(kept)
        elif not kept:
            show.note("No place was given by hand.")
        for one in () if as_json else kept:
            show.out(_corrected(one))
        return 0
    if not names:
        raise click.UsageError("Name what the statements log, like `rearview propagate loss`.")
    if correct is not None:
        run, place = correct
        path, line = _spot(place)
        where = _spot(statement) if statement is not None else None
        past.correct(
            *(a_run(run), path, line, names),
            after=after,
            renames=dict(renames),
            statement=where,
        )
    found = past.propagate(list(names), to=list(which) or None)
    if as_json:
        show.json_document(found)
    else:
        for each in found:
            _version(each, explain=explain)
    return 1 if any(each.reason for each in found) else 0


def _spot(text: str) -> tuple[str, int]:
    path, _, line = text.rpartition(":")
    if not path or not line.isdecimal():
        raise click.UsageError(f"{text!r} is not FILE:LINE, like train.py:31.")
    return path, int(line)


def _undone(past: History, run: str, names: tuple[str, ...], *, as_json: bool) -> int:
    gone = past.undo(run, names)
    if as_json:
        show.json_document(gone)
    elif not gone:
        show.note(f"No place was given by hand in the version of run {run}.")
    for one in () if as_json else gone:
        show.out(f"undone: {_corrected(one)}")
    return 0 if gone else 1


def _corrected(one: Correction) -> str:
    """Return a correction as one line."""
    what = ", ".join(one.statement.logs or one.statement.sets)
    which = f" ({one.statement.occurrence + 1})" if one.statement.occurrence else ""
    side = "behind" if one.after else "before"
    renamed = "".join(f", {new} is {old}" for new, old in one.renames.items())
    head = show.paint(f"version {one.version[:12]}", show.BOLD)
    run = f" ({one.run})" if one.run else ""
    return f"{head}{run}: {what}{which} {side} {one.path}:{one.line}{renamed}"


def _version(one: Propagated, *, explain: bool) -> None:
    runs = ", ".join(one.runs[:3]) + (f" and {len(one.runs) - 3} more" if len(one.runs) > 3 else "")
    head = show.paint(f"version {one.version[:12]}", show.BOLD)
    if one.reason:
        show.out(f"{head} ({runs}): {show.paint('refused', show.RED)}: {one.reason}")
    else:
        show.out(f"{head} ({runs}): {one.confidence:.0%} sure")
        show.diff(one.diff)
    if explain:
        for reason in one.reasons:
            show.out(f"  {reason}")
