"""Work folders, in which cells run: copies of the project's files, so that cells never change the user's own folder."""

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
"""Name of the folder, in the scratch folder, with the replay's copies of the project's files."""
LINKS = "links"
"""Name of the file, in the scratch folder, that lists links elsewhere; they are removed if the replay is killed."""
PROJECT, TEMPORARY = "project", "tmp"
"""Names of the two folders in a work folder: files of the project, and temporary files of the program."""
LONGEST_TEMPORARY = 70
"""Longest path of the folder for temporary files, in bytes: the paths of sockets must be short."""
LINK_SIZE = 1 << 20
"""Size in bytes above which a file is a link to the replay's copy until a cell writes to it."""


class WorkFolders:
    """Fills, copies and restores the work folders of one study, all below a scratch folder.

    Every file is copied once into `inputs`. A work folder contains copies of small files and links to large
    files; a cell process replaces a link by a copy before it writes to the file. The project's files are in
    `PROJECT`, temporary files of the program in `TEMPORARY`; both are a part of the state.
    """

    def __init__(self, scratch: Path, study: Study) -> None:
        self.scratch = scratch
        self.inputs = Path(os.path.realpath(scratch)) / INPUTS
        self.images = scratch / "images"
        self.work = scratch / "work"
        """File path at which programs see their work folder; each of several workers mounts its own folder there."""
        for folder in (self.inputs, self.images, self.work / TEMPORARY):
            folder.mkdir(parents=True, exist_ok=True)
        self._copies: dict[tuple[str, str], Path] = {}
        self._former_paths: list[Path] = []
        """Links that this replay has made at the file paths of earlier replays' work folders."""
        self._study = study

    def _copy(self, ref: FileRef) -> Path:
        """Return the replay's copy of a file; make the copy on first use."""
        if ref.file is None:
            raise ReplayError(
                "A file that a version reads is gone: only its hash is known.", slug="file-gone"
            )
        key = (str(ref.file), ref.digest)
        if key not in self._copies:
            target = self.inputs / f"{len(self._copies):06d}-{ref.file.name[-60:]}"
            shutil.copy2(ref.file, target)
            target.chmod(target.stat().st_mode | 0o200)
            self._copies[key] = target
        return self._copies[key]

    def fill(self, version: StudyVersion, folder: Path, program: bytes | None = None) -> None:
        """Fill an empty work folder with the files of a version; `program` is the content of its program."""
        (folder / TEMPORARY).mkdir(parents=True, exist_ok=True)
        folder = folder / PROJECT
        folder.mkdir()
        for name, ref in version.files.items():
            if ref.file is not None and name != version.program:
                self._put(folder / name, ref)
        (folder / version.cwd).mkdir(parents=True, exist_ok=True)
        if program is not None:
            file = folder / version.program
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(program)

    def _put(self, file: Path, ref: FileRef) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink() or file.exists():
            file.unlink()
        copy = self._copy(ref)
        if ref.size > LINK_SIZE:
            file.symlink_to(copy)
        else:
            shutil.copy2(copy, file)

    def switch(
        self, previous_version: StudyVersion, next_version: StudyVersion, folder: Path
    ) -> None:
        """Replace in a work folder the files in which two versions differ."""
        if previous_version.files is next_version.files:
            return
        folder = folder / PROJECT
        for name in {**previous_version.files, **next_version.files}:
            old, new = previous_version.files.get(name), next_version.files.get(name)
            if old == new or (old and new and old.digest and old.digest == new.digest):
                continue
            if new is None:
                (folder / name).unlink(missing_ok=True)
            elif new.file is not None:
                self._put(folder / name, new)

    def exchange_program(
        self,
        previous_version: StudyVersion,
        next_version: StudyVersion,
        program: bytes,
        folder: Path,
    ) -> None:
        """Replace the program of one version by the program of another version, whose content is `program`."""
        if previous_version.program != next_version.program:
            ref = next_version.files.get(previous_version.program)
            file = folder / PROJECT / previous_version.program
            if ref is not None and ref.file is not None:
                self._put(file, ref)
            else:
                file.unlink(missing_ok=True)
        (folder / PROJECT / next_version.program).write_bytes(program)

    def keep_image(self, name: str, folder: Path) -> Path:
        """Copy a work folder as it is now; return the folder with the copy."""
        image = self.images / name
        remove_folder(image)
        shutil.copytree(folder, image, symlinks=True, ignore=_sockets_and_pipes)
        return image

    def restore_image(self, image: Path, folder: Path) -> None:
        """Restore a work folder from a copy that `keep_image` made."""
        remove_folder(folder)
        shutil.copytree(image, folder, symlinks=True)

    def save_written(self, folder: Path, target: Path) -> list[str]:
        """Copy a work folder to `target` without the links to inputs; return the names of these links."""
        inputs: list[str] = []

        def skip_links(parent: str, names: list[str]) -> list[str]:
            skipped = _sockets_and_pipes(parent, names)
            for name in names:
                file = Path(parent) / name
                if file.is_symlink() and file.readlink().parent == self.inputs:
                    inputs.append(file.relative_to(folder / PROJECT).as_posix())
                    skipped.append(name)
            return skipped

        shutil.copytree(folder, target, symlinks=True, ignore=skip_links)
        return inputs

    def load_written(
        self, version: StudyVersion, saved: Path, inputs: list[str], folder: Path
    ) -> None:
        """Restore a work folder that `save_written` copied to `saved`; `inputs` are the names that it returned."""
        remove_folder(folder)
        shutil.copytree(saved, folder, symlinks=True)
        for name in inputs:
            ref = version.files.get(name)
            if ref is not None and ref.file is not None:
                self._put(folder / PROJECT / name, ref)

    def link_former_path(self, former_path: Path) -> None:
        """Make a link to the work folder at its file path in an earlier replay, which a stored state may contain."""
        if former_path in {self.work, *self._former_paths}:
            return
        former_path.parent.mkdir(mode=0o700)
        self._former_paths.append(former_path)
        with (self.scratch / LINKS).open("a", encoding="utf-8") as file:
            file.write(f"{former_path}\n")
        former_path.symlink_to(self.work)

    def close(self) -> None:
        """Remove the links that `link_former_path` made."""
        for former_path in self._former_paths:
            former_path.unlink(missing_ok=True)
            former_path.parent.rmdir()


def _sockets_and_pipes(parent: str, names: list[str]) -> list[str]:
    """Return the names of sockets and pipes, which cannot be copied."""
    return [
        name
        for name in names
        if stat.S_ISSOCK(mode := (Path(parent) / name).lstat().st_mode) or stat.S_ISFIFO(mode)
    ]


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def can_mount() -> bool:
    """Return True if a process may mount a folder visible to itself only, which several workers need."""
    code = (
        "import ctypes; libc = ctypes.CDLL(None); "
        "raise SystemExit(bool(libc.unshare(0x20000) or "
        "libc.mount(b'none', b'/', None, 16384 | (1 << 18), None)))"
    )
    trial = subprocess.run([sys.executable, "-I", "-c", code], check=False, capture_output=True)
    return trial.returncode == 0


def environment_for(
    current: Mapping[str, str], folders: WorkFolders, *, notebook: bool
) -> dict[str, str]:
    """Return the environment of cell processes: the `current` one, with changes for a replay."""
    environment = dict(current)
    temporary = str(folders.work / TEMPORARY)
    if len(os.fsencode(temporary)) <= LONGEST_TEMPORARY:
        environment["TMPDIR"] = temporary
    environment.setdefault("PYTHONHASHSEED", "0")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    # with huge pages, forking a process of several gigabytes takes only milliseconds
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    inline = "module://matplotlib_inline.backend_inline"
    environment.setdefault("MPLBACKEND", inline if notebook else "Agg")
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "REARVIEW_SEGMENT"):
        environment.pop(name, None)
    return environment
