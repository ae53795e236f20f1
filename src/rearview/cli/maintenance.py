"""Commands that check, clean and trust the store: verify, gc, trust."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview._history import repair_format
from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    nbytes,
    open_history,
    project_folder,
    without_mark,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import plain, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.errors import StoreError

if TYPE_CHECKING:
    from rearview._history import History, Problem


@click.command()
@click.option("--repair", is_flag=True, help="Rebuild what can be rebuilt, set the rest aside.")
@json_option
def verify(repair: bool, as_json: bool) -> int:
    """Check everything in the store; repair what can be rebuilt.

    Reads every byte and compares it with its checksum. Nothing is ever deleted: with --repair,
    damaged files move to `.rearview/damaged/`. Exit code 0: all is well (again); 1: damage.
    """
    past = _open_or_repair(repair=repair)
    with waiting("checking the store", quiet=as_json):
        report = past.verify(repair=repair)
    if as_json:
        output.json_document({"ok": report.ok, **plain(report)})
        return 0 if report.ok else 1
    for problem in report.problems:
        _problem(problem)
    checked = ", ".join(
        (
            plural(report.runs, "run"),
            plural(report.checkpoints, "checkpoint"),
            plural(report.objects, "object"),
            plural(report.packs, "pack"),
            f"{size(report.nbytes)} read",
        )
    )
    if report.unchecked:
        output.note(
            f"{plural(report.unchecked, 'file')} of older runs were written before there were "
            "checksums: they can be read, but changed bytes would not be noticed."
        )
    if report.ok:
        output.out(f"{output.paint('ok', output.GREEN)}: {checked}")
        return 0
    output.out(f"{output.paint('damaged', output.RED)}: {checked}")
    if not repair:
        output.note(
            "`rearview verify --repair` rebuilds what can be rebuilt and sets the rest aside."
        )
    return 1


def _open_or_repair(*, repair: bool) -> History:
    """Return the history; with `repair`, rewrite an unreadable format file first."""
    try:
        return open_history()
    except StoreError as exc:
        if exc.slug != "store-unreadable" or not repair:
            raise
        output.note(f"{repair_format(project_folder())} was rewritten.")
        return open_history()


def _problem(problem: Problem) -> None:
    verdict = (
        output.paint("repaired", output.GREEN)
        if problem.done
        else output.paint("damaged", output.RED)
    )
    done = f"; {problem.done}" if problem.done else ""
    output.out(f"{verdict}: {problem.path}: {problem.what}{done}")
    if problem.lost:
        output.out(f"  cannot be loaded: {', '.join(problem.lost)}")


@click.command()
def trust() -> None:
    """Trust a store that was not made here: let replays run its source.

    A replay, a backfill and a resumed run execute source and unpickle objects of the store, so they
    refuse a store that was copied, unpacked, or made by another user or on another machine. Use this
    command once, if you know where the store comes from. Stores that you record yourself are trusted.
    """
    past = open_history(trusting=True)
    before = past.trusted
    file = past.trust()
    hosts = sorted({run.host for run in past.runs() if run.host})
    by = f" ({plural(len(past.runs()), 'run')}{', of ' + ', '.join(hosts) if hosts else ''})"
    status = "was trusted before" if before else "is trusted from now on"
    output.out(f"{past.project.store} {status}{by}")
    output.note(f"Remembered in {file}; remove that file to take it back.")


@click.command(cls=TakesRuns)
@click.option(
    "--budget", type=nbytes, metavar="SIZE", help="Drop checkpoints until they fit: 10GB."
)
@click.option(
    "--keep", type=click.IntRange(0), metavar="N", help="The newest N runs stay whole, in any case."
)
@click.option(
    "--keep-run",
    "kept",
    metavar="RUN",
    type=without_mark,
    multiple=True,
    shell_complete=complete_run,
    help="This run stays whole, too; may be repeated.",
)
@click.option("--dry-run", "--dry", "dry_run", is_flag=True, help="Only say what would be freed.")
@json_option
def gc(
    *, budget: int | None, keep: int | None, kept: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Free space by dropping checkpoints.

    Without --budget, only unreferenced objects are deleted. With it (or with the setting `budget`),
    checkpoints are thinned evenly over each run, so that every run can still be replayed. Records
    and sources always stay, and so do the checkpoints of running runs.
    """
    past = open_history()
    whole = [past.run(which).id for which in kept]
    if keep:
        whole += [run.id for run in past.runs()[-keep:]]
    whole += [run.id for run in past.runs() if run.status.value == "running"]
    with waiting("looking for unneeded objects", quiet=as_json):
        freed = past.gc(budget=budget, keep=sorted(set(whole)), dry=dry_run)
    if as_json:
        output.json_document({"dry_run": dry_run, **plain(freed)})
        return
    would = "would free" if dry_run else "freed"
    dropped = (
        f", {plural(len(freed.checkpoints), 'checkpoint')} dropped" if freed.checkpoints else ""
    )
    output.out(f"{would} {size(freed.nbytes)}{dropped}; {size(freed.left)} are left")
    if freed.spared:
        output.note(f"{size(freed.spared)} may belong to a running run, and stay for now.")
    if budget is not None and freed.left > budget:
        output.note(
            f"{size(freed.left - budget)} more than the budget: the runs to keep do not fit."
        )
