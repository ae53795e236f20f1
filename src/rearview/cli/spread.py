"""The command that shows where a statement goes in past versions: propagate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview.cli import show
from rearview.cli.options import TakesRuns, a_run, asked, complete_run, json_option, some_names

if TYPE_CHECKING:
    from rearview.past import Propagated


@click.command(cls=TakesRuns)
@some_names(required=True)
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
@json_option
def propagate(
    *,
    names: tuple[str, ...],
    which: tuple[str, ...],
    explain: bool,
    correct: tuple[str, str] | None,
    as_json: bool,
) -> int:
    """Show where the statements that log NAMES go in past versions.

    For each version the diff that a backfill would apply, or why there is no certain place.
    Nothing runs and no file changes. Exit code 0: all have a place; 1: some are refused.
    """
    past = asked()
    if correct is not None:
        run, place = correct
        path, _, line = place.rpartition(":")
        if not path or not line.isdecimal():
            raise click.UsageError(f"{place!r} is not FILE:LINE, like train.py:31.")
        past.correct(a_run(run), path, int(line), names)
    found = past.propagate(list(names), to=list(which) or None)
    if as_json:
        show.json_document(found)
    else:
        for one in found:
            _version(one, explain=explain)
    return 1 if any(one.reason for one in found) else 0


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
