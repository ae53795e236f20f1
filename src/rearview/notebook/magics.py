"""The magic `%rv` of a live notebook: history, undo, checkout."""

from __future__ import annotations

from html import escape
from typing import Any

from rearview.errors import RearviewError, UsageError
from rearview.notebook.undo import Moment, Undo, size_of

HELP = """\
%rv history          the cells that were run, with their seconds
%rv undo             undo the last cell: variables have their values from before it
%rv checkout CELL    restore the state after In [CELL]; 0 is the state at `%load_ext rearview`"""


class Shown:
    """A text that a notebook shows as a table."""

    def __init__(self, rows: list[tuple[str, ...]], head: tuple[str, ...], note: str = "") -> None:
        self._rows, self._head, self._note = rows, head, note

    def __repr__(self) -> str:
        rows = [self._head, *self._rows]
        widths = [max(len(row[k]) for row in rows) for k in range(len(self._head))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *([self._note] if self._note else [])])

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(item)}</{tag}>" for item in cells) + "</tr>"

        body = "".join(row(item, "td") for item in self._rows)
        return f"<table>{row(self._head, 'th')}{body}</table><p>{escape(self._note)}</p>"


class Magics:
    """Executes `%rv` in one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.undo = Undo(shell.user_ns, shell.user_ns_hidden)
        self._watched = False
        """Whether the running cell started after the magic was loaded, and is no `%rv` itself."""
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)

    def _before(self, info: Any) -> None:
        source = info.raw_cell or ""
        self._watched = not source.lstrip().startswith("%rv")
        if self._watched:
            self.undo.before(self.shell.transform_cell(source))

    def _after(self, result: Any) -> None:
        watched, self._watched = self._watched, False
        if not watched or result is None or not result.info.store_history:
            return
        self.undo.after(int(result.execution_count or 0), result.info.raw_cell or "")

    def __call__(self, line: str) -> Any:
        """Execute the line after `%rv`."""
        verb, _, arguments = line.strip().partition(" ")
        try:
            if verb == "undo":
                return self._restored(*self.undo.undo())
            if verb == "checkout":
                if not arguments.strip().isdigit():
                    raise UsageError(
                        f"%rv checkout takes the number of a cell, not {arguments!r}.",
                        slug="no-undo",
                    )
                return self._restored(*self.undo.checkout(int(arguments)))
            if verb == "history":
                return self._history()
            return Shown([(line,) for line in HELP.splitlines()], ("rv",))
        except RearviewError as exc:
            from IPython.core.error import UsageError as IPythonUsageError

            raise IPythonUsageError(f"{exc} (docs/errors.md#{exc.slug})") from None

    def _restored(self, moment: Moment, changed: list[str]) -> Shown:
        note = f"now as after cell {moment.cell}" if moment.cell else "now as at the start"
        return Shown([(name,) for name in changed], ("brought back",), note)

    def _history(self) -> Shown:
        rows: list[tuple[str, ...]] = [
            (
                str(moment.cell),
                f"{moment.seconds:.2f} s",
                moment.source.strip().partition("\n")[0][:60],
            )
            for moment in self.undo.moments
            if moment.cell
        ]
        note = f"copies take {size_of(self.undo.moments) / 1e6:.1f} MB"
        return Shown(rows, ("cell", "took", "source"), note)


def register(shell: Any) -> None:
    """Add `%rv` to a shell, once."""
    if "rv" not in shell.magics_manager.magics["line"]:
        shell.register_magic_function(Magics(shell), "line", "rv")
