"""Files that the run writes and may read again later, such as `best.pt`, as part of its state.

A replay that skips the iterations in which a file was written would not find it. So files that the
program wrote below the project are saved with each checkpoint, by content, and written into the
replay's own tree when the checkpoint is restored. Outside the project this holds for files that the
run has created or truncated: files that it only appends to may be shared with others and are left
alone.

Before a checkpoint, files that Python still buffers are flushed (`UnflushedFiles`), also those that only a
logger or a CSV writer refers to.

A resumed run executes its set-up again. A program that looks for its own checkpoint, creates a
folder or appends to a log must then find the same files as the first time. So `OverwrittenFiles` records the
previous content of each file before its first write, and puts it back before the program starts again; the files
that it had written come back with the checkpoint.
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
from rearview.state.codecs.open_files import transforms
from rearview.store.checkpoints.checkpoints import FILE_PART
from rearview.store.create_files import make_folder, set_store_mode
from rearview.store.json_files import append_line, read_lines
from rearview.store.project import FOLDER
from rearview.store.runs import ABSENT, TRACES, TRACES_FORMAT

_KINDS = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})
_SEARCHES = 20
"""How often all objects are searched for open files that are not known yet."""


class UnflushedFiles:
    """The files that the program holds open for writing."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], list[weakref.ref[Any]]] = {}
        self._searches = 0

    def flush(self, is_output: Callable[[str], bool]) -> None:
        """Flush buffered data of the files for whose path `is_output` returns True."""
        open_files = {number: path for number, path in open_for_writing() if is_output(path)}
        fresh = {number for number, path in open_files.items() if (number, path) not in self._known}
        if fresh and self._searches < _SEARCHES:
            self._searches += 1
            for number in fresh:
                self._known[number, open_files[number]] = []
            for file in [obj for obj in gc.get_objects() if type(obj) in _KINDS]:
                number = _number(file)
                if number in fresh:
                    self._known[number, open_files[number]].append(weakref.ref(file))
        for number, path in open_files.items():
            for reference in self._known.get((number, path), ()):
                file = reference()
                if file is not None and _number(file) == number:
                    with contextlib.suppress(OSError, ValueError):
                        if not transforms(file):
                            file.flush()


def open_for_writing() -> Iterator[tuple[int, str]]:
    """Yield number and path of each file that this process has open for writing."""
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():  # noqa: PTH208
        try:
            path = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - asked for every file
            if path[:1] == os.sep and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE:
                yield int(name), path
        except OSError:
            continue  # the descriptor of the listing itself, or a file that another thread closed


def _number(file: Any) -> int:
    try:
        return int(file.fileno())
    except (OSError, ValueError):
        return -1


LIMIT = 64 << 20
"""Bytes of written files that a checkpoint includes; larger files are only named."""
NATIVE = {
    "torch": ("save:1", "load:0"),
    "safetensors.torch": ("save_file:1", "load_file:0"),
    "safetensors.numpy": ("save_file:1", "load_file:0"),
    "xgboost.core": ("Booster.save_model:1", "Booster.load_model:1"),
    "lightgbm.basic": ("Booster.save_model:1",),
    "h5py": ("File.__init__:1",),
}
"""Functions that open files in native code, with the position of the path among the arguments."""
_BY_PATH = {"os.rename": 2, "os.remove": 1, "os.symlink": 2, "os.link": 2, "sqlite3.connect": 1}
"""Audit events of other changes to files, with the number of paths; the last argument may be an open folder."""
_BUFFERS = UnflushedFiles()
_LINKS = ("os.symlink", "os.link")
"""Of these events, only the second path is created; the first is the target of the link."""
_NAMELESS: int = getattr(os, "O_TMPFILE", -1)
"""Flag that opens a file without a name; the path of the event is that of its folder."""
_NOT_THE_PROGRAM = (FOLDER + os.sep, ".git" + os.sep)


class Outputs:
    """The files that this process has written, by path relative to `root`, or by full path outside."""

    def __init__(
        self,
        root: str,
        deleting: Callable[[], None] | None = None,
        traces: OverwrittenFiles | None = None,
    ) -> None:
        self.deleting = deleting
        """Called before the program removes the store itself."""
        self.traces = traces
        """Previous contents of files; None in a process that only joins a run."""
        self.root = root.rstrip(os.sep) + os.sep
        self._foreign = (os.path.realpath(self.root + FOLDER) + os.sep, *unrecorded_prefixes())
        self.pid = os.getpid()
        self.busy = False
        """Whether Rearview itself is using the files."""
        self.written: dict[str, None] = {}
        self.contents: dict[str, tuple[tuple[int, ...], bytes]] = {}

    def install(self) -> None:
        """Record every file that is opened for writing or renamed from now on."""
        listen(self._on_event, "open", "os.mkdir", "shutil.rmtree", *_BY_PATH)
        for_native_paths(self._native)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self.busy:
            return
        if event == "open":
            path, mode, flags = args
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            if writes:
                self.note(path, emptied="w" in mode)
            elif mode is None and isinstance(flags, int) and flags & os.O_ACCMODE:
                if flags & _NAMELESS != _NAMELESS:
                    self.note(path, emptied=bool(flags & os.O_TRUNC))
            elif self.written:
                self._noted(path, OverwrittenFiles.reading, follow=True)
        elif event in _BY_PATH and not any(
            isinstance(argument, int) and argument >= 0 for argument in args[-1:]
        ):
            for path in args[event in _LINKS : _BY_PATH[event]]:
                self.note(path, emptied=event != "os.remove", follow=False)
        elif event == "os.mkdir" and args[2] < 0:
            self._noted(args[0], OverwrittenFiles.making)
        elif event == "shutil.rmtree" and self.deleting is not None:
            path = os.path.abspath(os.fsdecode(args[0])) + os.sep  # noqa: PTH100
            if f"{self.root}{FOLDER}{os.sep}".startswith(path) and os.getpid() == self.pid:
                self.deleting()

    def _native(self, path: Any, mode: str) -> Any:
        if mode != "r":
            self.note(path, emptied="w" in mode)
        return path

    def note(self, path: Any, *, emptied: bool = False, follow: bool = True) -> None:
        """Remember a file if it belongs to the project, or if the run creates or truncates it.

        With `follow`, a link leads to the file that is written.
        """
        name = self._noted(
            path, OverwrittenFiles.emptying if emptied else OverwrittenFiles.writing, follow=follow
        )
        if name and (name[0] != os.sep or (self.traces is not None and self.traces.owns(name))):
            self.written[name] = None

    def _noted(
        self, path: Any, act: Callable[[OverwrittenFiles, str], None], *, follow: bool = False
    ) -> str:
        """Call `act` on the traces for a path of the program; return the name of the file, or ""."""
        if isinstance(path, int) or os.getpid() != self.pid:
            return ""
        try:
            full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - folders stay as spelt
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
                self.traces = None  # the program must be able to write a file that cannot be noted
        return name

    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the contents to save by key, and facts about the files.

        The facts are the deleted files, the files that are too large, the folders and the links that
        the run created, each link with its target.
        """
        with self._ourselves():
            _BUFFERS.flush(lambda path: path.removeprefix(self.root) in self.written)
            return self._parts()

    def bring_back(self, names: Iterable[str]) -> None:
        """Restore files that are too large for a checkpoint, when the checkpoint is reached."""
        if self.traces is not None:
            with self._ourselves():
                self.traces.bring_back(names)

    def ended(self, *, well: bool) -> None:
        """Clean up at the end of the run; later writes do not belong to the program."""
        self.busy = True
        if self.traces is not None:
            self.traces.ended(well=well)

    @contextlib.contextmanager
    def _ourselves(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        buffers: dict[str, Any] = {}
        links: dict[str, str] = {}
        gone: list[str] = []
        large: list[str] = []
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
                mark = (status.st_ino, status.st_size, status.st_mtime_ns)
                if total + status.st_size > LIMIT:
                    large.append(relative)
                    continue
                saved = self.contents.get(relative)
                if saved is None or saved[0] != mark:
                    saved = (mark, path.read_bytes())
                    self.contents[relative] = saved
            except (OSError, ValueError):
                gone.append(relative)
                if relative[0] == os.sep:
                    del self.written[relative]  # a deleted temporary file; there may be thousands
                continue
            total += status.st_size
            buffers[FILE_PART + relative] = saved[1]
        folders = self.traces.folders if self.traces is not None else ()
        existing = [folder for folder in folders if Path(self.root, folder).is_dir()]
        facts = {"gone": gone, "large": large, "folders": existing, "links": links}
        return buffers, {name: status for name, status in facts.items() if status}


def put_back(
    keys: Iterable[str],
    load: Callable[[str], Any],
    facts: Mapping[str, Any],
    place: Callable[[str], str],
    root: str,
    shared: frozenset[str] = frozenset(),
) -> None:
    """Restore the files of a checkpoint, except those in `shared`.

    `place` returns the real path for a path to be written; names are relative to `root`.
    """
    for name in facts.get("folders", ()):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    names = {key: key.removeprefix(FILE_PART) for key in keys if key.startswith(FILE_PART)}
    files = {key: place(str(Path(root, name))) for key, name in names.items() if name not in shared}
    real = {os.path.realpath(path) for path in files.values()}
    _BUFFERS.flush(real.__contains__)  # data that the set-up has written must not come later
    for key, path in files.items():
        target = Path(path)
        data = bytes(load(key))
        if target.is_symlink():
            target.unlink()
        elif target.is_file() and target.read_bytes() == data:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # written in place: the program may have the file open
        with open(target, "r+b" if target.is_file() else "wb") as file:  # noqa: PTH123
            file.write(data)
            file.truncate()
    for name in facts.get("gone", ()):
        with contextlib.suppress(IsADirectoryError):
            Path(root, name).unlink(missing_ok=True)
    for name, led in facts.get("links", {}).items():
        _link(Path(root, name), led)
    if files:
        _to_the_end(real)


def _link(path: Path, led: str) -> None:
    if not path.is_symlink() or str(path.readlink()) != led:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(led)


def _to_the_end(paths: set[str]) -> None:
    """Move open files to their end, also those that only a logger refers to.

    The restore of the state then sets the files that it knows to their exact position.
    """
    for number, path in open_for_writing():
        if path in paths:
            with contextlib.suppress(OSError):
                os.lseek(number, 0, os.SEEK_END)


def for_native_paths(act: Callable[[Any, str], Any]) -> None:
    """Call `act(path, mode)` for functions that open files in native code; it returns the path to use.

    `mode` is the mode that `open` would get.
    """
    for module, functions in NATIVE.items():
        after_import(module, functools.partial(_wrap, functions=functions, act=act))


def _wrap(module: ModuleType, *, functions: Iterable[str], act: Callable[[Any, str], Any]) -> None:
    for function in functions:
        dotted, _, position = function.partition(":")
        *owners, name = dotted.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        real = getattr(owner, name, None)
        if real is not None:
            setattr(owner, name, _acting(real, int(position), act))


def _acting(real: Callable[..., Any], position: int, act: Callable[[Any, str], Any]) -> Any:
    saves = real.__name__.startswith("save")

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = "w" if saves else "r"
        if real.__name__ == "__init__":  # of h5py's File, whose next argument is the mode
            mode = str((args[position + 1 : position + 2] or (kwargs.get("mode", "r"),))[0])
        if len(args) > position and isinstance(args[position], str | os.PathLike):
            args = (*args[:position], act(args[position], mode), *args[position + 1 :])
        for key in ("f", "filename", "fname", "name"):
            if isinstance(kwargs.get(key), str | os.PathLike):
                kwargs[key] = act(kwargs[key], mode)
        return real(*args, **kwargs)

    return call


MAX_SET_ASIDE = 64 << 20
"""Bytes of previous contents that are kept; larger files are not restored."""
_LARGE = "large"
_LINK = "link"


@dataclass
class OverwrittenFiles:
    """The files and folders that one run has changed; kept in the run's folder.

    Files outside the project have their full path, and count only if the run created or truncated
    them.
    """

    folder: Path
    root: str
    looping: Callable[[], bool] = lambda: False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    """Files outside the project that another program has written."""
    kept: int = 0
    """Bytes kept so far."""

    @classmethod
    def of(cls, folder: Path, root: str, looping: Callable[[], bool]) -> OverwrittenFiles:
        """Return the files of a run, with those that an earlier process of it recorded."""
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
        """Folder for files of the run while a resumed run repeats its set-up."""
        return self.folder / "aside"

    def was_created(self, name: str) -> bool:
        """Return True if the run created this file."""
        return bool(self.files.get(name, {}).get("was") == ABSENT)

    def owns(self, name: str) -> bool:
        """Return True if only the run has written this file."""
        return self.was_created(name) or bool(self.files.get(name, {}).get("emptied"))

    def absent(self) -> list[str]:
        """Return the full paths of files and folders that did not exist before the run."""
        names = [*self.folders, *(name for name in self.files if self.was_created(name))]
        return [os.path.join(self.root, name) for name in names]  # noqa: PTH118

    def _home(self, name: str) -> Path:
        """Return the path at which a file is kept until the run ends, on the same disk because it may be large."""
        path = Path(name)
        return path.with_name(f".{path.name}.rearview") if path.is_absolute() else self.aside / path

    def emptying(self, relative: str) -> None:
        """Record a file before it is truncated for the first time."""
        self.writing(relative, emptied=True)

    def writing(self, relative: str, *, emptied: bool = False) -> None:
        """Record a file before it is written for the first time."""
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
            elif path.is_file() and self.kept + size <= MAX_SET_ASIDE and belongs_to_run:
                self.kept += size
                line["was"] = f"{len(self.files)}"
                make_folder(self.folder / "before")
                shutil.copyfile(path, self.folder / "before" / line["was"])
                set_store_mode(self.folder / "before" / line["was"])
        append_line(self.folder / TRACES, line)

    def making(self, relative: str) -> None:
        """Record a folder that is about to be created."""
        if relative not in self.folders and not Path(self.root, relative).exists():
            self.folders[relative] = None
            append_line(self.folder / TRACES, {"format": TRACES_FORMAT, "folder": relative})

    def reading(self, relative: str) -> None:
        """Record that the program reads a file that it has written."""
        if relative in self.files and relative not in self.read:
            self.read.add(relative)
            append_line(self.folder / TRACES, {"format": TRACES_FORMAT, "read": relative})

    def take_away(self, *, data: bool, last_sign_of_life: float = float("inf")) -> set[str]:
        """Restore the files to their state at the start of the run.

        A file that the program wrote before its first loop and read again, such as a downloaded data
        set, is removed only with `data`: creating it again may take long, and a run that continues
        from a checkpoint does not need that. A file outside the project that was written after
        `last_sign_of_life` of the run stays too: another program wrote it. Return the folders that the run created and that still exist.
        """
        for relative, line in self.files.items():
            path, home = Path(self.root, relative), self._home(relative)
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
            if exists and os.path.lexists(home):
                path.unlink()  # written by a process that got less far than the one before it
            elif exists:
                home.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, home)
            if line["was"] == _LINK:
                path.symlink_to(line["led"])
            elif line["was"] not in {ABSENT, _LARGE}:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / "before" / line["was"], path)
        for relative in sorted(self.folders, key=len, reverse=True):
            try:
                Path(self.root, relative).rmdir()
            except OSError:
                continue  # not empty, or absent
        return {folder for folder in self.folders if Path(self.root, folder).is_dir()}

    def data(self) -> list[str]:
        """Return the files that were written before the first loop and read again."""
        return [name for name in self.files if self._is_data(name)]

    def _is_data(self, name: str) -> bool:
        return not self.files[name]["loop"] and name in self.read

    def bring_back(self, relatives: Iterable[str]) -> None:
        """Restore files that are too large for a checkpoint, when the checkpoint is reached."""
        for relative in relatives:
            home, path = self._home(relative), Path(self.root, relative)
            if home.is_file() or home.is_symlink():
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists() and not home.is_symlink():
                    shutil.copyfile(home, path)  # in place: the program may have the file open
                else:
                    shutil.move(home, path)
        self._delete_set_aside()

    def ended(self, *, well: bool) -> None:
        """Delete the kept files if the run has ended for good; else put back the ones it lacks."""
        if well:
            self._delete_set_aside()
            shutil.rmtree(self.folder / "before", ignore_errors=True)
        elif any(os.path.lexists(self._home(name)) for name in self.files):
            self.bring_back([n for n in self.files if not os.path.lexists(Path(self.root, n))])

    def _delete_set_aside(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)
        for name in self.files:
            if name[0] == os.sep and self.owns(name):
                self._home(name).unlink(missing_ok=True)


def allow_making_again(folders: set[str], root: str) -> None:
    """Let the program create each of these folders once more, although it exists."""

    def make(real: Any) -> Any:
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            if folders and not isinstance(path, int):
                full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links stay as spelt
                name = full.removeprefix(root)
                if name in folders:
                    folders.discard(name)
                    return
            real(path, *args, **kwargs)

        return mkdir

    replace_builtin(os, "mkdir", make)
