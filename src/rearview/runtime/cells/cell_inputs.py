"""Record the inputs of each cell of a notebook or script: files, variables, processes, connections, modules.

`Lineage` records the cells of one run. In a script, `ScriptCells` calls it at the beginning and end of each cell.

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
from rearview.opened_files import WatchedFolders, is_database, is_listed_by_import
from rearview.runtime.base_session import Session
from rearview.runtime.sandbox import clock, entropy
from rearview.runtime.sandbox.program_inputs import listen, names_read, unrecorded_prefixes
from rearview.runtime.sandbox.written_files import for_native_paths
from rearview.source.cells import code_hash
from rearview.state.variable_fingerprints import fingerprints
from rearview.store.project import FOLDER
from rearview.store.recorded_inputs import append_cell

MOST_FILES = 2000
"""Number of files up to which the files of one cell are hashed; of further files, only the number is recorded."""
LEAST_CHECK, CHECKED_SHARE = 0.002, 0.01
"""Time limit for fingerprints of variables after a cell: the larger of seconds and a fraction of the cell's time."""
MEASURED_SHARE = 0.002
"""Fraction of the time that measuring the memory of the process may take."""
CHANGES = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chdir", "os.fork", "os.forkpty", "os.chmod", "os.chown", "os.utime"),
)
"""Audit events of changes to files or the process that stored results of a cell cannot repeat."""
_CHUNK = 1 << 22
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessMemory:
    """Measures the memory of this process after each cell: its proportional set size (Pss).

    The system needs some milliseconds per gigabyte to compute the Pss. If the last reading took more than
    MEASURED_SHARE of the time since then, `size` returns that reading plus the change of the resident set size.
    """

    def __init__(self) -> None:
        self._read_at = 0.0
        self._cost = 0.0
        """Seconds that the last reading of the Pss took."""
        self._size = self._resident = 0

    def size(self) -> int:
        """Return the memory of this process in bytes; 0 if this system does not report it."""
        begun = perf_counter()
        resident = _resident()
        if self._size and self._cost > MEASURED_SHARE * (begun - self._read_at):
            return max(1, self._size + resident - self._resident)
        self._size, self._resident = _proportional_size(), resident
        self._read_at = perf_counter()
        self._cost = self._read_at - begun
        return self._size


class Lineage:
    """Records the inputs of each cell of one run, and writes them to the folder of the run."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder = folder
        self.root = root
        self._ignored = unrecorded_prefixes()
        self._folders = WatchedFolders()
        self._folders.watch_project(root.rstrip(os.sep))
        self._events: list[Event] = []
        self._hashes: dict[tuple[int, int, int, int], str] = {}
        self._active = False
        self._previous_lineage = ""
        self._begun = 0.0
        self._variables_read_before: set[str] = set()
        self._modules: set[str] = set()
        self._memory = ProcessMemory()
        self._memory_before = 0
        self._looked_at: set[str] = set()
        """Strings in cells and variables that need no further look: no paths, or paths whose folder is watched."""
        self._folder_now = ""
        self._ids: dict[str, int] = {}
        """Variable -> `id()` of its value when the last cell ended."""
        self.written: set[str] = set()
        """Paths of files that the last cell wrote, as far as they were observed."""
        self.listed: set[str] = set()
        """Paths of folders that the last cell listed."""
        self.unrepeatable_effect = ""
        """Reason why stored results cannot repeat all effects of the last cell on files and processes; else empty."""
        self._pid = os.getpid()
        listen(self._notice, "open", "subprocess.Popen", "os.system", "os.posix_spawn")
        listen(self._notice, "socket.connect", "os.listdir", "os.scandir", *CHANGES)
        for_native_paths(self._native)

    def begin(self, source: str, namespace: Mapping[str, object] | None = None) -> None:
        """Start to record the inputs of the cell `source`, which is about to run with the variables `namespace`."""
        self._memory_before = self._memory_before or self._memory.size()
        self._folders.drain()
        folder = os.getcwd()  # noqa: PTH109 - text
        if self._folders.dropped or self._folder_now != folder:
            self._folder_now, self._folders.dropped = folder, False
            self._looked_at.clear()  # look at all strings again: relative paths now lead to other folders
        paths = {
            str(value) for value in (namespace or {}).values() if isinstance(value, str | Path)
        }
        for text in paths.union(_texts(source)) - self._looked_at:
            if self._watch_near(text):
                self._looked_at.add(text)
        self._events = []
        self.written, self.listed, self.unrepeatable_effect = set(), set(), ""
        self._variables_read_before = set(names_read())
        self._modules = set(sys.modules)
        self._active, self._begun = True, perf_counter()

    def end(
        self,
        cell: int,
        source: str,
        belongs: Callable[[str], bool],
        variables: Mapping[str, object] | None = None,
        *,
        as_written: str = "",
        counts: Mapping[str, int],
    ) -> CellLineage:
        """Write and return the inputs of the cell `source` that has run, with fingerprints of the `variables` it left.

        `cell` is its number. `belongs` returns True for a file of the project, `as_written` is the source before magics
        became calls, and `counts` are numbers of other inputs, such as readings of the clock.
        """
        seconds = perf_counter() - self._begun
        self._active = False
        files = [name for kind, name, *_ in self._events if kind == "file"]
        recorded_files = set(files)
        for path in self._folders.drain():
            # except `.ipynb` files, because a front end writes the notebook while its cells run
            if (
                path not in recorded_files
                and not self._is_foreign(path)
                and not path.endswith(".ipynb")
            ):
                self._events.append(("file", path))
        for path in sorted(self._folders.written):
            if self._is_foreign(path) or ".ipynb" in path:
                continue
            # not in `self.written`: Rearview itself reads a file that Python opens before it is overwritten
            if path in self._folders.read_first - self.written:
                self._record_unrepeatable(f"it changes {path}, which it reads")
            elif is_database(path):
                self._record_unrepeatable(f"it changes the database {path}")
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
            if isinstance(file, str) and belongs(file):
                events.append(("module", name, self.content(file)))
        events += [(kind, str(count)) for kind, count in sorted(counts.items()) if count]
        code = code_hash(as_written or source)
        unique_events = tuple(dict.fromkeys(events))
        lineage = lineage_of(self._previous_lineage, code, unique_events)
        self._previous_lineage = lineage
        prints = self._fingerprints(source, variables or {}, seconds)
        cell_lineage = CellLineage(
            *(cell, code, unique_events, lineage, seconds, self._memory.size()),
            before=self._memory_before,
            variables=prints,
        )
        if os.getpid() == self._pid:
            append_cell(self._folder, cell_lineage)
        return cell_lineage

    def _fingerprints(
        self, source: str, variables: Mapping[str, object], seconds: float
    ) -> dict[str, str]:
        """Return variable -> fingerprint, for variables that the cell bound or names, until a time limit is reached."""
        named = _names(source)
        possibly_changed = {
            name: value
            for name, value in variables.items()
            if name in named or self._ids.get(name) != id(value)
        }
        self._ids = {name: id(value) for name, value in variables.items()}
        return fingerprints(possibly_changed, max(LEAST_CHECK, CHECKED_SHARE * seconds))

    def _notice(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an audit event if it is an input or an effect of the running cell."""
        if not self._active or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # a failed recording must not stop the program
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
                    self._record_unrepeatable(f"it changes the system ({event})")
            else:
                words = args[1] if event == "subprocess.Popen" else args[:1]
                self._events.append(("process", *map(str, words)))

    def _native(self, path: Any, mode: str) -> Any:
        """Record that native code opens the file `path` for writing, unless `mode` is "r"; return `path`."""
        if self._active and mode != "r" and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # `path` may be an open file, not a path
                name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - text
                if not self._is_foreign(name):
                    self._writes(name, replaces="w" in mode)
        return path

    def _writes(self, name: str, *, replaces: bool) -> None:
        """Record that the cell opens a file for writing; `replaces` says that opening removes the old content."""
        self.written.add(name)
        if ("file", name) in self._events:
            self._record_unrepeatable(f"it changes {name}, which it reads")
        if not replaces:
            self._record_unrepeatable(f"it changes {name} without replacing it")

    def _record_unrepeatable(self, why: str) -> None:
        """Record the first reason why stored results of the running cell cannot repeat all its effects."""
        self.unrepeatable_effect = self.unrepeatable_effect or why

    def _watch_near(self, text: str) -> bool:
        """Watch the folder with the path `text`, or else the parent folder of this path.

        Return True if `text` need not be looked at again: it is no path to watch, or an existing folder. Return False if
        it may become the path of a folder later.
        """
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
        name = path.removeprefix(self.root)
        return ("file", name, self.content(path))

    def repeat(self, cell: CellLineage) -> None:
        """Write the recorded inputs of `cell`, which was skipped because its results were reused, for this run."""
        lineage = lineage_of(self._previous_lineage, cell.code, cell.events)
        self._previous_lineage = lineage
        append_cell(self._folder, replace(cell, lineage=lineage, before=self._memory_before))

    def content(self, path: str) -> str:
        """Return the hash of a file's content, or `gone` if it cannot be read; an unchanged file is not read again."""
        try:
            status = os.stat(path)  # noqa: PTH116 - hot
            key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if key not in self._hashes:
                self._hashes[key] = _hash_file(path)
            return self._hashes[key]
        except OSError:
            return "gone"


class ScriptCells:
    """Records the inputs of the cells of one script while the script runs."""

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
        self._stream_position: list[Any] = session.declared.get(entropy.ROOT, [])
        self._cell = self._last_number = 0
        self._clock_before, self._position_before = 0, list(self._stream_position)

    def enter(self, number: int) -> None:
        """End the previous cell, and begin to record cell `number`, whose first statement is about to run."""
        self.end()
        for empty_cell in range(self._last_number + 1, number):
            # a cell with nothing but comments or the docstring: `enter` is not called for it
            self._begin(empty_cell)
            self.end()
        self._begin(number)

    def _begin(self, number: int) -> None:
        if self._lineage is None or not 0 < number <= len(self._texts):
            return
        self._cell = self._last_number = number
        self._clock_before = self._clock[0]
        self._position_before = list(self._stream_position)
        try:
            self._lineage.begin(self._texts[number - 1], _script_variables())
        except Exception as exc:
            self._fail(exc)

    def end(self) -> None:
        """Write the inputs of the running cell, if a cell is running."""
        number, self._cell = self._cell, 0
        if self._lineage is None or not number:
            return
        counts = {"clock": self._clock[0] - self._clock_before}
        counts["chance"] = int(self._position_before != self._stream_position)
        try:
            text, belongs = self._texts[number - 1], self._belongs
            self._lineage.end(number, text, belongs, _script_variables(), counts=counts)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        self._lineage = None
        self._report(exc)


def _script_variables() -> dict[str, object]:
    main: ModuleType = sys.modules["__main__"]
    return {name: value for name, value in vars(main).items() if not name.startswith("_")}


def _texts(source: str) -> Iterator[str]:
    """Yield the string literals in the code of a cell, which may be paths."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _is_bytecode(path: str) -> bool:
    """Return True if `path` is in a folder `__pycache__`, to which Python itself writes compiled modules."""
    return f"{os.sep}__pycache__{os.sep}" in f"{path}{os.sep}"


def _is_path(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], str | bytes) and os.sep in os.fsdecode(args[0])


def _names(source: str) -> set[str]:
    """Return the names of the variables in the code of a cell."""
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
    """Return the resident set size of this process in bytes; 0 if this system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional_size() -> int:
    """Let the system compute the proportional set size of this process, in bytes; 0 if it does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
