"""Print the inspection of a script: whether Rearview will work on it, its loops and log calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rearview.cli.terminal import output
from rearview.cli.terminal.output import plural

if TYPE_CHECKING:
    from rearview._history import Inspection, LoopReport

MOST_LINES = 12
"""Maximum number of lines per section without --all; a last line gives the number of further lines."""


_HEADS = {
    "yes": "Yes: {} can be recorded as it is, and replayed from checkpoints.",
    "limited": "Yes, with limits: {} can be recorded as it is, and replayed from checkpoints.",
    "whole": "In part: {} can be recorded, but a backfill runs all of it again, from the start.",
    "no": "No: {} cannot be recorded.",
}
_COLORS = {
    "yes": output.GREEN,
    "limited": output.YELLOW,
    "whole": output.YELLOW,
    "no": output.RED,
}


class InspectionPage:
    """Prints the inspection of a script as text; with `everything`, without leaving out lines."""

    def __init__(self, inspection: Inspection, *, everything: bool) -> None:
        self.inspection = inspection
        self.most = 1 << 30 if everything else MOST_LINES
        self.everything = everything

    def show(self, command: str) -> None:
        """Print whether Rearview will work on the script, and the loops, log calls and obstacles that explain why.

        `command` is the command line to suggest for recording the script.
        """
        self._answer(command)
        if self.inspection.answer.value == "no":
            return
        self._loops()
        self._logs()
        self._obstacles()
        self._places()

    def _at(self, path: str, line: int) -> str:
        file, cell, line = self.inspection.cell_and_line(path, line)
        return f"{file}:{line}" if cell is None else f"{file} cell {cell}, line {line}"

    def _answer(self, command: str) -> None:
        inspection = self.inspection
        answer = inspection.answer.value
        script, _, _ = inspection.cell_and_line(inspection.script, 1)
        head, colon, sentence_end = _HEADS[answer].format(script).partition(":")
        output.out(f"{output.paint(head, _COLORS[answer])}{colon}{sentence_end}")
        if answer == "no":
            for reason in inspection.reasons:
                output.note(inspection.in_cells(reason))
            return
        rows = [("training loop", self._training())]
        main = inspection.main
        if main is not None and main.changes.names:
            rows.append(("it changes", _some(main.changes.names, self.most)))
        rows.append(("logged", self._logged()))
        word = "limits" if answer == "limited" else "because"
        rows += [(word if row == 0 else "", why) for row, why in enumerate(inspection.reasons)]
        if inspection.training_call is not None:
            notes = inspection.training_call.conditions
            rows += [("note" if row == 0 else "", note) for row, note in enumerate(notes)]
        rows.append(("record it", f"`{command}`"))
        for name, text in rows:
            output.out(f"  {name:<14} {inspection.in_cells(text)}")

    def _training(self) -> str:
        inspection = self.inspection
        main, call = inspection.main, inspection.training_call
        name = "/".join(inspection.point)
        if call is not None:
            where = f"`{call.call}` at {self._at(call.path, call.line)}"
            return f"`{name}`, in {call.library}, started by {where}"
        if main is None:
            return "none was found"
        where = self._at(main.id.path, main.line)
        if not inspection.sure:
            return f"`{name}` ({where}): no loop seems to train, and this one is the longest"
        return f"`{name}` ({where})"

    def _logged(self) -> str:
        names = tuple(dict.fromkeys(name for log in self.inspection.logs for name in log.names))
        call = self.inspection.training_call
        if call is not None and call.captured:
            more_names = f", and {_some(names, self.most)}" if names else ""
            return f"what {call.library} logs{more_names}"
        if not names:
            return "no name; variables and printed numbers become columns by themselves"
        return _some(names, self.most)

    def _loops(self) -> None:
        inspection = self.inspection
        main = inspection.main
        _heading(f"Loops in {plural(len(inspection.files), 'file')}")
        for call in inspection.library:
            mark = (
                output.paint("  trains", output.GREEN) if call == inspection.training_call else ""
            )
            loops = f"loops {'/'.join(call.point)}" if call.watched else "loops are not watched"
            where = self._at(call.path, call.line)
            output.out(f"  {where}  `{call.call}` in {call.library}: {loops}{mark}")
        if not inspection.loops and not inspection.library:
            output.out("  None.")
        main_nest = [loop for loop in inspection.loops if loop.main]
        if main is not None:
            depth = len(main.point)
            main_nest += [
                loop
                for loop in inspection.loops
                if len(loop.point) > depth and loop.point[:depth] == main.point
            ]
        other_loops = [loop for loop in inspection.loops if loop not in main_nest]
        for loop in main_nest:
            self._loop(loop)
        if self.everything:
            for loop in other_loops:
                self._loop(loop)
            return
        for loop in other_loops[: self.most]:
            changes = f"  changes {_some(loop.changes.names, 4)}" if loop.changes.names else ""
            alone = f"  not watched: {loop.why_unwatched}" if loop.why_unwatched else changes
            where = self._at(loop.id.path, loop.line)
            output.out(f"  {where}  {loop.kind} {'/'.join(loop.point)}{alone}")
        self._more(other_loops, "loop")

    def _more(self, items: Sequence[object], word: str) -> None:
        if len(items) > self.most:
            output.out(f"  and {plural(len(items) - self.most, f'more {word}')} (--all)")

    def _loop(self, loop: LoopReport) -> None:
        mark = output.paint("  main loop", output.GREEN) if loop.main else ""
        name = output.paint("/".join(loop.point), output.BOLD)
        output.out(f"  {self._at(loop.id.path, loop.line)}  {loop.kind} {name}{mark}")
        if loop.why_unwatched:
            output.out(f"      Not watched: {loop.why_unwatched}.")
        for sentence in loop.sentences:
            output.out(f"      {sentence}")

    def _logs(self) -> None:
        _heading("Logged")
        named = [log for log in self.inspection.logs if log.names]
        lines = [log for log in self.inspection.logs if not log.names]
        if not named:
            output.out("  No name is logged through a logger that Rearview knows.")
        for log in named[: self.most]:
            where = f" at {'/'.join(log.loops)}" if log.loops else ""
            place = self._at(log.path, log.line)
            output.out(f"  {place}  {_some(log.names, self.most)} by {log.logger}{where}")
        self._more(named, "log call")
        if lines:
            places = ", ".join(self._at(log.path, log.line) for log in lines[:6])
            more = "" if len(lines) <= 6 else f" and {len(lines) - 6} more"
            output.out(f"  Lines of text at {places}{more}: kept with the run (`show --printed`).")

    def _obstacles(self) -> None:
        _heading("Cannot be checkpointed")
        obstacles = self.inspection.obstacles
        if not obstacles:
            output.out("  Nothing was found.")
        for obstacle in obstacles[: self.most]:
            output.out(f"  {self._at(obstacle.path, obstacle.line)}  {obstacle.what}")
            output.out(f"      {obstacle.effect}")
        self._more(obstacles, "line")

    def _places(self) -> None:
        _heading("Places for a log statement")
        if not self.inspection.places:
            output.out("  None: there is no loop to put it in.")
        for place in self.inspection.places:
            reads = f" It can read {_some(place.reads, self.most)}." if place.reads else ""
            output.out(f"  after {self._at(place.path, place.after)}: {place.where}.{reads}")
            output.out(f"      A backfill {place.cost}.")


def _heading(text: str) -> None:
    output.out(f"\n{output.paint(text, output.BOLD)}")


def _some(names: Iterable[str], most: int) -> str:
    listed = [f"`{name}`" for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def plain_inspection(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as dictionaries, lists, texts and numbers, for JSON."""
    main, call = inspection.main, inspection.training_call
    return {
        "script": inspection.cell_and_line(inspection.script, 1)[0],
        "answer": inspection.answer.value,
        "reasons": [inspection.in_cells(reason) for reason in inspection.reasons],
        "training": {
            "point": list(inspection.point),
            "sure": inspection.sure,
            "loop": str(main.id) if main is not None else None,
            "library": call.library if call is not None else None,
        },
        "files": list(inspection.files),
        "unread": {path: unread.reason for path, unread in inspection.unread.items()},
        "loops": [
            {
                "id": str(loop.id),
                **_where(inspection, loop.id.path, loop.line),
                "end": inspection.cell_and_line(loop.id.path, loop.end)[2],
                "function": loop.id.function,
                "name": loop.id.name,
                "kind": loop.kind,
                "point": list(loop.point),
                "main": loop.main,
                "watched": not loop.why_unwatched,
                "why_not": loop.why_unwatched or None,
                "changes": list(loop.changes.names),
                "inferred": dict(loop.changes.inferred),
                "inside_only": list(loop.changes.inside_only),
                "unsure_lines": [
                    inspection.cell_and_line(loop.id.path, change.line)[2]
                    for change in loop.changes.unsure
                ],
            }
            for loop in inspection.loops
        ],
        "library_loops": [
            {
                **_where(inspection, each.path, each.line),
                "call": each.call,
                "library": each.library,
                "watched": each.watched,
                "point": list(each.point),
                "trains": each == call,
            }
            for each in inspection.library
        ],
        "logs": [
            {
                **_where(inspection, log.path, log.line),
                "logger": log.logger,
                "names": list(log.names),
                "loops": list(log.loops),
            }
            for log in inspection.logs
        ],
        "obstacles": [
            {
                **_where(inspection, obstacle.path, obstacle.line),
                "what": obstacle.what,
                "effect": obstacle.effect,
            }
            for obstacle in inspection.obstacles
        ],
        "places": [
            {
                **_where(inspection, place.path, place.after, name="after_line"),
                "where": place.where,
                "cost": place.cost,
                "reads": list(place.reads),
            }
            for place in inspection.places
        ],
    }


def _where(inspection: Inspection, path: str, line: int, name: str = "line") -> dict[str, Any]:
    file, cell, line = inspection.cell_and_line(path, line)
    return {"path": file, name: line} if cell is None else {"path": file, "cell": cell, name: line}
