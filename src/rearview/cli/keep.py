"""Commands that look after the store: verify, trust, gc."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview.cli import show
from rearview.cli.formats import plain, plural, size
from rearview.cli.options import TakesRuns, a_run, asked, complete_run, here, json_option, nbytes
from rearview.cli.progress import waiting
from rearview.errors import StoreError

if TYPE_CHECKING:
    from rearview.past import History
    from rearview.store.verify import Problem


@click.command()
@click.option("--repair", is_flag=True, help="Rebuild what can be, set aside what cannot.")
@json_option
def verify(repair: bool, as_json: bool) -> int:
    """Check everything in the store; repair what can be rebuilt.

    Reads every byte and compares it with its checksum. Nothing is ever deleted: with --repair,
    damaged files move to `.rearview/damaged/`. Exit code 0: all is well (again); 1: damage.
    """
    past = _opened(repair=repair)
    with waiting("checking the store", quiet=as_json):
        report = past.verify(repair=repair)
    if as_json:
        show.json_document({"ok": report.ok, **plain(report)})
        return 0 if report.ok else 1
    for problem in report.problems:
        _problem(problem)
    looked = ", ".join(
        (
            plural(report.runs, "run"),
            plural(report.checkpoints, "checkpoint"),
            plural(report.objects, "object"),
            plural(report.packs, "pack"),
            f"{size(report.nbytes)} read",
        )
    )
    if report.unchecked:
        show.note(
            f"{plural(report.unchecked, 'file')} of older runs were written before there were "
            "checksums: that they can be read is all that is known of them."
        )
    if report.ok:
        show.out(f"{show.paint('ok', show.GREEN)}: {looked}")
        return 0
    show.out(f"{show.paint('damaged', show.RED)}: {looked}")
    if not repair:
        show.note("`rearview verify --repair` rebuilds what can be and sets the rest aside.")
    return 1


def _opened(*, repair: bool) -> History:
    """Return the history; a store whose format file is unreadable is mended first if asked."""
    try:
        return asked()
    except StoreError as exc:
        if exc.slug != "store-unreadable" or not repair:
            raise
        from rearview.store.project import FOLDER, Project
        from rearview.store.verify import verify as check

        start = here().resolve()
        root = next(p for p in (start, *start.parents) if (p / FOLDER / "format").exists())
        check(Project(root), repair=True)
        show.note(f"{root / FOLDER / 'format'} was written anew.")
        return asked()


def _problem(problem: Problem) -> None:
    verdict = (
        show.paint("repaired", show.GREEN) if problem.done else show.paint("damaged", show.RED)
    )
    done = f"; {problem.done}" if problem.done else ""
    show.out(f"{verdict}: {problem.path}: {problem.what}{done}")
    if problem.lost:
        show.out(f"  cannot be loaded: {', '.join(problem.lost)}")


@click.command()
def trust() -> None:
    """Trust a store that was not made here: let replays run what is in it.

    A replay, a backfill and a resumption run source and unpickle objects that are in the store, so
    they refuse one that was copied, unpacked, or made by another user or on another machine. Say
    this once, if you know where it comes from. Stores that you record yourself need it never.
    """
    past = asked(trusting=True)
    before = past.trusted
    file = past.trust()
    hosts = sorted({run.host for run in past.runs() if run.host})
    by = f" ({plural(len(past.runs()), 'run')}{', of ' + ', '.join(hosts) if hosts else ''})"
    what = "was trusted before" if before else "is trusted from now on"
    show.out(f"{past.project.store} {what}{by}")
    show.note(f"Remembered in {file}; remove that file to take it back.")


@click.command(cls=TakesRuns)
@click.option(
    "--budget", type=nbytes, metavar="SIZE", help="Drop checkpoints until this suffices: 10GB."
)
@click.option(
    "--keep", type=click.IntRange(0), metavar="N", help="The newest N runs stay whole, in any case."
)
@click.option(
    "--keep-run",
    "kept",
    metavar="RUN",
    type=a_run,
    multiple=True,
    shell_complete=complete_run,
    help="So does this one; may be repeated.",
)
@click.option("--dry-run", "--dry", "dry_run", is_flag=True, help="Only say what would be freed.")
@json_option
def gc(
    *, budget: int | None, keep: int | None, kept: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Free space by dropping checkpoints.

    Without --budget only what nothing refers to goes. With one (or the setting `budget`),
    checkpoints are thinned evenly over each run, so that every run can still be replayed. Records
    and sources always stay, and so do checkpoints of runs that are going on.
    """
    past = asked()
    promised = [past.run(which).id for which in kept]
    if keep:
        promised += [run.id for run in past.runs()[-keep:]]
    promised += [run.id for run in past.runs() if run.status.value == "running"]
    with waiting("looking for what can go", quiet=as_json):
        freed = past.gc(budget=budget, keep=sorted(set(promised)), dry=dry_run)
    if as_json:
        show.json_document({"dry_run": dry_run, **plain(freed)})
        return
    would = "would free" if dry_run else "freed"
    dropped = (
        f", {plural(len(freed.checkpoints), 'checkpoint')} dropped" if freed.checkpoints else ""
    )
    show.out(f"{would} {size(freed.nbytes)}{dropped}; {size(freed.left)} are left")
    if freed.spared:
        show.note(f"{size(freed.spared)} may belong to a run that is going on, and stay for now.")
    if budget is not None and freed.left > budget:
        show.note(
            f"{size(freed.left - budget)} more than the budget: what is promised does not fit."
        )
