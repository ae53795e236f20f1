"""Give the results of a cell again, without running it, if everything that it takes in is as it was.

Inputs are the code, the variables that the cell can reach, files, folders that it listed, environment
variables, modules of the project, random states, and settings of libraries. A cell that reads the clock, draws
system randomness, starts processes, opens connections, or changes files without replacing their whole content,
is always run. Skipped cells leave their variables on disk: they are loaded when a cell that runs can reach them.
Their imports and definitions are run first.
"""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.model.lineage import CellLineage
from rearview.runtime.cells.cell_analysis import FILE_QUESTIONS, CellAnalysis, Definition, analyse
from rearview.runtime.cells.library_state import (
    base_digest,
    digest_of,
    library_settings,
    listing,
    random_bytes,
    random_digests,
    set_random,
)
from rearview.runtime.cells.result_store import FORMAT, CellEntry, GroupRef, ResultStore
from rearview.runtime.sandbox.clock import Clock
from rearview.runtime.sandbox.entropy import after_import
from rearview.runtime.sandbox.environment import names_read
from rearview.runtime.sandbox.lineage import Lineage
from rearview.source.cells import code_hash
from rearview.source.notebooks import CodeCell
from rearview.state.code_lookup import PatchedBuiltin
from rearview.state.fingerprints import fingerprints
from rearview.state.variable_groups import (
    BY_REFERENCE,
    EVERYTHING,
    MOST_OBJECTS,
    Serialized,
    codes_of,
    serialize,
    together,
)

BYTES_A_SECOND = 200e6
"""Speed at which contents are assumed to be stored and loaded: slower ones are computed again."""
SMALL = 32 << 20
"""Bytes of a content that is always worth storing."""
OWN_TIMERS = (
    *("sklearn.", "joblib.", "xgboost.", "lightgbm.", "statsmodels.", "scipy.", "torch.", "tqdm."),
    *("threadpoolctl.", "matplotlib."),
)
"""Libraries that time their own work: a duration that they report is no input."""
QUIET_MODULES = frozenset(
    {"numpy", "pandas", "random", "matplotlib", "mpl_toolkits", "seaborn", "time", "gc", "pprint"}
    | {"heapq", "bisect", "joblib", "pickle", "json", "csv", "math", "itertools", "collections"}
    | {
        "IPython",
        "tqdm",
        "scipy",
        "torch",
        "sklearn",
        "statsmodels",
        "builtins",
        "copy",
        "operator",
    }
)
"""Libraries whose functions, called for their effect, change their arguments and nothing else."""
SETTERS = (
    *("set", "use", "config", "register", "enable", "disable", "style", "init", "install", "reset"),
    *("filter", "simplefilter", "option", "theme", "patch"),
)
"""Beginnings of names of functions that change settings all the same."""
_MACHINE = (
    "HOME",
    "PATH",
    "PWD",
    "OLDPWD",
    "TERM",
    "XDG_",
    "TMP",
    "SHLVL",
    "SSH_",
    "JPY_",
    "_",
    "PYDEVD",
)
GIVEN_UP = "KeptResultsUnusable"
"""Error that a cell shows if the notebook has to be run again from its first cell."""
_FIGURES = ("Figure", "FigureBase", "Axes", "_AxesBase", "Artist")


class GivenUp(Exception):  # noqa: N818 - it says what happened
    """The state that a cell needs cannot be brought about from kept results."""


@dataclass(slots=True)
class Skipped:
    """A cell whose results were given again."""

    cell: CodeCell
    entry: CellEntry
    analysis: CellAnalysis
    done: bool = False
    """Whether its set-up part was run after all."""


LateRun = Callable[[CodeCell, str], Awaitable[str]]
"""Runs a text as (part of) a cell without showing anything; returns why it failed, or empty."""


class ResultReuse:
    """The results of one notebook's cells: which can be given again, and the state that they leave."""

    def __init__(
        self,
        store: ResultStore,
        namespace: dict[str, Any],
        hides: Callable[[str], bool],
        lineage: Lineage,
        belongs: Callable[[str], bool],
        clock: Clock | None,
        chance: list[Any],
    ) -> None:
        self.store = store
        self.namespace = namespace
        self.decisions: list[tuple[int, str]] = []
        """Number of each cell, and why it was run; empty: it was not."""
        self._hides = hides
        self._lineage = lineage
        self._belongs = belongs
        self._chance = chance
        self._clock_readers: set[str] = set()
        if clock is not None:
            clock.listeners[:] = [self._clock_readers.add]
        self._base = base_digest()
        self._groups: dict[str, GroupRef] = {}
        """By variable, as they are after the cells so far, loaded or not."""
        self._definitions: dict[str, tuple[Definition, str]] = {}
        self._absent: set[str] = set()
        """Variables that are not loaded."""
        self._loaded: dict[tuple[str, ...], str] = {}
        """Groups that were loaded and not touched since, with the digest that they then have."""
        self._skipped: list[Skipped] = []
        self._random: dict[str, str] = {}
        self._random_due: dict[str, str] = {}
        """Random states that skipped cells left, by library: set before the next cell is run."""
        self._settings = library_settings()
        self._hidden = ""
        """Which cells have set up libraries, in order, as a hash."""
        self._environment: set[str] = set()
        self._modules: dict[str, str] = {}
        self._ids: dict[str, int] = {}
        self._seeded: set[str] = set()
        self._reached: set[str] | None = set()
        self._before: dict[str, str] = {}
        self._module_data: dict[str, str] = {}
        self._drawn: list[Any] = []
        for name in ("random", "numpy.random", "torch"):
            after_import(name, self._watch_seed)

    # -- may the results be given again --

    def find(self, cell: CodeCell) -> tuple[CellEntry | None, str]:
        """Return the execution whose results can be given again, or why the cell must be run."""
        analysis = analyse(cell.source)
        why = "it has not been run before"
        inputs = self._inputs(self._reach(analysis.names))
        for entry in self.store.entries(self._code(cell)):
            why = self._differs(entry, inputs)
            if not why:
                return entry, ""
        return None, why

    def _code(self, cell: CodeCell) -> str:
        return digest_of(code_hash(cell.source), self._base, sorted(cell.tags))

    def _differs(self, entry: CellEntry, inputs: Mapping[str, str]) -> str:
        for name in sorted({*entry.inputs, *inputs}):
            if entry.inputs.get(name) != inputs.get(name):
                return f"{name} is not what it was"
        if entry.settings != self._settings_digest():
            return "settings of libraries are not what they were"
        for library, state in entry.random.items():
            if self._random.get(library) != state:
                return f"it draws random numbers of {library}, whose state is not what it was"
        for path, content in {**entry.files, **entry.written, **entry.modules}.items():
            if self._lineage.content(path) != content:
                return f"{path} is not what it was"
        for path, names in entry.folders.items():
            if listing(path) != names:
                return f"the files in {path} are not those that were there"
        for name, value in entry.environment.items():
            if digest_of(os.environ.get(name)) != value:
                return f"the environment variable {name} is not what it was"
        gone = [g.names[0] for g in entry.groups if g.stored and not self.store.has(g.content)]
        if gone:
            return f"what it left in {gone[0]} was removed from the cache"
        if not self.store.has(entry.messages):
            return "what it showed was removed from the cache"
        return ""

    def _reach(self, names: Iterable[str]) -> set[str] | None:
        """Return the variables that a cell with these names can reach; None: all."""
        todo, seen = list(names), set(names)
        while todo:
            name = todo.pop()
            more: set[str] = set()
            if name in self._definitions:
                more |= self._definitions[name][0].names
            if name in self._groups:
                more |= {*self._groups[name].uses, *self._groups[name].names}
            todo += more - seen
            seen |= more
        if seen & (EVERYTHING - {"gc", "setattr"}) or "*" in seen:
            return None
        return seen & (self._groups.keys() | self._definitions.keys())

    def _inputs(self, reached: set[str] | None) -> dict[str, str]:
        names = {*self._groups, *self._definitions} if reached is None else reached
        return {name: self._content_of(name) for name in names}

    def _content_of(self, name: str) -> str:
        if name in self._definitions:
            return self._definitions[name][1]
        return self._groups[name].content if name in self._groups else ""

    def _settings_digest(self) -> str:
        return digest_of(sorted(self._settings.items()), self._hidden)

    # -- give again --

    def give(self, cell: CodeCell, entry: CellEntry) -> list[dict[str, Any]]:
        """Take over what a cell left, without loading it; return the messages that it sent."""
        analysis = analyse(cell.source)
        messages = msgspec.json.decode(self.store.get_bytes(entry.messages))
        for group in entry.groups:
            self._groups.update(dict.fromkeys(group.names, group))
            self._absent |= set(group.names)
        for name in entry.deleted:
            self._forget(name)
        for definition in analysis.definitions:
            self._define(definition)
            self._absent.add(definition.name)
        for library, state in entry.random_after.items():
            self._random_due[library] = state
            self._random[library] = state
        self._take_settings(entry, analysis)
        self._environment |= set(entry.environment)
        self._modules |= entry.modules
        self._skipped.append(Skipped(cell, entry, analysis))
        self.decisions.append((cell.number, ""))
        self._lineage.repeat(
            CellLineage(
                *(cell.number, code_hash(cell.source), entry.events, ""),
                *(entry.seconds, entry.size),
            )
        )
        return list(messages)

    def _take_settings(self, entry: CellEntry, analysis: CellAnalysis) -> None:
        self._settings |= msgspec.json.decode(entry.settings_after)
        if entry.again:
            self._hide(analysis, entry.inputs)

    def _hide(self, analysis: CellAnalysis, inputs: Mapping[str, str]) -> None:
        """Take in that a cell set up something outside the variables: later cells depend on it."""
        self._hidden = digest_of(self._hidden, analysis.digest, sorted(inputs.items()))

    def _define(self, definition: Definition) -> None:
        self._groups.pop(definition.name, None)
        parts = [self._content_of(name) for name in sorted(definition.at_once)]
        self._definitions[definition.name] = (definition, digest_of(definition.digest, parts))

    def _forget(self, name: str) -> None:
        self._groups.pop(name, None)
        self._definitions.pop(name, None)
        self._absent.discard(name)

    # -- bring about the state that a cell needs --

    async def prepare(self, cell: CodeCell, late_run: LateRun) -> None:
        """Bring about the state that a cell is about to find; raise GivenUp if that cannot be done."""
        for skipped in self._skipped:
            if skipped.done:
                continue
            skipped.done = True
            if skipped.entry.again:
                await self._run_late(skipped, late_run)
            elif skipped.analysis.preamble:
                await self._run_preamble(skipped, late_run)
        reached = self._reach(analyse(cell.source).names)
        await self._load(self._absent if reached is None else reached, late_run)
        for library, state in self._random_due.items():
            set_random(library, pickle.loads(self.store.get_bytes(state)))
        self._random_due = {}
        live = library_settings()
        different = [k for k, value in live.items() if self._settings.get(k, value) != value]
        if different and self._skipped:
            raise GivenUp(f"the settings of {different[0]} cannot be brought about")
        self._settings |= live

    async def _run_preamble(self, skipped: Skipped, late_run: LateRun) -> None:
        at_once = {name for each in skipped.analysis.definitions for name in each.at_once}
        reached = self._reach(at_once)
        await self._load(self._absent if reached is None else reached, late_run)
        failed = await late_run(skipped.cell, skipped.analysis.preamble)
        if failed:
            raise GivenUp(
                f"the imports and definitions of cell {skipped.cell.number} fail: {failed}"
            )
        defined = {each.name for each in skipped.analysis.definitions}
        for name in [*self._absent & self.namespace.keys()]:
            group = self._groups.get(name)
            if group is None:
                if name in defined:
                    self._absent.discard(name)
            elif self._is_reference(name, group):
                self._absent.discard(name)
            else:
                del self.namespace[name]  # it was bound again later: that content is loaded

    def _is_reference(self, name: str, group: GroupRef) -> bool:
        """Return True if a name is bound to the module, function or class that a group says."""
        value = self.namespace[name]
        return (
            not group.stored
            and isinstance(value, BY_REFERENCE)
            and self._reference(name, value, "").content == group.content
        )

    async def _run_late(
        self, skipped: Skipped, late_run: LateRun, chain: frozenset[str] = frozenset()
    ) -> None:
        """Run a skipped cell after all, with the inputs that it had.

        `chain` are variables that skipped cells before it have just made, for this one to change.
        """
        entry, number = skipped.entry, skipped.cell.number
        skipped.done = True
        if entry.random:
            raise GivenUp(f"cell {number} would have to run again with random states of that time")
        older: list[str] = []
        for name, content in entry.inputs.items():
            if self._content_of(name) == content or (name in chain and name in self.namespace):
                continue
            if name not in self._absent or not self.store.has(content):
                raise GivenUp(
                    f"cell {number} would have to run again, and {name} has changed since"
                )
            older.append(content)
        left = {name for group in entry.groups for name in group.names} | set(entry.deleted)
        made = {name: group for group in entry.groups for name in group.names}
        for name in left - chain:
            if name not in self._absent and self._groups.get(name) != made.get(name):
                raise GivenUp(
                    f"cell {number} would have to run again, and {name} has changed since"
                )
        current = {n for n, content in entry.inputs.items() if self._content_of(n) == content}
        await self._load(current - chain, late_run)
        stale = left - chain
        for content in older:
            values = self.store.get(content, self.namespace.__getitem__)
            self.namespace.update(values)
            stale |= values.keys() - chain
        failed = await late_run(skipped.cell, skipped.cell.text)
        if failed:
            raise GivenUp(f"cell {number} fails when it is run again: {failed}")
        for group in entry.groups:
            if any(self._groups.get(name) != group for name in group.names):
                continue
            self._absent -= set(group.names)
            stale -= set(group.names)
            if (
                group.stored
                and self._serialized(group.names, self._references()).digest != group.content
            ):
                raise GivenUp(f"cell {number} leaves other values in {group.names[0]} this time")
        for name in stale & self.namespace.keys():
            del self.namespace[
                name
            ]  # it was changed later: that content is loaded when it is needed
        self._absent -= {each.name for each in skipped.analysis.definitions}

    async def _load(self, names: Iterable[str], late_run: LateRun) -> None:
        """Load variables, or run the cells again that make those that cannot be loaded."""
        todo = {name for name in names if name in self._absent}
        for name in sorted(todo, key=self._first_maker):
            group = self._groups.get(name)
            if name not in self._absent or group is None:
                continue
            needed = {each for each in group.uses if each != "*"} - {name}
            await self._load(needed & self._absent - set(group.names), late_run)
            if group.stored:
                try:
                    values = self.store.get(group.content, self.namespace.__getitem__)
                except Exception as exc:
                    raise GivenUp(f"{name} cannot be loaded: {exc}") from exc
                # a name that was bound to something else since is left alone
                current = {n: v for n, v in values.items() if self._groups.get(n) == group}
                self.namespace.update(current)
                self._absent -= set(current)
                self._loaded[group.names] = ""
                continue
            await self._make_again(group, late_run)

    async def _make_again(self, group: GroupRef, late_run: LateRun) -> None:
        """Run the skipped cells again that made variables which could not be stored, and changed them."""
        if not any(group in each.entry.groups for each in self._skipped):
            raise GivenUp(f"{group.names[0]} was not kept: {group.why}")
        chain, cells = set(group.names), list[Skipped]()
        for skipped in reversed(self._skipped):
            touched = [
                each
                for each in skipped.entry.groups
                if not each.stored and not chain.isdisjoint(each.names)
            ]
            if touched:
                cells.append(skipped)
                chain |= {name for each in touched for name in each.names}
        for skipped in reversed(cells):
            await self._run_late(skipped, late_run, frozenset(chain))
        if not self._absent.isdisjoint(group.names):
            raise GivenUp(f"{group.names[0]} could not be made again")

    def _first_maker(self, name: str) -> int:
        group = self._groups.get(name)
        return next((i for i, each in enumerate(self._skipped) if group in each.entry.groups), 0)

    # -- a cell that is run --

    def begin(self, cell: CodeCell) -> None:
        """Take note of the state before a cell is run."""
        self._reached = self._reach(analyse(cell.source).names)
        self._clock_readers.clear()
        self._seeded.clear()
        self._drawn = list(self._chance)
        for names in self._loaded:
            if not self._loaded[names] and self._touches(names):
                try:
                    self._loaded[names] = self._serialized(names, self._references()).digest
                except Exception:
                    self._loaded[names] = "?"
        self._ids = {name: id(value) for name, value in self._variables().items()}
        self._before = random_digests()
        self._random |= {k: self._random.get(k, v) for k, v in self._before.items()}
        self._module_data = self._project_data()
        self._threads = {thread.ident for thread in threading.enumerate()}

    def _touches(self, names: Iterable[str]) -> bool:
        return self._reached is None or not self._reached.isdisjoint(names)

    def end(
        self,
        cell: CodeCell,
        done: CellLineage | None,
        messages: Sequence[dict[str, Any]],
        problem: str,
        why: str,
    ) -> None:
        """Take in what a cell that was run took in and left; keep it if that can be given again.

        `problem` says why it cannot, as far as the kernel knows; `why` is why it was run.
        """
        analysis = analyse(cell.source)
        inputs = self._inputs(self._reached)
        settings = self._settings_digest()
        problem = problem or self._problem(analysis, done)
        for definition in analysis.definitions:
            self._define(definition)
        used, after = self._random_use()
        key = digest_of(
            self._code(cell), sorted(inputs.items()), settings, sorted(used.items()), problem
        )
        if problem:
            key = secrets.token_hex(16)  # nothing follows from the inputs
        groups, deleted = self._left(key, done.seconds if done else 0.0, analysis)
        now = library_settings()
        again = self._sets_up(analysis, messages) or any(
            self._settings.get(library, value) != value for library, value in now.items()
        )
        self._settings |= now
        if again:
            self._hide(analysis, inputs)
        reason = f"{why}; {problem}" if problem and why != problem else why
        self.decisions.append((cell.number, reason))
        if problem or done is None:
            return
        entry = self._entry(key, inputs, settings, used, after, groups, deleted, again, done)
        shown = self.store.put_bytes(msgspec.json.encode(list(messages)))
        self.store.add(self._code(cell), msgspec.structs.replace(entry, messages=shown))

    def _entry(
        self,
        key: str,
        inputs: dict[str, str],
        settings: str,
        used: dict[str, str],
        after: dict[str, str],
        groups: Sequence[GroupRef],
        deleted: Sequence[str],
        again: bool,
        done: CellLineage,
    ) -> CellEntry:
        content, root = self._lineage.content, Path(self._lineage.root)
        files = {
            str(root / event[1]): event[2]
            for event in done.events
            if event[0] == "file" and str(root / event[1]) not in self._lineage.written
        }
        self._environment |= {
            name for name in names_read() if not name.startswith((*_MACHINE, "REARVIEW", "PYTHON"))
        }
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and self._belongs(file):
                self._modules[file] = content(file)
        return CellEntry(
            format=FORMAT,
            key=key,
            inputs=inputs,
            settings=settings,
            random=used,
            files=files,
            folders={path: listing(path) for path in self._lineage.listed},
            environment={name: digest_of(os.environ.get(name)) for name in self._environment},
            modules=dict(self._modules),
            groups=tuple(groups),
            deleted=tuple(deleted),
            random_after=after,
            settings_after=msgspec.json.encode(self._settings).decode(),
            written={path: content(path) for path in self._lineage.written},
            again=again,
            seconds=done.seconds,
            size=done.size,
            events=done.events,
        )

    def _problem(self, analysis: CellAnalysis, done: CellLineage | None) -> str:
        """Return why the results of a cell cannot be given again; empty if they can."""
        if done is None:
            return "its inputs were not recorded"
        if self._lineage.barred:
            return self._lineage.barred
        kinds = {event[0]: event for event in done.events}
        for kind in ("unseen", "more"):
            if kind in kinds:
                return f"its inputs are not all known ({kinds[kind][1]})"
        if analysis.only_preamble:
            return ""  # what libraries do while they are imported is no input
        if analysis.refused:
            return analysis.refused
        reached = self._reached if self._reached is not None else set(self._definitions)
        for name in sorted(reached & self._definitions.keys()):
            asked = self._definitions[name][0].attributes & FILE_QUESTIONS
            if asked:
                return f"{name} asks the file system ({min(asked)})"
        readers = sorted(
            each for each in self._clock_readers if not f"{each}.".startswith(OWN_TIMERS)
        )
        if readers:
            return f"it reads the clock ({'the cell' if readers[0] == '__main__' else readers[0]})"
        if self._chance != self._drawn:
            return "it draws randomness of the system"
        if "process" in kinds:
            return f"it starts a process ({' '.join(kinds['process'][1:])[:60]})"
        if "socket" in kinds:
            return f"it opens a connection ({kinds['socket'][1]})"
        new = [t for t in threading.enumerate() if t.ident not in self._threads and not t.daemon]
        if new:
            return f"it leaves a thread running ({new[0].name})"
        changed = [
            name
            for name, value in self._project_data().items()
            if name in self._module_data and self._module_data[name] != value
        ]
        return f"it changes data of the module {changed[0]}" if changed else ""

    def _sets_up(self, analysis: CellAnalysis, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if a cell changes something outside its variables, such as a library's settings."""
        if analysis.sets_up:
            return True
        calls = set(analysis.calls)
        if not any(message["type"] == "execute_result" for message in messages):
            calls.add(analysis.last_call)
        reached = self._reached if self._reached is not None else set(self._definitions)
        for name in reached & self._definitions.keys():
            calls |= self._definitions[name][0].calls
        return any(map(self._sets_library, calls - {""}))

    def _sets_library(self, call: str) -> bool:
        root, _, rest = call.partition(".")
        value = self.namespace.get(root.rstrip("="))
        if call.endswith("="):
            return isinstance(value, types.ModuleType)
        if isinstance(value, types.ModuleType):
            module = value.__name__
        elif isinstance(value, type) or callable(value):
            module = str(getattr(value, "__module__", None) or "")
            if rest and not isinstance(value, type):
                return False  # a method of an object
        else:
            return False
        if module == "__main__":
            return False  # its own calls are looked at
        name = call.rpartition(".")[2]
        return module.partition(".")[0] not in QUIET_MODULES or name.startswith(SETTERS)

    # -- variables --

    def _variables(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.namespace.items()
            if not (self._hides(name) or (name.startswith("__") and name.endswith("__")))
            and not (name.strip("_").isdigit() and name.startswith("_"))
            and name not in {"_", "__", "___", "In", "Out", "exit", "quit", "open"}
        }

    def _references(self) -> dict[int, str]:
        """Return the functions and classes that the notebook defines, by their address."""
        return {
            id(self.namespace[name]): name for name in self._definitions if name in self.namespace
        }

    def _serialized(self, names: tuple[str, ...], references: Mapping[int, str]) -> Serialized:
        return serialize(
            {name: self.namespace[name] for name in names},
            by_name=lambda obj: (
                references.get(id(obj)) if isinstance(obj, types.FunctionType | type) else None
            ),
            refuse=_refused,
            owned=True,
        )

    def _left(
        self, key: str, seconds: float, analysis: CellAnalysis
    ) -> tuple[list[GroupRef], list[str]]:
        """Return the variables that a cell changed, in groups, and those that it deleted."""
        live = self._variables()
        defined = {each.name for each in analysis.definitions}
        for name in [*self._definitions]:
            # a name that was defined as a function and is something else now
            value = live.get(name)
            if name in live and name not in defined and id(value) != self._ids.get(name, id(value)):
                del self._definitions[name]
        changed: list[GroupRef] = []
        rest: dict[str, Any] = {}
        for name, value in live.items():
            if name in self._definitions:
                continue
            if isinstance(value, BY_REFERENCE):
                reference = self._reference(name, value, key)
                if self._groups.get(name) != reference:
                    changed.append(reference)
                    self._groups[name] = reference
            else:
                rest[name] = value
        references = self._references()
        for names in together(rest):
            group = self._groups.get(names[0])
            same = group is not None and group.names == names
            moved = any(self._ids.get(name) != id(live[name]) for name in names)
            if same and not moved and not self._touches(names):
                continue
            fresh = self._grouped(names, key, seconds, references)
            if same and group is not None:
                unchanged = fresh.content == group.content and group.stored == fresh.stored
                if unchanged or (not moved and self._loaded.get(names) == fresh.content):
                    continue
            self._loaded.pop(names, None)
            self._groups.update(dict.fromkeys(names, fresh))
            changed.append(fresh)
        known = {*self._groups, *self._definitions} - self._absent
        deleted = sorted(known - live.keys())
        for name in deleted:
            self._forget(name)
        return changed, deleted

    def _reference(self, name: str, value: Any, key: str) -> GroupRef:
        if isinstance(value, types.ModuleType):
            return GroupRef((name,), f"module {value.__name__}")
        module = getattr(value, "__module__", None) or ""
        if module != "__main__":
            return GroupRef((name,), f"{module} {getattr(value, '__qualname__', name)}")
        uses = {each for code in codes_of(value) for each in code.co_names}
        return GroupRef((name,), digest_of(key, name), uses=tuple(sorted(uses)), why="a function")

    def _grouped(
        self, names: tuple[str, ...], key: str, seconds: float, references: Mapping[int, str]
    ) -> GroupRef:
        try:
            content = self._serialized(names, references)
        except Exception as exc:
            why = str(exc).partition("\n")[0][:200] or type(exc).__name__
            return GroupRef(names, digest_of(key, names), uses=self._uses(names), why=why)
        uses = tuple(sorted(_persistent_names(content.data) & set(references.values())))
        if content.nbytes > max(SMALL, seconds * BYTES_A_SECOND):
            return GroupRef(names, content.digest, uses=uses, why="computing it again is faster")
        self.store.put(content)
        return GroupRef(names, content.digest, stored=True, uses=uses)

    def _uses(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names that functions and methods of the notebook inside some variables use."""
        found: set[str] = set()
        todo, seen = [self.namespace[name] for name in names], set[int]()
        while todo:
            value = todo.pop()
            if id(value) in seen or isinstance(value, types.ModuleType):
                continue
            seen.add(id(value))
            if len(seen) > MOST_OBJECTS:
                return ("*",)
            kind = value if isinstance(value, types.FunctionType | type) else type(value)
            if kind.__module__ == "__main__":
                found |= {each for code in codes_of(value) for each in code.co_names}
                found.add(kind.__name__)
            if not isinstance(value, types.FunctionType | type):
                todo += gc.get_referents(value)
        return tuple(sorted(found))

    # -- outside the variables --

    def _random_use(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the random states that a cell drew from, and those that it left, by library."""
        used: dict[str, str] = {}
        after: dict[str, str] = {}
        for library, digest in random_digests().items():
            before = self._before.get(library)
            if digest == before:
                continue
            if before is not None and library not in self._seeded:
                used[library] = before
            if before is not None or library in self._seeded:
                after[library] = self.store.put_bytes(random_bytes(library))
                self._random[library] = after[library]
            else:
                self._random[library] = digest
        return used, after

    def _watch_seed(self, module: types.ModuleType) -> None:
        """Notice when a random state is set before anything was drawn from it in a cell."""
        library = {"numpy.random": "numpy"}.get(module.__name__, module.__name__)
        name = "manual_seed" if library == "torch" else "seed"
        real = getattr(module, name)
        # the state with which it was imported: nothing was drawn from it yet
        self._before.setdefault(library, random_digests()[library])

        def seed(*args: Any, **kwargs: Any) -> Any:
            if random_digests().get(library) == self._before.get(library):
                self._seeded.add(library)
            return real(*args, **kwargs)

        setattr(module, name, PatchedBuiltin(seed, real))

    def _project_data(self) -> dict[str, str]:
        """Return a fingerprint of the data of each module of the project."""
        found: dict[str, str] = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name != "__main__" and isinstance(file, str) and self._belongs(file):
                data = {
                    key: value
                    for key, value in vars(module).items()
                    if not key.startswith("__") and not isinstance(value, BY_REFERENCE)
                }
                known = fingerprints(data, 0.05)
                found[name] = digest_of(
                    sorted((k, known.get(k, str(id(v)))) for k, v in data.items())
                )
        return found


def _refused(obj: Any) -> str:
    """Return why an object cannot be stored with the others; empty if it can."""
    kind = type(obj)
    if kind.__module__.startswith("matplotlib.") and any(
        base.__name__ in _FIGURES for base in kind.__mro__
    ):
        return "a matplotlib figure, which is shown once"
    if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
        return f"{obj.__qualname__}, which is not defined at the top level of a cell"
    if kind.__module__ == "numpy" and kind.__name__ == "memmap":
        return "an array that is mapped from a file"
    return ""


def _persistent_names(data: bytes) -> set[str]:
    """Return the texts of a pickle: among them are the names of what it refers to."""
    import pickletools

    return {arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)}
