"""A folder of saves on disk; a save that a dying process did not complete never counts as a save.

A save is a folder with a manifest, which is written last. `KeepRule` chooses which saves to keep: the newest and
those with the best metrics. `write` and `read` save and restore the value if the user gives no functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rearview.durable_files import publish, sync_folder
from rearview.errors import StoreError, UsageError
from rearview.remote.base import HIDDEN, checksum


def write(path: Path, value: Any) -> None:
    """Write `value` to `path` as a pickle."""
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=5)


def read(path: Path) -> Any:
    """Return the value that `write` wrote to `path`."""
    with path.open("rb") as file:
        return pickle.load(file)


FORMAT = 1
MANIFEST = "manifest.json"
ID = re.compile(r"(\d{8,})-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Name, size in bytes and checksum of one file of a save."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Save:
    """One complete save, as its manifest describes it."""

    id: str
    counter: int
    """Number of the save within the job; continues when the job is started again."""
    time: float
    step: int
    metric: float | None
    files: tuple[SavedFile, ...]
    format: int = FORMAT

    @property
    def order(self) -> tuple[int, float]:
        """Sort key, greater for newer saves. The counter decides before the time, as clocks of machines differ."""
        return (self.counter, self.time)

    def to_json(self) -> bytes:
        """Return the manifest of this save as JSON."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Save | None:
        """Return the save that the manifest `text` describes, or None if `text` is not a valid manifest.

        Raise `StoreError` if the format is of a newer Rearview.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            if values["format"] > FORMAT:
                raise StoreError(
                    f"Save {values.get('id')} has format {values['format']}; this Rearview reads "
                    f"up to {FORMAT}. Upgrade with `pip install --upgrade rearview`.",
                    slug="save-newer",
                )
            files = tuple(SavedFile(**file) for file in values.pop("files"))
            return cls(**values, files=files)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def counter_of(save_id: str) -> int:
    """Return the counter in the id of a save, or 0 if `save_id` is not the id of a save.

    >>> counter_of("00000012-3fa9c1")
    12
    """
    match = ID.fullmatch(save_id)
    return int(match[1]) if match else 0


class SaveFolder:
    """The local saves of one checkpoint file, here `model.pt`.

    ::

        model.pt                          the newest save, for other programs (a link)
        model.pt.saves/00000012-3fa9c1/   one save
            model.pt                      what checkpoint_function wrote
            manifest.json                 written last: sizes and checksums
    """

    def __init__(self, file: Path) -> None:
        self.file = Path(os.path.abspath(file))  # noqa: PTH100  resolve() would follow the link
        self.folder = self.file.with_name(self.file.name + ".saves")
        self.token = os.urandom(3).hex()

    def write(
        self, write: Callable[[Path], object], *, counter: int, step: int, metric: float | None
    ) -> Save:
        """Call `write` with the path of a new file, make the written file a durable save, and return the save."""
        save_id = f"{counter:08d}-{self.token}"
        staging = self.folder / f"{HIDDEN}{save_id}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            write(staging / self.file.name)
            self._check_written(staging)
            files = tuple(seal(staging))
            save = Save(save_id, counter, time.time(), step, metric, files)
            publish(staging / MANIFEST, save.to_json())
            self.publish(staging, save)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return save

    def publish(self, staging: Path, save: Save) -> None:
        """Rename the folder `staging`, which has all files and the manifest, to the id of the save."""
        sync_folder(staging)
        target = self.folder / save.id
        if target.exists():  # a damaged copy of this save, which was fetched again
            shutil.rmtree(target)
        staging.rename(target)
        sync_folder(self.folder)

    def saves(self) -> tuple[Save, ...]:
        """Return the saves that have a valid manifest, newest first; their bytes are not checked."""
        saves = []
        for path in self._ids():
            with contextlib.suppress(OSError):
                save = Save.from_json((path / MANIFEST).read_bytes())
                if save is not None and save.id == path.name:
                    saves.append(save)
        return tuple(sorted(saves, key=lambda save: save.order, reverse=True))

    def last_counter(self) -> int:
        """Return the highest counter of all saves in the folder, complete or not; 0 if there are none."""
        return max((counter_of(path.name) for path in self._ids()), default=0)

    def intact(self, save: Save) -> bool:
        """Return True if all files of `save` exist and have the sizes and checksums of the manifest."""
        return all(file_intact(self.folder / save.id / file.name, file) for file in save.files)

    def show(self, save: Save) -> Path:
        """Make the checkpoint file a link to (or copy of) the file of `save`, and return the checkpoint file's path.

        If neither can be made, return the path of the file inside the save.
        """
        saved_file = self.folder / save.id / self.file.name
        link = self.file.with_name(f"{HIDDEN}{self.token}-{self.file.name}")
        try:
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            if saved_file.is_dir():
                link.symlink_to(os.path.relpath(saved_file, link.parent))
            else:
                try:
                    os.link(saved_file, link)
                except OSError:  # the file system has no hard links
                    shutil.copyfile(saved_file, link)
            link.replace(self.file)
        except OSError:  # a folder of another program has the name of the checkpoint file
            with contextlib.suppress(OSError):
                link.unlink()
            return saved_file
        return self.file

    def foreign_file(self) -> Path | None:
        """Return the path of the checkpoint file if it exists and there are no saves: another program wrote it.

        Otherwise return None.
        """
        if self.saves() or not self.file.exists():
            return None
        return self.file

    def remove(self, save_ids: Iterable[str]) -> None:
        """Remove the saves with these ids, each manifest first: a half-removed save must not count as complete."""
        for save_id in save_ids:
            (self.folder / save_id / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.folder / save_id, ignore_errors=True)

    def sweep(self) -> None:
        """Remove unfinished saves of earlier processes. Only the job that owns the folder may call this."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith(HIDDEN) and self.token not in path.name:
                    shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything: all saves and the checkpoint file."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.file.is_dir() and not self.file.is_symlink():
            shutil.rmtree(self.file)
        else:
            self.file.unlink(missing_ok=True)

    def _check_written(self, staging: Path) -> None:
        if not (staging / self.file.name).exists():
            written = ", ".join(p.name for p in staging.iterdir()) or "nothing"
            raise StoreError(
                f"checkpoint_function should have written {self.file.name} and wrote {written}. It must "
                "write to exactly the path that it is given.",
                slug="checkpointer-nothing-written",
            )

    def _ids(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if ID.fullmatch(path.name)]


def file_intact(path: Path, file: SavedFile) -> bool:
    """Return True if `path` has the size and checksum of `file`."""
    try:
        return path.stat().st_size == file.size and checksum(path) == file.checksum
    except OSError:
        return False


def seal(folder: Path) -> Iterable[SavedFile]:
    """Force all files below `folder` to disk; yield the name, size and checksum of each."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        # another thread forces the file to disk while this thread computes the checksum
        syncing = _Sync(path)
        syncing.start()
        try:
            digest = checksum(path)
        finally:
            syncing.join()
        if syncing.error is not None:
            raise syncing.error
        yield SavedFile(path.relative_to(folder).as_posix(), path.stat().st_size, digest)
    for path in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        sync_folder(path)


class _Sync(threading.Thread):
    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as exc:
            self.error = exc


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Rule that keeps the `last` newest saves, and the `best` saves with the best metrics."""

    last: int = 2
    best: int = 0
    mode: str = "min"
    """`"min"` or `"max"`: whether lower or higher metrics are better."""

    def __post_init__(self) -> None:
        """Raise `UsageError` if a value is invalid."""
        if self.last < 1 or self.best < 0 or self.mode not in {"min", "max"}:
            raise UsageError(
                f"keep_last={self.last}, keep_best={self.best}, best={self.mode!r} is not possible. "
                "keep_last is at least 1, keep_best at least 0, best is 'min' or 'max'.",
                slug="checkpointer-keep",
            )

    def choose(self, saves: Iterable[Save]) -> frozenset[str]:
        """Return the ids of the saves to keep, out of `saves`.

        >>> saves = [Save(str(n), n, 0.0, n, m, ()) for n, m in enumerate([0.1, 0.5, 0.3, 0.4])]
        >>> sorted(KeepRule(last=1, best=1).choose(saves))
        ['0', '3']
        """
        newest = sorted(saves, key=lambda save: save.order, reverse=True)
        return self.choose_best(newest) | {save.id for save in newest[: self.last]}

    def choose_best(self, saves: Iterable[Save]) -> frozenset[str]:
        """Return the ids of the `self.best` saves with the best metrics; saves without a metric do not count."""
        newest = sorted(saves, key=lambda save: save.order, reverse=True)
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (save for save in newest if save.metric is not None and save.metric == save.metric),
            key=lambda save: sign * (save.metric or 0.0),
        )
        return frozenset(save.id for save in ranked[: self.best])
