"""Commands about source: inspect (whether Rearview works on a script), propagate (statements in old versions), diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    names_argument,
    open_history,
    pair,
    sure_option,
    without_prefix,
)
from rearview.cli.run import program_of
from rearview.cli.terminal import output
from rearview.cli.terminal.inspection_page import InspectionPage, plain_inspection
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview._history import Correction, History, Propagated


@click.command(cls=TakesRuns)
@names_argument(required=False)
@click.option(
    "--to",
    "which",
    metavar="RUN",
    type=without_prefix,
    multiple=True,
    shell_complete=complete_run,
    help="Only the versions of these runs; may be repeated.",
)
@click.option("--explain", is_flag=True, help="Say why each place was chosen.")
@sure_option
@click.option(
    "--correct",
    nargs=2,
    metavar="RUN FILE:LINE",
    help="Put the statement before that line in the version of RUN; its neighbours follow.",
)
@click.option("--after", is_flag=True, help="With --correct: after the statement on that line.")
@click.option(
    "--rename",
    "renames",
    metavar="NEW=OLD",
    type=pair,
    multiple=True,
    help="With --correct: the name of a variable in that version; may be repeated.",
)
@click.option(
    "--statement",
    metavar="FILE:LINE",
    help="With --correct: the statement of the work tree, if several log the name.",
)
@click.option("--corrections", is_flag=True, help="List the places given by hand.")
@click.option(
    "--undo",
    metavar="RUN",
    type=without_prefix,
    shell_complete=complete_run,
    help="Forget the places given by hand in the version of RUN.",
)
@json_option
def propagate(
    *,
    names: tuple[str, ...],
    which: tuple[str, ...],
    explain: bool,
    sure: float | None,
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
    history = open_history()
    if correct is None and (after or renames or statement):
        raise click.UsageError("--after, --rename and --statement belong to --correct.")
    if history.correction_note:
        output.note(history.correction_note)
    if undo is not None:
        return _undone(history, undo, names, as_json=as_json)
    if corrections:
        stored = history.corrections(names)
        if as_json:
            output.json_document(stored)
        elif not stored:
            output.note("No place was given by hand.")
        for correction in () if as_json else stored:
            output.out(_corrected(correction))
        return 0
    if not names:
        raise click.UsageError("Give the logged names, like `rearview propagate loss`.")
    if correct is not None:
        run, place = correct
        path, line = _file_and_line(place)
        where = _file_and_line(statement) if statement is not None else None
        history.correct(
            *(without_prefix(run), path, line, names),
            after=after,
            renames=dict(renames),
            statement=where,
        )
    placements = history.propagate(list(names), to=list(which) or None, sure=sure)
    if as_json:
        output.json_document(placements)
    else:
        for placement in placements:
            _version(placement, explain=explain)
    return 1 if any(placement.reason for placement in placements) else 0


def _file_and_line(text: str) -> tuple[str, int]:
    path, _, line = text.rpartition(":")
    if not path or not line.isdecimal():
        raise click.UsageError(f"{text!r} is not FILE:LINE, like train.py:31.")
    return path, int(line)


def _undone(history: History, run: str, names: tuple[str, ...], *, as_json: bool) -> int:
    removed = history.undo(run, names)
    if as_json:
        output.json_document(removed)
    elif not removed:
        output.note(f"No place was given by hand in the version of run {run}.")
    for correction in () if as_json else removed:
        output.out(f"undone: {_corrected(correction)}")
    return 0 if removed else 1


def _corrected(correction: Correction) -> str:
    """Return a stored correction (where a statement belongs in a version) as one line of text."""
    names = ", ".join(correction.statement.logs or correction.statement.sets)
    which = f" ({correction.statement.occurrence + 1})" if correction.statement.occurrence else ""
    side = "after" if correction.after else "before"
    renamed = "".join(f", {new} is {old}" for new, old in correction.renames.items())
    head = output.paint(f"version {correction.version[:12]}", output.BOLD)
    run = f" ({correction.run})" if correction.run else ""
    return f"{head}{run}: {names}{which} {side} {correction.path}:{correction.line}{renamed}"


def _version(placement: Propagated, *, explain: bool) -> None:
    runs = ", ".join(placement.runs[:3]) + (
        f" and {len(placement.runs) - 3} more" if len(placement.runs) > 3 else ""
    )
    head = output.paint(f"version {placement.version[:12]}", output.BOLD)
    if placement.reason:
        output.out(f"{head} ({runs}): {output.paint('refused', output.RED)}: {placement.reason}")
    else:
        output.out(f"{head} ({runs}): {placement.confidence:.0%} sure")
        output.diff(placement.diff)
    if explain:
        for reason in placement.reasons:
            output.out(f"  {reason}")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.PY [ARGS]...")
@click.option("-m", "module", metavar="MODULE", help="Inspect a module, as `python -m` names it.")
@click.option("--all", "everything", is_flag=True, help="Show every loop in full, every log call.")
@json_option
def inspect(words: tuple[str, ...], module: str | None, everything: bool, as_json: bool) -> int:
    """Show whether Rearview will work on a script or notebook, without running it.

    The first lines give the answer: yes, yes with limits, in part, or no. Then follow its loops and the
    variables that each changes, the logged names and their loggers, what cannot be checkpointed and why,
    and the places for a log statement. Files of the project that the script imports are read, too. The
    changed variables are estimated from the text (by the rules of the Flor paper); a recorded run looks at
    the live objects instead. ARGS are ignored. Exit code 1 if a file cannot be read.
    """
    from rearview._history import inspect_script, script_of_module

    command = f"rearview run {' '.join(words)}"
    if module is not None:
        script = script_of_module(module, Path.cwd())
        command = " ".join(("rearview run -m", module, *words))
    elif not words:
        raise UsageError("Which script? `rearview inspect train.py`.", slug="no-script")
    else:
        program = program_of(words)
        target = program.target
        script = script_of_module(target, Path.cwd()) if program.module else Path(target)
    inspection = inspect_script(script)
    if as_json:
        output.json_document(plain_inspection(inspection))
    else:
        InspectionPage(inspection, everything=everything).show(command)
    return 1 if inspection.unread else 0


@click.command(cls=TakesRuns)
@click.argument(
    "first", metavar="[A]", default="latest", type=without_prefix, shell_complete=complete_run
)
@click.argument(
    "second", metavar="[B]", default="worktree", type=without_prefix, shell_complete=complete_run
)
@click.option(
    "--statements",
    is_flag=True,
    help="Statement by statement, as propagation matches them: renamed, moved, changed, added, removed.",
)
@json_option
def diff(first: str, second: str, *, statements: bool, as_json: bool) -> int:
    """Show how the source of two runs differs.

    From run A (the newest) to run B; without B, to the files as they are now (`worktree`). Exit code 0: no difference, 1: some.
    """
    if statements:
        return _statements(first, second, as_json=as_json)
    if as_json:
        raise click.UsageError("--json belongs to --statements.")
    text = open_history().diff(first, second)
    output.diff(text)
    return 1 if text else 0


def _statements(first: str, second: str, *, as_json: bool) -> int:
    changes = open_history().statement_diff(first, second)
    changed = [change for change in changes if change.edit != "same"]
    if as_json:
        output.json_document(changes)
        return 1 if changed else 0
    path = ""
    for change in changed:
        if change.path != path:
            path = change.path
            output.out(output.paint(path, output.BOLD))
        lines = f"{change.old_line or ''} → {change.new_line or ''}".strip()
        text = change.new_text if change.old_text in {"", change.new_text} else change.old_text
        if change.new_text and text != change.new_text:
            text += f"  →  {change.new_text}"
        output.out(f"  {change.edit.value:<8} {lines:<12} {text}")
    unchanged = len(changes) - len(changed)
    output.out(f"{unchanged} statement{'s' * (unchanged != 1)} the same, {len(changed)} not")
    return 1 if changed else 0
