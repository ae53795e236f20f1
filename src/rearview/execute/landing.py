"""Lay what a replay wrote on a node into the store at home: all of it, or nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rearview.errors import SiteError
from rearview.execute.cargo import Cargo
from rearview.store.objects import Objects, content
from rearview.store.project import Project

Read = Callable[[list[tuple[str, int, int]]], list[bytes]]
"""Returns pieces of files on the node: path, position and length each."""
Sized = tuple[str, int, int]
"""Path on the node, size and mode."""


@dataclass
class Landing:
    """What was fetched from the node and stands aside until all of it is there.

    Nothing of the store is changed before `publish`; left without it, nothing stays.
    """

    project: Project
    cargo: Cargo
    read: Read
    chunk: int

    def __post_init__(self) -> None:
        self.aside = self.cargo.folders[0] / ".landing"
        self.objects = Objects(self.project)
        self.files: dict[Path, Path] = {}
        """Where they go -> where they stand aside."""
        self.records: list[Path] = []
        self.values: dict[str, Path] = {}
        self.links: dict[Path, str] = {}
        self.deleted: list[Path] = []
        self._count = 0

    def fetch(self, found: dict[str, Any], values: Sequence[Sized]) -> None:
        """Bring everything here, piece by piece; `values` are objects that are new to us."""
        files = [(self._mine(path), (path, size, mode)) for path, size, mode in found["files"]]
        self.links = {self._mine(path): link for path, link in found["links"].items()}
        self.deleted = [self._mine(path) for path in found["deleted"]]
        self.aside.mkdir(parents=True, exist_ok=True)
        staged = self._stage([sized for _, sized in files])
        self.files = {target: file for (target, _), file in zip(files, staged, strict=True)}
        self.records = list(self._stage(found["records"]))
        for (path, _, _), file in zip(values, self._stage(values), strict=True):
            oid = "".join(Path(path).parts[-2:])
            if not _holds(file, oid):
                raise SiteError(
                    f"Object {oid[:12]}, which the replay {self.cargo.replay} logged, came damaged "
                    "from its node. Ask for the backfill again.",
                    slug="ray-node",
                )
            self.values[oid] = file

    def publish(self, last: Path) -> None:
        """Give everything its name: objects before the records that name them, `last` at the end."""
        for oid, file in self.values.items():
            target = self.objects.path(oid)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
        for target in self.deleted:
            with contextlib.suppress(OSError):
                target.unlink()
        for target, link in self.links.items():
            _make_way(target)
            target.symlink_to(link)
        for target in sorted(self.files, key=lambda target: target == last):
            if target == last:
                self._publish_records()
            _make_way(target)
            self.files[target].replace(target)
        self._publish_records()

    def close(self) -> None:
        """Remove what still stands aside."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def _publish_records(self) -> None:
        folder = self.project.runs / self.cargo.run
        while self.records:
            file, n = self.records[0], 0
            while True:  # another process here may have had the same number
                target = folder / f"records-{os.getpid()}-{n}.jsonl"
                n += 1
                if target.with_suffix(".parquet").exists():
                    continue
                with contextlib.suppress(FileExistsError):
                    target.touch(exist_ok=False)
                    break
            file.replace(target)
            self.records.pop(0)

    def _stage(self, files: Sequence[Sized]) -> list[Path]:
        """Return copies of files of the node, fetched so many bytes at a time."""
        out = []
        for _, _, mode in files:
            out.append(self.aside / str(self._count))
            self._count += 1
            out[-1].touch()
            out[-1].chmod(stat.S_IMODE(mode) | stat.S_IWUSR)
        places = {path: file for (path, _, _), file in zip(files, out, strict=True)}
        for batch in _batches(files, self.chunk):
            for (path, _, _), data in zip(batch, self.read(batch), strict=True):
                with places[path].open("ab") as file:
                    file.write(data)
        return out

    def _mine(self, path: str) -> Path:
        """Return `path` if it lies in the replay's own folders; a node writes nothing else."""
        if (
            not any(folder in Path(path).parents for folder in self.cargo.folders)
            or ".." in Path(path).parts
        ):
            raise SiteError(
                f"A node brings {path} as a result of the replay {self.cargo.replay}, whose folder "
                f"is {self.cargo.folders[0]}. Do not trust that node.",
                slug="ray-node",
            )
        return Path(path)


def _holds(file: Path, oid: str) -> bool:
    try:
        return content(file) == oid
    except OSError:
        return False


def _make_way(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink():
        target.unlink()


def _batches(files: Sequence[Sized], chunk: int) -> Iterator[list[tuple[str, int, int]]]:
    """Yield pieces (path, position, length) of files, in groups of about `chunk` bytes.

    >>> list(_batches([("a", 5, 0), ("b", 2, 0), ("c", 0, 0)], 3))
    [[('a', 0, 3)], [('a', 3, 2), ('b', 0, 2)]]
    """
    batch: list[tuple[str, int, int]] = []
    size = 0
    for path, whole, _ in files:
        for at in range(0, whole, chunk):
            batch.append((path, at, min(chunk, whole - at)))
            size += batch[-1][2]
            if size >= chunk:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
