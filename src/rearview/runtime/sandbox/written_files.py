"""Save files that a run writes, such as `best.pt`, with its checkpoints, and restore them with its state.

A replay skips iterations, so a file that these iterations wrote would be missing. For this reason, files that the
program wrote inside the project are saved with each checkpoint, and written into the scratch tree of the replay when
the checkpoint is restored. Outside the project, only files that the run has created or truncated are saved: a file to
which the run only appends may be shared with other programs, and is not changed.

Before a checkpoint, files with data in Python's buffers are flushed (`UnflushedFiles`), also files to which only a
logger or a CSV writer refers.

A resumed run executes the code before its first loop ("set-up code") again. A program that looks for its own
checkpoint, creates a folder or appends to a log must then find the same files as the first time. So
`OverwrittenFiles` records the previous content of each file before its first write, and restores this content
before the program starts again. The later contents are restored with the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import io
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rearview.runtime.sandbox.entropy import after_import
from rearview.runtime.sandbox.file_patches import replace_builtin
from rearview.runtime.sandbox.program_inputs import listen, unnoticed, unrecorded_prefixes
from rearview.state.codecs.external_resources import transforms
from rearview.store.checkpoints.checkpoints import FILE_PART
from rearview.store.create_files import make_folder, set_store_mode
from rearview.store.json_files import append_line, read_lines
from rearview.store.project import FOLDER
from rearview.store.runs import ABSENT, TRACES, TRACES_FORMAT

_KINDS = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})
_SEARCHES = 20
"""Largest number of searches through all Python objects for the file objects of open files."""


class UnflushedFiles:
    """Finds the file objects that buffer data of files open for writing, and flushes them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], list[weakref.ref[Any]]] = {}
        """(descriptor, path) of an open file -> weak references to the file objects that buffer its data."""
        self._searches = 0

    def flush(self, is_output: Callable[[str], bool]) -> None:
        """Flush the file objects of all files open for writing whose path satisfies `is_output`."""
        open_files = {number: path for number, path in open_for_writing() if is_output(path)}
        unknown = {
            number for number, path in open_files.items() if (number, path) not in self._buffers
        }
        if unknown and self._searches < _SEARCHES:
            self._searches += 1
            for number in unknown:
                self._buffers[number, open_files[number]] = []
            for file in [obj for obj in gc.get_objects() if type(obj) in _KINDS]:
                number = _number(file)
                if number in unknown:
                    self._buffers[number, open_files[number]].append(weakref.ref(file))
        for number, path in open_files.items():
            for reference in self._buffers.get((number, path), ()):
                file = reference()
                if file is not None and _number(file) == number:
                    with contextlib.suppress(OSError, ValueError):
                        if not transforms(file):
                            file.flush()


def open_for_writing() -> Iterator[tuple[int, str]]:
    """Yield (descriptor, path) of each file that this process has open for writing."""
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():  # noqa: PTH208
        try:
            path = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - asked for every file
            if path[:1] == os.sep and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE:
                yield int(name), path
        except OSError:
            continue  # `/proc/self/fd` itself, or a file that another thread has closed


def _number(file: Any) -> int:
    try:
        return int(file.fileno())
    except (OSError, ValueError):
        return -1


LIMIT = 64 << 20
"""Size in bytes that the written files in one checkpoint may have; of a file beyond it, only the name is saved."""
NATIVE = {
    "torch": ("save:1", "load:0"),
    "safetensors.torch": ("save_file:1", "load_file:0"),
    "safetensors.numpy": ("save_file:1", "load_file:0"),
    "xgboost.core": ("Booster.save_model:1", "Booster.load_model:1"),
    "lightgbm.basic": ("Booster.save_model:1",),
    "h5py": ("File.__init__:1",),
}
"""Module -> `function:position` of functions that open files in native code; the path is argument `position`."""
_BY_PATH = {"os.rename": 2, "os.remove": 1, "os.symlink": 2, "os.link": 2, "sqlite3.connect": 1}
"""Audit event of a call that changes files without `open` -> number of paths at the start of its arguments."""
_BUFFERS = UnflushedFiles()
_LINKS = ("os.symlink", "os.link")
"""Audit events of calls that create only the second of two paths; the first path is the target of the link."""
_NAMELESS: int = getattr(os, "O_TMPFILE", -1)
"""Flag of `os.open` for a file without a name; the path in the audit event is then the path of the folder."""
_NOT_THE_PROGRAM = (FOLDER + os.sep, ".git" + os.sep)


class Outputs:
    """The files that the program has written in this process.

    A file is identified by its path relative to `root`, the folder of the project, or by its full path if it is outside.
    """

    def __init__(
        self,
        root: str,
        deleting: Callable[[], None] | None = None,
        traces: OverwrittenFiles | None = None,
    ) -> None:
        self.deleting = deleting
        """Function to call before the program removes a folder that contains the store."""
        self.traces = traces
        """Records the previous contents of files; None in a process that joined the run of another process."""
        self.root = root.rstrip(os.sep) + os.sep
        self._foreign = (os.path.realpath(self.root + FOLDER) + os.sep, *unrecorded_prefixes())
        self.pid = os.getpid()
        self.busy = False
        """Whether Rearview itself accesses files at this time, so that nothing is recorded."""
        self.written: dict[str, None] = {}
        self.contents: dict[str, tuple[tuple[int, ...], bytes]] = {}

    def install(self) -> None:
        """Record each file that the program opens for writing, renames, links or removes from now on."""
        listen(self._on_event, "open", "os.mkdir", "shutil.rmtree", *_BY_PATH)
        for_native_paths(self._native)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self.busy:
            return
        if event == "open":
            path, mode, flags = args
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            if writes:
                self.record_written(path, emptied="w" in mode)
            elif mode is None and isinstance(flags, int) and flags & os.O_ACCMODE:
                if flags & _NAMELESS != _NAMELESS:
                    self.record_written(path, emptied=bool(flags & os.O_TRUNC))
            elif self.written:
                self._recorded_name(path, OverwrittenFiles.record_read, follow=True)
        elif event in _BY_PATH and not any(
            isinstance(argument, int) and argument >= 0 for argument in args[-1:]
        ):
            for path in args[event in _LINKS : _BY_PATH[event]]:
                self.record_written(path, emptied=event != "os.remove", follow=False)
        elif event == "os.mkdir" and args[2] < 0:
            self._recorded_name(args[0], OverwrittenFiles.record_mkdir)
        elif event == "shutil.rmtree" and self.deleting is not None:
            path = os.path.abspath(os.fsdecode(args[0])) + os.sep  # noqa: PTH100
            if f"{self.root}{FOLDER}{os.sep}".startswith(path) and os.getpid() == self.pid:
                self.deleting()

    def _native(self, path: Any, mode: str) -> Any:
        if mode != "r":
            self.record_written(path, emptied="w" in mode)
        return path

    def record_written(self, path: Any, *, emptied: bool = False, follow: bool = True) -> None:
        """Record that the program writes the file `path`; `emptied` says that the old content is removed.

        A file outside the project is recorded only if the run has created or emptied it. With `follow`, the target of a
        link is recorded instead of the link.
        """
        name = self._recorded_name(
            path,
            OverwrittenFiles.record_truncation if emptied else OverwrittenFiles.record_write,
            follow=follow,
        )
        if name and (name[0] != os.sep or (self.traces is not None and self.traces.owns(name))):
            self.written[name] = None

    def _recorded_name(
        self, path: Any, act: Callable[[OverwrittenFiles, str], None], *, follow: bool = False
    ) -> str:
        """Call `act(self.traces, name)` for the name of the file `path` (see the class), and return this name.

        Return "" and do nothing if the file does not belong to the program.
        """
        if isinstance(path, int) or os.getpid() != self.pid:
            return ""
        try:
            full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links in folders are not resolved
            if follow and os.path.islink(full):  # noqa: PTH114 - asked for every file: no objects
                full = os.path.realpath(full)
        except (TypeError, ValueError, OSError):
            return ""
        name = full.removeprefix(self.root)
        if full.startswith(self._foreign) if name is full else name.startswith(_NOT_THE_PROGRAM):
            return ""
        if self.traces is not None:
            try:
                with unnoticed():
                    act(self.traces, name)
            except (OSError, ValueError):
                self.traces = None  # stop recording: the program must be able to write
        return name

    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return key -> content of the written files, for a checkpoint, and facts about other written files.

        The facts are name -> list: deleted files (`gone`), files that are too large (`large`), folders that the run created
        (`folders`), and links with their targets (`links`).
        """
        with self._not_by_program():
            _BUFFERS.flush(lambda path: path.removeprefix(self.root) in self.written)
            return self._parts()

    def restore_large_files(self, names: Iterable[str]) -> None:
        """Restore the files `names`, which are too large for a checkpoint, when a resumed run reaches it."""
        if self.traces is not None:
            with self._not_by_program():
                self.traces.restore_large_files(names)

    def ended(self, *, well: bool) -> None:
        """Stop recording writes at the end of the run; `well` says that it succeeded, so that old files are deleted."""
        self.busy = True
        if self.traces is not None:
            self.traces.ended(well=well)

    @contextlib.contextmanager
    def _not_by_program(self) -> Iterator[None]:
        """While the body runs, record no file accesses, because Rearview makes them."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        buffers: dict[str, Any] = {}
        links: dict[str, str] = {}
        deleted_names: list[str] = []
        large_names: list[str] = []
        total = 0
        for relative in list(self.written):
            path = Path(self.root, relative)
            try:
                status = path.lstat()
                if stat.S_ISLNK(status.st_mode):
                    links[relative] = str(path.readlink())
                    continue
                if not stat.S_ISREG(status.st_mode):
                    continue
                signature = (status.st_ino, status.st_size, status.st_mtime_ns)
                if total + status.st_size > LIMIT:
                    large_names.append(relative)
                    continue
                saved = self.contents.get(relative)
                if saved is None or saved[0] != signature:
                    saved = (signature, path.read_bytes())
                    self.contents[relative] = saved
            except (OSError, ValueError):
                deleted_names.append(relative)
                if relative[0] == os.sep:
                    del self.written[relative]  # a temporary file; there may be thousands
                continue
            total += status.st_size
            buffers[FILE_PART + relative] = saved[1]
        folders = self.traces.folders if self.traces is not None else ()
        existing = [folder for folder in folders if Path(self.root, folder).is_dir()]
        facts = {
            "gone": deleted_names,
            "large": large_names,
            "folders": existing,
            "links": links,
        }
        return buffers, {name: value for name, value in facts.items() if value}


def restore_files(
    keys: Iterable[str],
    load: Callable[[str], Any],
    facts: Mapping[str, Any],
    place: Callable[[str], str],
    root: str,
    shared: frozenset[str] = frozenset(),
) -> None:
    """Restore the files of a checkpoint, except the files named in `shared`.

    `keys` and `facts` are what `Outputs.parts` returned, with names relative to `root`. `load(key)` returns a content,
    and `place(path)` the real path to write for a path of the program.
    """
    for name in facts.get("folders", ()):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    names = {key: key.removeprefix(FILE_PART) for key in keys if key.startswith(FILE_PART)}
    files = {key: place(str(Path(root, name))) for key, name in names.items() if name not in shared}
    real = {os.path.realpath(path) for path in files.values()}
    _BUFFERS.flush(real.__contains__)  # buffered data must not be written after the restore
    for key, path in files.items():
        target = Path(path)
        data = bytes(load(key))
        if target.is_symlink():
            target.unlink()
        elif target.is_file() and target.read_bytes() == data:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # change the file in place, because the program may have it open
        with open(target, "r+b" if target.is_file() else "wb") as file:  # noqa: PTH123
            file.write(data)
            file.truncate()
    for name in facts.get("gone", ()):
        with contextlib.suppress(IsADirectoryError):
            Path(root, name).unlink(missing_ok=True)
    for name, target_path in facts.get("links", {}).items():
        _link(Path(root, name), target_path)
    if files:
        _to_the_end(real)


def _link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`; replace an existing file."""
    if not path.is_symlink() or str(path.readlink()) != target:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


def _to_the_end(paths: set[str]) -> None:
    """Move the positions in open files with one of the `paths` to the end, also if only a logger refers to them.

    Files in the captured state get their exact position later, when the state is restored.
    """
    for number, path in open_for_writing():
        if path in paths:
            with contextlib.suppress(OSError):
                os.lseek(number, 0, os.SEEK_END)


def for_native_paths(act: Callable[[Any, str], Any]) -> None:
    """Patch the functions in `NATIVE`, which open files in native code, to open the path `act(path, mode)`.

    `mode` is the mode that Python's `open` would get.
    """
    for module, functions in NATIVE.items():
        after_import(module, functools.partial(_wrap_functions, functions=functions, act=act))


def _wrap_functions(
    module: ModuleType, *, functions: Iterable[str], act: Callable[[Any, str], Any]
) -> None:
    for function in functions:
        dotted, _, position = function.partition(":")
        *owners, name = dotted.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        real = getattr(owner, name, None)
        if real is not None:
            setattr(owner, name, _wrapped(real, int(position), act))


def _wrapped(real: Callable[..., Any], position: int, act: Callable[[Any, str], Any]) -> Any:
    """Return the function `real`, changed to use `act(path, mode)` for the path in its argument `position`."""
    saves = real.__name__.startswith("save")

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = "w" if saves else "r"
        if real.__name__ == "__init__":  # of h5py's `File`: the mode is the next argument
            mode = str((args[position + 1 : position + 2] or (kwargs.get("mode", "r"),))[0])
        if len(args) > position and isinstance(args[position], str | os.PathLike):
            args = (*args[:position], act(args[position], mode), *args[position + 1 :])
        for key in ("f", "filename", "fname", "name"):
            if isinstance(kwargs.get(key), str | os.PathLike):
                kwargs[key] = act(kwargs[key], mode)
        return real(*args, **kwargs)

    return call


MAX_SET_ASIDE = 64 << 20
"""Size in bytes that the recorded previous contents of a run may have; a file beyond it is not restored."""
_LARGE = "large"
_LINK = "link"


@dataclass
class OverwrittenFiles:
    """The files and folders that one run has changed, with their previous contents, in the folder of the run.

    A file inside the project is identified by its path relative to `root`, a file outside by its full path. A file
    outside the project is restored only if the run has created or truncated it.
    """

    folder: Path
    root: str
    looping: Callable[[], bool] = lambda: False
    """Function that returns True if a loop of the program is running."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path of a file that the run has written -> facts about the file before the first write."""
    folders: dict[str, None] = field(default_factory=dict)
    """Paths of the folders that the run has created."""
    read: set[str] = field(default_factory=set)
    """Paths of files that the run has read after it had written them."""
    shared: set[str] = field(default_factory=set)
    """Full paths of files outside the project that another program has written after the run."""
    kept_bytes: int = 0
    """Total size in bytes of the previous contents recorded so far."""

    @classmethod
    def of(cls, folder: Path, root: str, looping: Callable[[], bool]) -> OverwrittenFiles:
        """Return the changed files of the run in `folder`, as earlier processes of the run have recorded them."""
        files = cls(folder, root, looping)
        for line in read_lines(folder / TRACES, TRACES_FORMAT):
            if "folder" in line:
                files.folders.setdefault(str(line["folder"]))
            elif "read" in line:
                files.read.add(str(line["read"]))
            else:
                files.files.setdefault(str(line["path"]), line)
        return files

    @property
    def aside(self) -> Path:
        """Folder to which files of the run are moved while a resumed run repeats the code before its first loop."""
        return self.folder / "aside"

    def was_created(self, name: str) -> bool:
        """Return True if the run created the file `name`."""
        return bool(self.files.get(name, {}).get("was") == ABSENT)

    def owns(self, name: str) -> bool:
        """Return True if the run has created or truncated the file `name`."""
        return self.was_created(name) or bool(self.files.get(name, {}).get("emptied"))

    def created_paths(self) -> list[str]:
        """Return the full paths of the files and folders that the run has created."""
        names = [*self.folders, *(name for name in self.files if self.was_created(name))]
        return [os.path.join(self.root, name) for name in names]  # noqa: PTH118

    def _path_aside(self, name: str) -> Path:
        """Return the path to which the file `name` is moved while a resumed run repeats the code before its first loop.

        It is on the same disk, so that a large file need not be copied.
        """
        path = Path(name)
        return path.with_name(f".{path.name}.rearview") if path.is_absolute() else self.aside / path

    def record_truncation(self, relative: str) -> None:
        """Record the previous content of a file that is about to be truncated, unless the file is recorded already."""
        self.record_write(relative, emptied=True)

    def record_write(self, relative: str, *, emptied: bool = False) -> None:
        """Record the previous content of a file that is about to be written, unless the file is recorded already.

        `emptied` says that the write begins by removing the old content.
        """
        if relative in self.files or "__pycache__" in relative:
            return
        line: dict[str, Any] = {"format": TRACES_FORMAT, "path": relative, "loop": self.looping()}
        if emptied:
            line["emptied"] = True
        self.files[relative] = line
        path = Path(self.root, relative)
        try:
            line["size"] = size = path.lstat().st_size
        except OSError:
            line["was"] = ABSENT
        else:
            line["was"] = _LARGE
            belongs_to_run = emptied or relative[0] != os.sep
            if path.is_symlink() and belongs_to_run:
                line |= {"was": _LINK, "led": str(path.readlink())}
            elif path.is_file() and self.kept_bytes + size <= MAX_SET_ASIDE and belongs_to_run:
                self.kept_bytes += size
                line["was"] = f"{len(self.files)}"
                make_folder(self.folder / "before")
                shutil.copyfile(path, self.folder / "before" / line["was"])
                set_store_mode(self.folder / "before" / line["was"])
        append_line(self.folder / TRACES, line)

    def record_mkdir(self, relative: str) -> None:
        """Record a folder that the program is about to create, unless it exists."""
        if relative not in self.folders and not Path(self.root, relative).exists():
            self.folders[relative] = None
            append_line(self.folder / TRACES, {"format": TRACES_FORMAT, "folder": relative})

    def record_read(self, relative: str) -> None:
        """Record that the program reads the file `relative`, if it has written this file before."""
        if relative in self.files and relative not in self.read:
            self.read.add(relative)
            append_line(self.folder / TRACES, {"format": TRACES_FORMAT, "read": relative})

    def restore_initial_files(
        self, *, data: bool, last_sign_of_life: float = float("inf")
    ) -> set[str]:
        """Restore the files as they were at the start of the run; return the run's folders that could not be removed.

        A file that the program wrote before its first loop and then read, such as a downloaded data set, is removed only
        if `data` is True: creating it again may take long, and a run that continues from a checkpoint does not need that.
        A file outside the project that was changed after `last_sign_of_life`, the last time at which the run was alive, is
        left unchanged, because another program has written it.
        """
        for relative, line in self.files.items():
            path, path_aside = Path(self.root, relative), self._path_aside(relative)
            kept_in_place = line["was"] == _LARGE and not line.get("emptied")
            if kept_in_place or (not data and self._is_data(relative)):
                continue
            if (
                relative[0] == os.sep
                and path.is_file()
                and path.stat().st_mtime > last_sign_of_life
            ):
                self.shared.add(relative)
                continue
            exists = path.is_file() or path.is_symlink()
            if exists and os.path.lexists(path_aside):
                path.unlink()  # `path_aside` was written by an earlier process of the run, which got further
            elif exists:
                path_aside.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, path_aside)
            if line["was"] == _LINK:
                path.symlink_to(line["led"])
            elif line["was"] not in {ABSENT, _LARGE}:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / "before" / line["was"], path)
        for relative in sorted(self.folders, key=len, reverse=True):
            try:
                Path(self.root, relative).rmdir()
            except OSError:
                continue  # the folder is not empty, or does not exist
        return {folder for folder in self.folders if Path(self.root, folder).is_dir()}

    def data_files(self) -> list[str]:
        """Return the paths of the files that the program wrote before its first loop and then read."""
        return [name for name in self.files if self._is_data(name)]

    def _is_data(self, name: str) -> bool:
        return not self.files[name]["loop"] and name in self.read

    def restore_large_files(self, relatives: Iterable[str]) -> None:
        """Move back those of the files moved aside that are in `relatives`, and delete the other ones.

        `relatives` are files that are too large for the checkpoint that a resumed run has reached.
        """
        for relative in relatives:
            path_aside, path = self._path_aside(relative), Path(self.root, relative)
            if path_aside.is_file() or path_aside.is_symlink():
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists() and not path_aside.is_symlink():
                    # change the file in place, because the program may have it open
                    shutil.copyfile(path_aside, path)
                else:
                    shutil.move(path_aside, path)
        self._delete_set_aside()

    def ended(self, *, well: bool) -> None:
        """At the end of the run, delete the files moved aside if it succeeded (`well`).

        Otherwise move back each file whose original path is free, and delete the other ones.
        """
        if well:
            self._delete_set_aside()
            shutil.rmtree(self.folder / "before", ignore_errors=True)
        elif any(os.path.lexists(self._path_aside(name)) for name in self.files):
            self.restore_large_files(
                [n for n in self.files if not os.path.lexists(Path(self.root, n))]
            )

    def _delete_set_aside(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)
        for name in self.files:
            if name[0] == os.sep and self.owns(name):
                self._path_aside(name).unlink(missing_ok=True)


def allow_mkdir_again(folders: set[str], root: str) -> None:
    """Patch `os.mkdir` to succeed once for each existing folder in `folders`, which is relative to `root`."""

    def make(real: Any) -> Any:
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            if folders and not isinstance(path, int):
                full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links are not resolved
                name = full.removeprefix(root)
                if name in folders:
                    folders.discard(name)
                    return
            real(path, *args, **kwargs)

        return mkdir

    replace_builtin(os, "mkdir", make)
