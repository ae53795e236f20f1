"""The command that shows backfills under way and changes how many workers they have: workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview.cli import show
from rearview.cli.formats import duration, moment, plural
from rearview.cli.options import asked, json_option

if TYPE_CHECKING:
    from rearview.past import Crew


@click.command()
@click.argument("count", metavar="[N]", type=click.IntRange(1), required=False)
@click.option(
    "--of", "which", metavar="ID", help="The backfill that is meant, if there are several."
)
@json_option
def workers(count: int | None, which: str | None, as_json: bool) -> int:
    """Show backfills under way and their workers, or give them N workers from now on.

    More start at once. Fewer: a segment that is nearly done may end; one that would take long is
    handed back, and another worker does it. Exit code 1: no backfill is under way.
    """
    past = asked()
    if count is not None:
        changed = past.employ(count, of=which)
        if not as_json:
            names = ", ".join(changed.names)
            show.out(f"{changed.id} ({names}): {plural(count, 'worker')} from now on")
            return 0
    found = [crew for crew in past.crews() if which is None or which in crew.id]
    if as_json:
        show.json_document([_told(crew) for crew in found])
    elif found:
        show.table(
            ["backfill", "fills", "started", "workers", "busy", "segments", "left"],
            [_row(crew) for crew in found],
            right=[False, False, False, True, True, True, True],
        )
    else:
        show.note("No backfill is under way here.")
    return 0 if found else 1


def _told(crew: Crew) -> dict[str, object]:
    told = {name: getattr(crew, name) for name in crew.__struct_fields__}
    return {name: value for name, value in told.items() if name not in {"format", "heartbeat"}}


def _row(crew: Crew) -> list[str]:
    return [
        crew.id,
        ", ".join(crew.names) or "a replay",
        moment(crew.started),
        str(crew.workers),
        str(crew.busy),
        f"{crew.ended} of {crew.segments}",
        duration(crew.left),
    ]
