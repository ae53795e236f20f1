"""Record the inputs of each cell of a notebook or script: files, variables, processes, connections, modules.

`Lineage` records the cells of one run; `ScriptCells` tells it where the cells of a script begin and end.

Python's audit hook reports reads through Python. Reads in C (Arrow, HDF5, polars, DuckDB, memory maps) and
reads of child processes are reported by inotify, which watches the folders that may hold such files.
docs/lineage.md lists how each library is observed, docs/decisions/lineage.md gives the reasons.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from rearview.model.cell_lineage import CellLineage, Event, lineage_of
from rearview.runtime.sandbox import clock, entropy
from rearview.runtime.sandbox.program_inputs import listen, names_read, unrecorded_prefixes
from rearview.runtime.sandbox.written_files import for_native_paths
from rearview.runtime.session import Session
from rearview.source.cells import code_hash
from rearview.state.variable_fingerprints import fingerprints
from rearview.store.project import FOLDER
from rearview.store.recorded_inputs import append_cell
from rearview.watched_folders import WatchedFolders, is_database, is_listed_by_import

MOST_FILES = 2000
"""Files of one cell that are hashed; a cell that reads more is not described file by file."""
LEAST_CHECK, CHECKED_SHARE = 0.002, 0.01
"""Seconds that fingerprints of variables may take after a cell, and as a share of the cell's seconds."""
MEASURED_SHARE = 0.002
"""Share of the time that adding up the memory of the process may take."""
CHANGES = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chdir", "os.fork", "os.forkpty", "os.chmod", "os.chown", "os.utime"),
)
"""Audit events that change files without replacing their whole content."""
_CHUNK = 1 << 22
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessMemory:
    """The proportional set size of this process (Pss), known after each cell at little cost.

    The system needs milliseconds to add it up, more with every gigabyte. Where that is more than a small
    share of the time since it was last read, the change of the resident size since then is added.
    """

    def __init__(self) -> None:
        self._read_at = 0.0
        self._cost = 0.0
        """Seconds that reading it took the last time."""
        self._size = self._resident = 0

    def size(self) -> int:
        """Return the size in bytes; 0 if this system does not tell."""
        begun = perf_counter()
        resident = _resident()
        if self._size and self._cost > MEASURED_SHARE * (begun - self._read_at):
            return max(1, self._size + resident - self._resident)
        self._size, self._resident = _proportional_size(), resident
        self._read_at = perf_counter()
        self._cost = self._read_at - begun
        return self._size


class Lineage:
    """Notes the inputs of each cell of one run, and writes them to the folder of the run."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder = folder
        self.root = root
        self._ignored = unrecorded_prefixes()
        self._folders = WatchedFolders()
        self._folders.watch_project(root.rstrip(os.sep))
        self._events: list[Event] = []
        self._hashes: dict[tuple[int, int, int, int], str] = {}
        self._active = False
        self._before = ""
        self._begun = 0.0
        self._variables_read_before: set[str] = set()
        self._modules: set[str] = set()
        self._memory = ProcessMemory()
        self._memory_before = 0
        self._looked_at: set[str] = set()
        """Texts that may be paths, and whose folder is watched or needs no watching."""
        self._folder_now = ""
        self._ids: dict[str, int] = {}
        """By variable: the `id` of its object when the last cell ended."""
        self.written: set[str] = set()
        """Files whose whole content the last cell replaced, as far as Rearview noticed."""
        self.listed: set[str] = set()
        """Folders whose names the last cell read."""
        self.barred = ""
        """Which effect of the last cell on files or the process cannot be repeated from its results; empty if none."""
        self._pid = os.getpid()
        listen(self._notice, "open", "subprocess.Popen", "os.system", "os.posix_spawn")
        listen(self._notice, "socket.connect", "os.listdir", "os.scandir", *CHANGES)
        for_native_paths(self._native)

    def begin(self, source: str, namespace: Mapping[str, object] | None = None) -> None:
        """Note that a cell is about to run."""
        self._memory_before = self._memory_before or self._memory.size()
        self._folders.drain()
        now = os.getcwd()  # noqa: PTH109 - text
        if self._folders.dropped or self._folder_now != now:
            self._folder_now, self._folders.dropped = now, False
            self._looked_at.clear()  # paths now name other folders
        paths = {
            str(value) for value in (namespace or {}).values() if isinstance(value, str | Path)
        }
        for text in paths.union(_texts(source)) - self._looked_at:
            if self._watch_near(text):
                self._looked_at.add(text)
        self._events = []
        self.written, self.listed, self.barred = set(), set(), ""
        self._variables_read_before = set(names_read())
        self._modules = set(sys.modules)
        self._active, self._begun = True, perf_counter()

    def end(
        self,
        cell: int,
        source: str,
        project: Callable[[str], bool],
        variables: Mapping[str, object] | None = None,
        *,
        as_written: str = "",
        used: Mapping[str, int],
    ) -> CellLineage:
        """Write the inputs of a cell, and fingerprints of the `variables` that it left.

        `as_written` is the source before magics became calls; `used` are numbers such as the readings
        of the clock.
        """
        seconds = perf_counter() - self._begun
        self._active = False
        files = [name for kind, name, *_ in self._events if kind == "file"]
        seen = set(files)
        for path in self._folders.drain():
            # a front end writes the notebook while its cells run
            if path not in seen and not self._is_foreign(path) and not path.endswith(".ipynb"):
                self._events.append(("file", path))
        for path in sorted(self._folders.written):
            if self._is_foreign(path) or ".ipynb" in path:
                continue
            # before a file that Python opens is overwritten, Rearview itself reads it
            if path in self._folders.read_first - self.written:
                self._bar(f"it changes {path}, which it reads")
            elif is_database(path):
                self._bar(f"it changes the database {path}")
            self.written.add(path)
        events = [self._hashed(event) for event in self._events[:MOST_FILES]]
        if len(self._events) > MOST_FILES:
            events.append(("more", str(len(self._events) - MOST_FILES)))
        if self._folders.lost:
            events.append(("unseen", self._folders.lost))
        events += [
            ("environment", name, _hash(os.environ.get(name, "").encode()))
            for name in sorted(set(names_read()) - self._variables_read_before)
        ]
        for name in sorted(set(sys.modules) - self._modules):
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str) and project(file):
                events.append(("module", name, self.content(file)))
        events += [(kind, str(count)) for kind, count in sorted(used.items()) if count]
        code = code_hash(as_written or source)
        kept = tuple(dict.fromkeys(events))
        lineage = lineage_of(self._before, code, kept)
        self._before = lineage
        left = self._left(source, variables or {}, seconds)
        done = CellLineage(
            *(cell, code, kept, lineage, seconds, self._memory.size()),
            before=self._memory_before,
            variables=left,
        )
        if os.getpid() == self._pid:
            append_cell(self._folder, done)
        return done

    def _left(self, source: str, variables: Mapping[str, object], seconds: float) -> dict[str, str]:
        """Return fingerprints of the variables that a cell bound or names, within a time budget."""
        named = _names(source)
        fresh = {
            name: value
            for name, value in variables.items()
            if name in named or self._ids.get(name) != id(value)
        }
        self._ids = {name: id(value) for name, value in variables.items()}
        return fingerprints(fresh, max(LEAST_CHECK, CHECKED_SHARE * seconds))

    def _notice(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # a failure here must not stop the program
            if event == "open":
                path, mode, flags = args
                reads = mode in {"r", "rb"} or (mode is None and not int(flags or 0) & 3)
                if isinstance(path, str | bytes):
                    name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - text
                    if self._is_foreign(name):
                        return
                    if reads:
                        self._events.append(("file", name))
                    elif not _is_bytecode(name):
                        replaces = int(flags or 0) & (os.O_TRUNC | os.O_EXCL)
                        self._writes(name, replaces=bool(replaces))
            elif event == "socket.connect":
                self._events.append(("socket", str(args[1])))
            elif event in {"os.listdir", "os.scandir"}:
                if isinstance(args[0], str | bytes):
                    folder = os.path.abspath(os.fsdecode(args[0]))  # noqa: PTH100 - text
                    self._folders.watch(folder)
                    if not (
                        self._is_foreign(f"{folder}{os.sep}")
                        or is_listed_by_import(sys._getframe(1))
                    ):
                        self.listed.add(folder)
            elif event in CHANGES:
                path = os.path.abspath(os.fsdecode(args[0])) if _is_path(args) else ""  # noqa: PTH100
                if (
                    not path
                    or event == "os.chdir"
                    or not (self._is_foreign(path) or _is_bytecode(path))
                ):
                    self._bar(f"it changes the system ({event})")
            else:
                words = args[1] if event == "subprocess.Popen" else args[:1]
                self._events.append(("process", *map(str, words)))

    def _native(self, path: Any, mode: str) -> Any:
        """Note that native code opens a file."""
        if self._active and mode != "r" and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # it may be an open file
                name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - text
                if not self._is_foreign(name):
                    self._writes(name, replaces="w" in mode)
        return path

    def _writes(self, name: str, *, replaces: bool) -> None:
        """Note that a file is opened for writing; with `replaces`, its content is removed first."""
        self.written.add(name)
        if ("file", name) in self._events:
            self._bar(f"it changes {name}, which it reads")
        if not replaces:
            self._bar(f"it changes {name} without replacing it")

    def _bar(self, why: str) -> None:
        self.barred = self.barred or why

    def _watch_near(self, text: str) -> bool:
        """Watch the folder of a text that may be a path; return False if it may come to be one later."""
        if not 0 < len(text) < 4096 or "\0" in text or "\n" in text:
            return True
        with contextlib.suppress(OSError, ValueError):
            path = os.path.abspath(text)  # noqa: PTH100 - text
            if self._is_foreign(path):
                return True
            if os.path.isdir(path):  # noqa: PTH112
                self._folders.watch(path)
                return True
            folder = os.path.dirname(path)  # noqa: PTH120
            if folder != os.sep and os.path.isdir(folder):  # noqa: PTH112
                self._folders.watch(folder)
        return False

    def _is_foreign(self, path: str) -> bool:
        return path.startswith(self._ignored) or f"{os.sep}{FOLDER}{os.sep}" in path

    def _hashed(self, event: Event) -> Event:
        if event[0] != "file":
            return event
        path = event[1]
        shown = path.removeprefix(self.root)
        return ("file", shown, self.content(path))

    def repeat(self, cell: CellLineage) -> None:
        """Write the lineage of a cell whose results were reused, without running it."""
        lineage = lineage_of(self._before, cell.code, cell.events)
        self._before = lineage
        append_cell(self._folder, replace(cell, lineage=lineage, before=self._memory_before))

    def content(self, path: str) -> str:
        """Return the hash of a whole file; an unchanged file is not read again."""
        try:
            about = os.stat(path)  # noqa: PTH116 - hot
            key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
            if key not in self._hashes:
                self._hashes[key] = _hash_file(path)
            return self._hashes[key]
        except OSError:
            return "gone"


class ScriptCells:
    """Records the cells of one script while they run, one after the other."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        texts: Sequence[str],
        fail: Callable[[BaseException], object],
    ) -> None:
        self._texts = texts
        self._belongs = session.belongs
        self._report = fail
        self._lineage: Lineage | None = Lineage(folder, session.root)
        self._clock: list[int] = session.declared.get(clock.ROOT, [0])
        self._chance: list[Any] = session.declared.get(entropy.ROOT, [])
        self._cell = self._last = 0
        self._clock_at, self._drawn = 0, list(self._chance)

    def enter(self, number: int) -> None:
        """End the cell before, and begin cell `number`: the script has reached it."""
        self.end()
        for passed in range(self._last + 1, number):
            # only comments, or the docstring of the script: no statement says that it begins
            self._begin(passed)
            self.end()
        self._begin(number)

    def _begin(self, number: int) -> None:
        if self._lineage is None or not 0 < number <= len(self._texts):
            return
        self._cell = self._last = number
        self._clock_at, self._drawn = self._clock[0], list(self._chance)
        try:
            self._lineage.begin(self._texts[number - 1], _script_variables())
        except Exception as exc:
            self._fail(exc)

    def end(self) -> None:
        """Write the lineage of the cell that was entered last, if there is one."""
        number, self._cell = self._cell, 0
        if self._lineage is None or not number:
            return
        used = {"clock": self._clock[0] - self._clock_at}
        used["chance"] = int(self._drawn != self._chance)
        try:
            text, belongs = self._texts[number - 1], self._belongs
            self._lineage.end(number, text, belongs, _script_variables(), used=used)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        self._lineage = None
        self._report(exc)


def _script_variables() -> dict[str, object]:
    main: ModuleType = sys.modules["__main__"]
    return {name: value for name, value in vars(main).items() if not name.startswith("_")}


def _texts(source: str) -> Iterator[str]:
    """Yield the texts in a cell that may be paths."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _is_bytecode(path: str) -> bool:
    """Return True for the folder of compiled modules, which Python itself makes, and for its files."""
    return f"{os.sep}__pycache__{os.sep}" in f"{path}{os.sep}"


def _is_path(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], str | bytes) and os.sep in os.fsdecode(args[0])


def _names(source: str) -> set[str]:
    """Return the names in a cell."""
    with contextlib.suppress(SyntaxError, ValueError):
        return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return set()


def _hash(data: bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_128(data).hexdigest())


def _hash_file(path: str) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - hot
        while data := file.read(_CHUNK):
            digest.update(data)
    return str(digest.hexdigest())


def _resident() -> int:
    """Return the resident set size of this process in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional_size() -> int:
    """Return the proportional set size of this process in bytes, as the system adds it up now."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
