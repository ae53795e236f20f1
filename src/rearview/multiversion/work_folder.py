"""The folder in which cells run: a copy of the project's files, never the user's own folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rearview.errors import ReplayError
from rearview.multiversion.study import FileRef, Study, StudyVersion

INPUTS = "inputs"
"""Folder in the scratch folder with the replay's copies of files."""
LINKS = "links"
"""File in the scratch folder that names links outside it, to be removed if the replay is killed."""
PROJECT, TEMPORARY = "project", "tmp"
"""Parts of a work folder."""
LONGEST_TEMPORARY = 70
"""Bytes that the path of the folder for temporary files may have: sockets in it need short names."""
LINKED = 1 << 20
"""Files larger than this many bytes are links to the replay's copy until a cell writes to them."""


class WorkFolders:
    """Folders for the cells of one study, below a scratch folder.

    Every file is copied once into `inputs`. A work folder has copies of the small files and links to the
    large ones, which a cell process replaces by copies before it writes to them. It holds the project in
    `PROJECT` and temporary files of the program in `TEMPORARY`: both belong to the state.
    """

    def __init__(self, scratch: Path, study: Study) -> None:
        self.scratch = scratch
        self.inputs = Path(os.path.realpath(scratch)) / INPUTS
        self.images = scratch / "images"
        self.work = scratch / "work"
        """The path that programs see; each process may see another folder there."""
        for folder in (self.inputs, self.images, self.work / TEMPORARY):
            folder.mkdir(parents=True, exist_ok=True)
        self._copies: dict[tuple[str, str], Path] = {}
        self._former: list[Path] = []
        """Links at the paths that work folders of earlier replays had."""
        self._study = study

    def _copy(self, ref: FileRef) -> Path:
        """Return the replay's own copy of a file."""
        if ref.place is None:
            raise ReplayError(
                "A file that a version reads is gone: only its hash is known.", slug="file-gone"
            )
        key = (str(ref.place), ref.digest)
        if key not in self._copies:
            target = self.inputs / f"{len(self._copies):06d}-{ref.place.name[-60:]}"
            shutil.copy2(ref.place, target)
            target.chmod(target.stat().st_mode | 0o200)
            self._copies[key] = target
        return self._copies[key]

    def lay_out(self, version: StudyVersion, folder: Path, program: bytes | None = None) -> None:
        """Fill an empty folder with the files of a version."""
        (folder / TEMPORARY).mkdir(parents=True, exist_ok=True)
        folder = folder / PROJECT
        folder.mkdir()
        for name, ref in version.files.items():
            if ref.place is not None and name != version.program:
                self._place(folder / name, ref)
        (folder / version.cwd).mkdir(parents=True, exist_ok=True)
        if program is not None:
            file = folder / version.program
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(program)

    def _place(self, file: Path, ref: FileRef) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink() or file.exists():
            file.unlink()
        copy = self._copy(ref)
        if ref.size > LINKED:
            file.symlink_to(copy)
        else:
            shutil.copy2(copy, file)

    def switch(self, before: StudyVersion, after: StudyVersion, folder: Path) -> None:
        """Replace the files in which two versions differ."""
        if before.files is after.files:
            return
        folder = folder / PROJECT
        for name in {**before.files, **after.files}:
            old, new = before.files.get(name), after.files.get(name)
            if old == new or (old and new and old.digest and old.digest == new.digest):
                continue
            if new is None:
                (folder / name).unlink(missing_ok=True)
            elif new.place is not None:
                self._place(folder / name, new)

    def exchange_program(
        self, before: StudyVersion, after: StudyVersion, program: bytes, folder: Path
    ) -> None:
        """Replace the program of one version by that of another."""
        if before.program != after.program:
            ref = after.files.get(before.program)
            file = folder / PROJECT / before.program
            if ref is not None and ref.place is not None:
                self._place(file, ref)
            else:
                file.unlink(missing_ok=True)
        (folder / PROJECT / after.program).write_bytes(program)

    def keep_image(self, name: str, folder: Path) -> Path:
        """Copy a work folder as it is now; return the copy."""
        image = self.images / name
        remove(image)
        shutil.copytree(folder, image, symlinks=True, ignore=_sockets)
        return image

    def restore_image(self, image: Path, folder: Path) -> None:
        """Restore a work folder from its image."""
        remove(folder)
        shutil.copytree(image, folder, symlinks=True)

    def save_written(self, folder: Path, target: Path) -> list[str]:
        """Copy the files of a work folder that are not links to inputs; return the names of the links."""
        inputs: list[str] = []

        def links(where: str, names: list[str]) -> list[str]:
            skipped = _sockets(where, names)
            for name in names:
                file = Path(where) / name
                if file.is_symlink() and file.readlink().parent == self.inputs:
                    inputs.append(file.relative_to(folder / PROJECT).as_posix())
                    skipped.append(name)
            return skipped

        shutil.copytree(folder, target, symlinks=True, ignore=links)
        return inputs

    def load_written(
        self, version: StudyVersion, saved: Path, inputs: list[str], folder: Path
    ) -> None:
        """Restore a work folder from the files that `save_written` copied."""
        remove(folder)
        shutil.copytree(saved, folder, symlinks=True)
        for name in inputs:
            ref = version.files.get(name)
            if ref is not None and ref.place is not None:
                self._place(folder / PROJECT / name, ref)

    def show_at(self, former: Path) -> None:
        """Show the work folder also at the path it had in an earlier replay, which a state may hold."""
        if former in {self.work, *self._former}:
            return
        former.parent.mkdir(mode=0o700)
        self._former.append(former)
        with (self.scratch / LINKS).open("a", encoding="utf-8") as file:
            file.write(f"{former}\n")
        former.symlink_to(self.work)

    def close(self) -> None:
        """Remove the links to the work folder."""
        for former in self._former:
            former.unlink(missing_ok=True)
            former.parent.rmdir()


def _sockets(where: str, names: list[str]) -> list[str]:
    """Return the names of sockets and pipes, which cannot be copied."""
    return [
        name
        for name in names
        if stat.S_ISSOCK(mode := (Path(where) / name).lstat().st_mode) or stat.S_ISFIFO(mode)
    ]


def remove(folder: Path) -> None:
    """Remove a folder and its content, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def can_mount() -> bool:
    """Return True if a process may mount folders that only it sees; several workers need that."""
    code = (
        "import ctypes; libc = ctypes.CDLL(None); "
        "raise SystemExit(bool(libc.unshare(0x20000) or "
        "libc.mount(b'none', b'/', None, 16384 | (1 << 18), None)))"
    )
    tried = subprocess.run([sys.executable, "-I", "-c", code], check=False, capture_output=True)
    return tried.returncode == 0


def environment_for(
    now: Mapping[str, str], folders: WorkFolders, *, notebook: bool
) -> dict[str, str]:
    """Return the environment of cell processes."""
    environment = dict(now)
    temporary = str(folders.work / TEMPORARY)
    if len(os.fsencode(temporary)) <= LONGEST_TEMPORARY:
        environment["TMPDIR"] = temporary
    environment.setdefault("PYTHONHASHSEED", "0")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    # huge pages: forking a process of several gigabytes takes milliseconds
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    inline = "module://matplotlib_inline.backend_inline"
    environment.setdefault("MPLBACKEND", inline if notebook else "Agg")
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "REARVIEW_SEGMENT"):
        environment.pop(name, None)
    return environment
