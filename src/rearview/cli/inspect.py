"""The command inspect: what Rearview sees in a script before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli import show
from rearview.cli.formats import plural
from rearview.cli.options import json_option

if TYPE_CHECKING:
    from rearview.past import Inspection


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@json_option
def inspect(script: Path, as_json: bool) -> int:
    """Show what Rearview sees in a script, without running it.

    Its loops and what each changes, what it logs and through which logger, what cannot be
    checkpointed and why, and where a log statement could be added. Files of the project that the
    script imports are read too. What a loop changes is guessed from the text (the rules of the Flor
    paper); a recorded run looks at the live objects instead. Exit code 1 if a file cannot be parsed.
    """
    from rearview.past import inspect_script

    found = inspect_script(script)
    if as_json:
        show.json_document(_plain(found))
    else:
        _print(found)
    return 1 if found.unread else 0


def _print(found: Inspection) -> None:
    for path, why in found.unread.items():
        show.note(f"{path} could not be read: {why}")
    _loops(found)
    _logs(found)
    _heading("Cannot be checkpointed")
    if not found.obstacles:
        show.out("  Nothing was found: every loop that is watched can be saved and resumed.")
    for each in found.obstacles:
        show.out(f"  {each.path}:{each.line}  {each.what}")
        show.out(f"      {each.effect}")
    _heading("Places for a log statement")
    if not found.places:
        show.out("  None: there is no loop to put it in.")
    for place in found.places:
        reads = f" It can read {_listed(place.reads)}." if place.reads else ""
        show.out(f"  {place.path}, after line {place.after}: {place.where}.{reads}")
        show.out(f"      A backfill {place.cost}.")
    show.out(f"\nTo record it: `rearview run {found.script}`.")


def _loops(found: Inspection) -> None:
    main = found.main
    _heading(f"Loops in {plural(len(found.files), 'file')}")
    if main is None:
        show.out("  None: nothing can be checkpointed or resumed; a replay runs the whole script.")
    for loop in found.loops:
        mark = show.paint("  main loop", show.GREEN) if loop.main else ""
        name = show.paint("/".join(loop.point), show.BOLD)
        show.out(f"  {loop.id.path}:{loop.line}  {loop.kind} {name}{mark}")
        if loop.left_alone:
            show.out(f"      Not watched: {loop.left_alone}.")
        for sentence in loop.sentences:
            show.out(f"      {sentence}")


def _logs(found: Inspection) -> None:
    _heading("Logged")
    named = [log for log in found.logs if log.names]
    lines = [log for log in found.logs if not log.names]
    if not named:
        show.out("  No name is logged through a logger that Rearview knows.")
    for log in named:
        where = f" at {'/'.join(log.loops)}" if log.loops else ""
        show.out(f"  {log.path}:{log.line}  {_listed(log.names)} by {log.logger}{where}")
    if lines:
        places = ", ".join(f"{log.path}:{log.line}" for log in lines[:6])
        more = "" if len(lines) <= 6 else f" and {len(lines) - 6} more"
        show.out(f"  Lines of text at {places}{more}: kept with the run (`show --printed`).")


def _heading(text: str) -> None:
    show.out(f"\n{show.paint(text, show.BOLD)}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(found: Inspection) -> dict[str, Any]:
    """Return the report as plain values for programs."""
    return {
        "script": found.script,
        "files": list(found.files),
        "unread": dict(found.unread),
        "loops": [
            {
                "id": str(loop.id),
                "path": loop.id.path,
                "function": loop.id.function,
                "name": loop.id.name,
                "line": loop.line,
                "end": loop.end,
                "kind": loop.kind,
                "point": list(loop.point),
                "main": loop.main,
                "watched": not loop.left_alone,
                "why_not": loop.left_alone or None,
                "changes": list(loop.changes.names),
                "inferred": dict(loop.changes.inferred),
                "inside_only": list(loop.changes.scoped),
                "unsure_lines": [change.line for change in loop.changes.unsure],
            }
            for loop in found.loops
        ],
        "logs": [
            {
                "path": log.path,
                "line": log.line,
                "logger": log.logger,
                "names": list(log.names),
                "loops": list(log.loops),
            }
            for log in found.logs
        ],
        "obstacles": [
            {"path": each.path, "line": each.line, "what": each.what, "effect": each.effect}
            for each in found.obstacles
        ],
        "places": [
            {
                "path": place.path,
                "after_line": place.after,
                "where": place.where,
                "cost": place.cost,
                "reads": list(place.reads),
            }
            for place in found.places
        ],
    }
