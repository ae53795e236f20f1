"""Commands that label runs and remove them: name, tag, note, rm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from rearview.cli import show
from rearview.cli.formats import plain, plural, size
from rearview.cli.options import TakesRuns, a_run, asked, complete_run, json_option

if TYPE_CHECKING:
    from rearview.past.reports import Removal

_RUN = click.argument("which", metavar="RUN", type=a_run, shell_complete=complete_run)


@click.command(cls=TakesRuns)
@_RUN
@click.argument("new", metavar="[NAME]", required=False)
@click.option("--remove", is_flag=True, help="Take its name away.")
def name(which: str, new: str | None, remove: bool) -> None:
    """Give a run a name, by which every command finds it.

    Wherever a command takes a run, its name will do. A later name replaces the earlier one. No two
    runs have the same name.
    """
    if remove == (new is not None):
        raise click.UsageError("Give either a NAME or --remove: `rearview name latest baseline`.")
    run = asked().name(which, new)
    show.out(f"{run.id} is called {run.name}" if run.name else f"{run.id} has no name now")


@click.command(cls=TakesRuns)
@_RUN
@click.argument("tags", metavar="TAG...", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Take these tags away.")
def tag(which: str, tags: tuple[str, ...], remove: bool) -> None:
    """Give a run tags, to find it again.

    `rearview runs --where "tag = 'baseline'"` lists the runs that have a tag.
    """
    past = asked()
    run = past.untag(which, *tags) if remove else past.tag(which, *tags)
    show.out(
        f"{run.id} has the tags {', '.join(run.tags)}" if run.tags else f"{run.id} has no tags"
    )


@click.command(cls=TakesRuns)
@_RUN
@click.argument("text", metavar="[TEXT]...", nargs=-1)
@click.option("--remove", is_flag=True, help="Take all notes away.")
def note(which: str, text: tuple[str, ...], remove: bool) -> None:
    """Write a note about a run.

    Each note is a line after the ones before; `show` and the column `note` of the table `runs` have
    all of them. Without TEXT, print what is there.
    """
    past = asked()
    if remove and text:
        raise click.UsageError("Give either a TEXT or --remove, not both.")
    if remove:
        show.out(f"{past.note(which, None).id} has no note now")
    elif text:
        show.out(f"noted about {past.note(which, ' '.join(text)).id}")
    else:
        run = past.run(which)
        show.out(run.note) if run.note else show.note(f"{run.id} has no note.")


@click.command(cls=TakesRuns)
@click.argument(
    "which", metavar="RUN...", nargs=-1, required=True, type=a_run, shell_complete=complete_run
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", "--dry", "dry_run", is_flag=True, help="Only say what would go.")
@json_option
def rm(which: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool) -> int | None:
    """Remove runs: records, checkpoints, replays and source.

    What other runs need stays, and so do the files that the run wrote into your project. A run that
    is running is refused, and so is one that other runs came from. On a terminal it asks first;
    elsewhere it needs --yes. A removal that was interrupted is completed by saying it again.
    """
    past = asked()
    if not dry_run and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "There is no terminal to ask on. Say --yes to remove, or look first with --dry-run."
            )
        for line in _described(past.remove(*which, dry=True)):
            show.note(line)
        if not click.confirm("Remove this? It cannot be undone", err=True):
            show.note("Nothing was removed.")
            return 1
    removal = past.remove(*which, dry=dry_run)
    if as_json:
        show.json_document({"dry_run": dry_run, "nbytes": removal.nbytes, **plain(removal)})
        return None
    if dry_run:
        for line in _described(removal):
            show.out(line)
        return None
    show.out(f"removed {', '.join(removal.runs)}; freed {size(removal.nbytes)}")
    if removal.freed.spared:
        show.note(
            f"{size(removal.freed.spared)} may be in use by a save under way; `rearview gc` frees "
            "what is left of them later."
        )
    return None


def _described(removal: Removal) -> Iterator[str]:
    """Yield what goes with each run, and how much space that frees."""
    for each in removal.removed:
        yield (
            f"{each.run}: its records, {plural(each.checkpoints, 'checkpoint')}, "
            f"{plural(len(each.replays), 'replay')} and its source"
        )
    yield f"would free {size(removal.nbytes)}"
