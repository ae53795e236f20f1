"""Reuse the results of a cell, without running it, if none of its inputs has changed.

Inputs are the code, the variables that the cell can reach, files, folders that it listed, environment
variables, modules of the project, random states, and settings of libraries. A cell that reads the clock, draws
random bytes of the system, starts processes, opens connections, or changes files without replacing their whole content,
is always run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.model.cell_lineage import CellLineage
from rearview.runtime.cells.cell_analysis import analyse
from rearview.runtime.cells.cell_effects import CellEffects, ProjectModules
from rearview.runtime.cells.cell_inputs import Lineage
from rearview.runtime.cells.library_state import (
    RandomUse,
    base_digest,
    digest_of,
    library_settings,
    listing,
    settings_bytes,
)
from rearview.runtime.cells.result_store import FORMAT, CellEntry, GroupRef, ResultStore
from rearview.runtime.cells.skipped_cells import LateRun, Skipped, SkippedCells
from rearview.runtime.cells.state_digests import NotebookState
from rearview.runtime.sandbox.clock import Clock
from rearview.runtime.sandbox.program_inputs import names_read
from rearview.source.cells import code_hash
from rearview.source.notebooks import CodeCell

STORED_FILES = 32 << 20
"""Size in bytes up to which the files that a cell wrote are stored.

If a file is not stored, results of the cell are reused only while the file on disk is unchanged.
"""
_MACHINE = (
    *("HOME", "PATH", "PWD", "OLDPWD", "TERM", "XDG_", "TMP", "SHLVL", "SSH_", "JPY_", "_"),
    "PYDEVD",
)
"""Prefixes of the names of environment variables that describe the machine: these are no inputs of a cell."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """The inputs of a cell that are not Python variables, as name or path -> hash of the content."""

    files: dict[str, str]
    folders: dict[str, str]
    environment: dict[str, str]
    environment_after: dict[str, str]
    """Environment variable that the cell changed -> hash of its new value."""
    modules: dict[str, str]


class CellCache:
    """Finds stored results for the cells of one notebook, reuses them, and stores the results of cells that run."""

    def __init__(
        self,
        store: ResultStore,
        namespace: dict[str, Any],
        hides: Callable[[str], bool],
        lineage: Lineage,
        belongs: Callable[[str], bool],
        clock: Clock | None,
        stream_position: list[Any],
    ) -> None:
        self.store = store
        self.state = NotebookState(store, namespace, hides)
        self.decisions: list[tuple[int, str]] = []
        """(number of a cell, reason why it was run) in order; the reason is empty if its results were reused."""
        self._lineage = lineage
        self._project_modules = ProjectModules(belongs)
        self._base = base_digest()
        self._random = RandomUse()
        self._skipped = SkippedCells(self.state, self._random)
        self._effects = CellEffects(
            self.state, lineage, self._project_modules, clock, stream_position
        )
        self._used_variables: set[str] | None = set()
        """Names of variables whose earlier values the current cell can use, or None if it can use all variables."""
        self._environment: set[str] = set()
        """Names of environment variables that the cells so far have read."""
        self._variables_before: dict[str, str] = {}
        self._set_variables: dict[str, str] = {}
        """Environment variable that the cells so far have changed -> hash of its value."""
        self._modules: dict[str, str] = {}

    def find(self, cell: CodeCell) -> tuple[CellEntry | None, str]:
        """Return (stored execution of `cell` with equal inputs, ""), or (None, reason why the cell must run)."""
        analysis = analyse(cell.source)
        why = "it has not been run before"
        inputs = self.state.inputs(self.state.reach(analysis.reads, analysis.definitions))
        for entry in self.store.entries(self._code(cell)):
            why = self._differs(entry, inputs)
            if not why:
                return entry, ""
        return None, why

    def _code(self, cell: CodeCell) -> str:
        return digest_of(code_hash(cell.source), self._base, sorted(cell.tags))

    def _differs(self, entry: CellEntry, inputs: Mapping[str, str]) -> str:
        """Return the reason why the results of the execution `entry` cannot be reused; empty if they can.

        `inputs` are the digests of the variables that the cell can use now.
        """
        for name in sorted({*entry.inputs, *inputs}):
            if entry.inputs.get(name) != inputs.get(name):
                return f"{name} has changed"
        if entry.settings != self.state.settings_digest():
            return "settings of libraries have changed"
        initial_states = entry.random_loaded if entry.seeds == self._random.seeds else {}
        for library, state in entry.random.items():
            if self._random.states.get(library, initial_states.get(library)) != state:
                return f"it draws random numbers of {library}, whose state has changed"
        if entry.draws_seeds and entry.seeds != self._random.seeds:
            return "it draws the seed of a random generator from the system"
        before = entry.random_before_imports
        drawn = not self._random.only_imports_drew
        if before and drawn and self._random.states.get("random") != before:
            return "its imports draw random numbers of random, whose state has changed"
        for path, content in {**entry.files, **entry.modules}.items():
            if self._lineage.content(path) != content:
                return f"{path} has changed"
        for path, names in entry.folders.items():
            if listing(path) != names:
                return f"the files in {path} have changed"
        for name, value in entry.environment.items():
            if self._set_variables.get(name, digest_of(os.environ.get(name))) != value:
                return f"the environment variable {name} has changed"
        return self._missing_result(entry)

    def _missing_result(self, entry: CellEntry) -> str:
        """Return a sentence about a result of `entry` that is not stored any more; empty if all results are stored."""
        for path, content in entry.written.items():
            if self._lineage.content(path) != content and not self.store.has(content):
                return f"{path}, which it wrote, has changed"
        for library, digest in entry.settings_values.items():
            if not self.store.has(digest):
                return f"the settings of {library} that it left were removed from the cache"
        removed = [g.names[0] for g in entry.groups if g.stored and not self.store.has(g.content)]
        if removed:
            return f"its value of {removed[0]} was removed from the cache"
        if not self.store.has(entry.messages):
            return "its output was removed from the cache"
        return ""

    def reuse(self, cell: CodeCell, entry: CellEntry) -> list[dict[str, Any]]:
        """Skip `cell` and take over the results of the execution `entry`; return the messages with its output.

        Its variables are loaded later, when a cell that runs can reach them.
        """
        analysis = analyse(cell.source)
        messages = msgspec.json.decode(self.store.get_bytes(entry.messages))
        for group in entry.groups:
            self.state.groups.update(dict.fromkeys(group.names, group))
            self.state.absent |= set(group.names)
        for name in entry.deleted:
            self.state.forget(name)
        for name in {*entry.deleted, *(name for group in entry.groups for name in group.names)}:
            # remove the value that the variable had before this cell
            self.state.namespace.pop(name, None)
        for definition in analysis.definitions:
            self.state.define(definition, entry.definitions.get(definition.name, ""))
            self.state.absent.add(definition.name)
        if entry.seeds == self._random.seeds:
            self._random.states = {**entry.random_loaded, **self._random.states}
        before = entry.random_before_imports
        for library, state in entry.random_after.items():
            if library == "random":
                if before and self._random.states.get(library) != before:
                    # the imports of the cell would draw from a different state than recorded: the next state is unknown
                    self._random.states[library] = secrets.token_hex(16)
                    continue
                self._random.only_imports_drew = False
            self._random.due_states[library] = state
            self._random.states[library] = state
        self._write_files(entry)
        self.state.settings |= msgspec.json.decode(entry.settings_after)
        self.state.settings_values |= entry.settings_values
        self.state.add_setup(entry.setup)
        self._environment |= set(entry.environment)
        self._set_variables |= entry.environment_after
        self._modules |= entry.modules
        self._skipped.cells.append(Skipped(cell, entry, analysis))
        self.decisions.append((cell.number, ""))
        self._lineage.repeat(
            CellLineage(
                *(cell.number, code_hash(cell.source), entry.events, ""),
                *(entry.seconds, entry.size),
            )
        )
        return list(messages)

    def _write_files(self, entry: CellEntry) -> None:
        """Write the files that the execution `entry` wrote, unless they have the same content on disk."""
        for path, content in entry.written.items():
            if self._lineage.content(path) != content:
                data = self.store.get_bytes(content)
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(data)

    def has_skipped(self) -> bool:
        """Return True if a cell of this run was skipped."""
        return bool(self._skipped.cells)

    async def prepare(self, cell: CodeCell, late_run: LateRun) -> None:
        """Restore the state that `cell` needs, before it runs; raise ReuseFailed if that is impossible."""
        await self._skipped.prepare(cell, late_run)

    def begin(self, cell: CodeCell) -> None:
        """Remember the state before `cell` runs, to find out afterwards what the cell has changed."""
        state = self.state
        analysis = analyse(cell.source)
        state.reached = state.reach(analysis.names, analysis.definitions)
        self._used_variables = state.reach(analysis.reads, analysis.definitions)
        state.begin()
        self._variables_before = dict(os.environ)
        self._random.begin()
        self._effects.begin(analysis)

    def end(
        self,
        cell: CodeCell,
        lineage: CellLineage | None,
        messages: Sequence[dict[str, Any]],
        problem: str,
        why: str,
    ) -> None:
        """Determine the inputs and results of `cell`, which has run; store them if the results can be reused.

        `messages` are its output. `problem` is a reason that the caller knows against reuse, or empty; `why` is the reason
        why the cell was run.
        """
        analysis = analyse(cell.source)
        inputs = self.state.inputs(self._used_variables)
        settings = self.state.settings_digest()
        problem = problem or self._effects.problem(analysis, lineage)
        for definition in analysis.definitions:
            self.state.define(definition)
        drawn_states, left_states = self._random.take(self.store.put_bytes)
        reads = self._reads(lineage)
        drawn = (
            sorted(drawn_states.items()),
            self._random.seeds if self._effects.draws_seeds() else "",
        )
        outside = digest_of(reads.files, reads.folders, drawn)
        key = digest_of(
            *(self._code(cell), sorted(inputs.items()), settings, outside),
            *(reads.environment, reads.modules),
        )
        if problem:
            key = secrets.token_hex(16)  # unique: the inputs do not determine the results
        groups, deleted = self.state.take_changes(
            key, lineage.seconds if lineage else 0.0, analysis
        )
        bound = {n for group in groups if not self.state.is_import(group) for n in group.names}
        definitions = self.state.digest_definitions(
            analysis.definitions, bound, key, key if problem else outside
        )
        settings_now = library_settings()
        values = {
            library: self.store.put_bytes(settings_bytes(library))
            for library, value in settings_now.items()
            if self.state.settings.get(library) != value
        }
        setup = self._effects.setup(analysis, messages, inputs, outside)
        self.state.settings |= settings_now
        self.state.settings_values |= values
        self.state.add_setup(setup.digest if setup else "")
        reason = f"{why}; {problem}" if problem and why != problem else why
        self.decisions.append((cell.number, reason))
        if problem or lineage is None:
            return
        entry = msgspec.structs.replace(
            self._entry(
                key, inputs, settings, drawn_states, left_states, groups, deleted, lineage, reads
            ),
            definitions=definitions,
            messages=self.store.put_bytes(msgspec.json.encode(list(messages))),
            again=setup is not None and not setup.text,
            setup=setup.digest if setup else "",
            setup_text=setup.text if setup else "",
            settings_values=values,
        )
        self.store.add(self._code(cell), entry)

    def _reads(self, lineage: CellLineage | None) -> _Reads:
        """Return the inputs of the last cell that are not Python variables."""
        content, root = self._lineage.content, Path(self._lineage.root)
        paths = {
            str(root / event[1]): event[2]
            for event in (lineage.events if lineage else ())
            if event[0] == "file"
        }
        self._environment |= {
            name for name in names_read() if not name.startswith((*_MACHINE, "REARVIEW", "PYTHON"))
        }
        changed = {
            name: digest_of(os.environ.get(name))
            for name in self._environment
            if os.environ.get(name) != self._variables_before.get(name)
        }
        self._set_variables |= changed
        for _, module in self._project_modules.of_project():
            self._modules[str(module.__file__)] = content(str(module.__file__))
        written = self._lineage.written
        return _Reads(
            {path: paths[path] for path in sorted(paths) if path not in written},
            {path: listing(path) for path in sorted(self._lineage.listed)},
            {
                name: digest_of(self._variables_before.get(name))
                for name in sorted(self._environment)
            },
            changed,
            dict(sorted(self._modules.items())),
        )

    def _store_written(self) -> dict[str, str]:
        """Return path -> hash of the files that the last cell wrote; store them up to STORED_FILES bytes in total."""
        written: dict[str, str] = {}
        free_bytes = STORED_FILES
        for path in sorted(self._lineage.written):
            written[path] = self._lineage.content(path)
            with contextlib.suppress(OSError):
                size = Path(path).stat().st_size
                if size <= free_bytes and self.store.put_bytes(Path(path).read_bytes()):
                    free_bytes -= size
        return written

    def _entry(
        self,
        key: str,
        inputs: dict[str, str],
        settings: str,
        drawn_states: dict[str, str],
        left_states: dict[str, str],
        groups: Sequence[GroupRef],
        deleted: Sequence[str],
        lineage: CellLineage,
        reads: _Reads,
    ) -> CellEntry:
        return CellEntry(
            format=FORMAT,
            key=key,
            inputs=inputs,
            settings=settings,
            random=drawn_states,
            random_before_imports=self._random.by_imports,
            draws_seeds=self._effects.draws_seeds(),
            seeds=self._random.seeds,
            random_loaded=dict(self._random.loaded),
            files=reads.files,
            folders=reads.folders,
            environment=reads.environment,
            environment_after=reads.environment_after,
            modules=reads.modules,
            groups=tuple(groups),
            deleted=tuple(deleted),
            random_after=left_states,
            settings_after=msgspec.json.encode(self.state.settings).decode(),
            written=self._store_written(),
            seconds=lineage.seconds,
            size=lineage.size,
            events=lineage.events,
        )
