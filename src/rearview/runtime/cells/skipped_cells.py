"""Restore the state that skipped cells would have left, before a cell runs that can reach this state.

A skipped cell is one whose stored results are shown without running it. Its imports and definitions are run before
the next cell that runs. Its variables are on disk, and are loaded when a cell that runs can reach them. If a variable
could not be stored, the skipped cell itself is run again.
"""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rearview.runtime.cells.cell_analysis import CellAnalysis, analyse
from rearview.runtime.cells.library_state import (
    RandomUse,
    library_settings,
    set_random,
    set_settings,
)
from rearview.runtime.cells.result_store import CellEntry, GroupRef
from rearview.runtime.cells.state_digests import NotebookState
from rearview.source.notebooks import CodeCell

REUSE_FAILED = "KeptResultsUnusable"
"""Name of the error that a cell shows if stored results cannot be used: all cells of the notebook must run again."""


class ReuseFailed(Exception):  # noqa: N818 - the program has made no error
    """Raised if the state that a cell needs cannot be restored from stored results."""


@dataclass(slots=True)
class Skipped:
    """A cell that was skipped: its stored results, `entry`, were shown."""

    cell: CodeCell
    entry: CellEntry
    analysis: CellAnalysis
    was_run: bool = False
    """Whether the whole cell, or `setup_text`, has been run after the cell was skipped."""

    @property
    def setup_text(self) -> str:
        """Imports, definitions and settings of the cell, to run before the next cell that runs; may be empty."""
        return self.entry.setup_text or self.analysis.preamble


LateRun = Callable[[CodeCell, str], Awaitable[str]]
"""Function `(cell, text)` that runs `text`, the cell or a part of it, without output; returns the error, or ""."""


class SkippedCells:
    """The skipped cells of a notebook, in order."""

    def __init__(self, state: NotebookState, random: RandomUse) -> None:
        self.state = state
        self.random = random
        self.cells: list[Skipped] = []

    async def prepare(self, cell: CodeCell, late_run: LateRun) -> None:
        """Restore the state that `cell` needs, before it runs; raise ReuseFailed if that is impossible."""
        for skipped in self.cells:
            if skipped.was_run:
                continue
            skipped.was_run = True
            if skipped.entry.again:
                await self._run_late(skipped, late_run)
            elif skipped.setup_text:
                await self._run_setup(skipped, late_run)
        analysis = analyse(cell.source)
        reached = self.state.reach(analysis.reads, analysis.definitions)
        await self._load(self.state.absent if reached is None else reached, late_run)
        for library, state in self.random.due_states.items():
            set_random(library, pickle.loads(self.state.store.get_bytes(state)))
        self.random.due_states = {}
        settings_now = library_settings()
        changed_libraries = [
            k for k, value in settings_now.items() if self.state.settings.get(k, value) != value
        ]
        if changed_libraries and self.cells:
            for library in changed_libraries:
                if library in self.state.settings_values:
                    data = self.state.store.get_bytes(self.state.settings_values[library])
                    set_settings(library, data)
            settings_now = library_settings()
            changed_libraries = [
                k for k in changed_libraries if self.state.settings.get(k) != settings_now.get(k)
            ]
        if changed_libraries and self.cells:
            raise ReuseFailed(f"the settings of {changed_libraries[0]} cannot be restored")
        self.state.settings |= settings_now

    async def _run_setup(self, skipped: Skipped, late_run: LateRun) -> None:
        """Run the imports, definitions and settings of a skipped cell; raise ReuseFailed if they fail."""
        at_once = {name for each in skipped.analysis.definitions for name in each.at_once}
        reached = self.state.reach(at_once)
        await self._load(self.state.absent if reached is None else reached, late_run)
        error = await late_run(skipped.cell, skipped.setup_text)
        if error:
            raise ReuseFailed(
                f"the imports and definitions of cell {skipped.cell.number} fail: {error}"
            )
        defined = {each.name for each in skipped.analysis.definitions}
        for name in [*self.state.absent & self.state.namespace.keys()]:
            group = self.state.groups.get(name)
            if group is None:
                if name in defined:
                    self.state.absent.discard(name)
            elif self.state.is_reference(name, group):
                self.state.absent.discard(name)
            else:
                # a later skipped cell bound this name to another value, which is loaded when it is needed
                del self.state.namespace[name]

    async def _run_late(
        self, skipped: Skipped, late_run: LateRun, recomputed: frozenset[str] = frozenset()
    ) -> None:
        """Run a skipped cell now, with its recorded inputs; raise ReuseFailed if that is impossible.

        `recomputed` are names of variables that earlier skipped cells have just computed again; this cell may change them.
        """
        entry, number = skipped.entry, skipped.cell.number
        skipped.was_run = True
        try:
            states = {
                library: pickle.loads(self.state.store.get_bytes(state))
                for library, state in entry.random.items()
            }
        except (OSError, ValueError) as exc:
            raise ReuseFailed(f"cell {number} would have to run again: {exc}") from exc
        older_contents: list[str] = []
        for name, content in entry.inputs.items():
            if self.state.content_of(name) == content or (
                name in recomputed and name in self.state.namespace
            ):
                continue
            if name not in self.state.absent or not self.state.store.has(content):
                raise ReuseFailed(
                    f"cell {number} would have to run again, and {name} has changed since"
                )
            older_contents.append(content)
        groups = {name: group for group in entry.groups for name in group.names}
        changed_names = groups.keys() | set(entry.deleted)
        for name in changed_names - recomputed:
            if name not in self.state.absent and self.state.groups.get(name) != groups.get(name):
                raise ReuseFailed(
                    f"cell {number} would have to run again, and {name} has changed since"
                )
        unchanged_names = {
            n for n, content in entry.inputs.items() if self.state.content_of(n) == content
        }
        await self._load(unchanged_names - recomputed, late_run)
        stale_names = changed_names - recomputed
        for content in older_contents:
            values = self.state.store.get(content, self.state.namespace.__getitem__)
            self.state.namespace.update(values)
            stale_names |= values.keys() - recomputed
        with self.random.set_temporarily(states):
            error = await late_run(skipped.cell, skipped.cell.text)
        if error:
            raise ReuseFailed(f"cell {number} fails when it is run again: {error}")
        for group in entry.groups:
            if any(self.state.groups.get(name) != group for name in group.names):
                continue
            self.state.absent -= set(group.names)
            stale_names -= set(group.names)
            if (
                group.stored
                and self.state.serialized(group.names, self.state.references()).digest
                != group.content
            ):
                raise ReuseFailed(
                    f"cell {number} leaves other values in {group.names[0]} this time"
                )
        for name in stale_names & self.state.namespace.keys():
            # a later cell changed this variable: the later content is loaded when it is needed
            del self.state.namespace[name]
        self.state.absent -= {each.name for each in skipped.analysis.definitions}

    async def _load(self, names: Iterable[str], late_run: LateRun) -> None:
        """Load those of the variables `names` that are not loaded; if one was not stored, run its cells again."""
        todo = {name for name in names if name in self.state.absent}
        for name in sorted(todo, key=self._first_maker):
            group = self.state.groups.get(name)
            if name not in self.state.absent or group is None:
                continue
            used_names = {each for each in group.uses if each != "*"} - {name}
            await self._load(used_names & self.state.absent - set(group.names), late_run)
            if group.stored:
                try:
                    values = self.state.store.get(group.content, self.state.namespace.__getitem__)
                except Exception as exc:
                    raise ReuseFailed(f"{name} cannot be loaded: {exc}") from exc
                # do not change names that a later cell bound to another value
                current_values = {
                    n: v for n, v in values.items() if self.state.groups.get(n) == group
                }
                self.state.namespace.update(current_values)
                self.state.absent -= set(current_values)
                self.state.loaded[group.names] = ""
                continue
            await self._make_again(group, late_run)

    async def _make_again(self, group: GroupRef, late_run: LateRun) -> None:
        """Run the skipped cells again that computed or changed the variables of `group`, which were not stored."""
        if not any(group in each.entry.groups for each in self.cells):
            raise ReuseFailed(f"{group.names[0]} was not stored: {group.why}")
        recomputed, cells = set(group.names), list[Skipped]()
        for skipped in reversed(self.cells):
            changed_groups = [
                each
                for each in skipped.entry.groups
                if not each.stored and not recomputed.isdisjoint(each.names)
            ]
            if changed_groups:
                cells.append(skipped)
                recomputed |= {name for each in changed_groups for name in each.names}
        for skipped in reversed(cells):
            await self._run_late(skipped, late_run, frozenset(recomputed))
        if not self.state.absent.isdisjoint(group.names):
            raise ReuseFailed(f"{group.names[0]} could not be made again")

    def _first_maker(self, name: str) -> int:
        """Return the index of the first skipped cell that left the present value of a variable; 0 if none did."""
        group = self.state.groups.get(name)
        return next((i for i, each in enumerate(self.cells) if group in each.entry.groups), 0)
