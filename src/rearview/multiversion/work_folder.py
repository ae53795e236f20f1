"""Work folders: copies of the project's files in which cells run, so that they never change the user's folder."""

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
"""Name of the subfolder of the scratch folder with the replay's copies of the project's files."""
LINKS = "links"
"""Name of a file in the scratch folder: it lists links in other folders, which are removed if the replay is killed."""
PROJECT, TEMPORARY = "project", "tmp"
"""Names of the two subfolders of a work folder: files of the project, and temporary files of the program."""
LONGEST_TEMPORARY = 70
"""Length in bytes up to which TMPDIR is set to the work folder: programs create sockets there with short paths."""
LINK_SIZE = 1 << 20
"""Size in bytes above which a file in a work folder is a link to the replay's copy until a cell writes to it."""


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
        """File path of every program's work folder; if there are several workers, each mounts its own folder there."""
        for folder in (self.inputs, self.images, self.work / TEMPORARY):
            folder.mkdir(parents=True, exist_ok=True)
        self._copies: dict[tuple[str, str], Path] = {}
        self._former_paths: list[Path] = []
        """Links that this replay has made; each is at the file path of an earlier replay's work folder."""
        self._study = study

    def _copy(self, ref: FileRef) -> Path:
        """Return the path of the replay's copy of a file, made on first use; raise if only the file's hash is known."""
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
        """Fill an empty work folder with the files of `version`; `program` is the content of the version's program."""
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
        """Replace the files in a work folder that differ between two versions, by those of `next_version`."""
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
        """Replace the program of `previous_version` in a work folder by `program`, the content of the next one's."""
        if previous_version.program != next_version.program:
            ref = next_version.files.get(previous_version.program)
            file = folder / PROJECT / previous_version.program
            if ref is not None and ref.file is not None:
                self._put(file, ref)
            else:
                file.unlink(missing_ok=True)
        (folder / PROJECT / next_version.program).write_bytes(program)

    def keep_image(self, name: str, folder: Path) -> Path:
        """Copy the work folder `folder` in its present state; return the folder with the copy."""
        image = self.images / name
        remove_folder(image)
        shutil.copytree(folder, image, symlinks=True, ignore=_sockets_and_pipes)
        return image

    def restore_image(self, image: Path, folder: Path) -> None:
        """Replace the work folder `folder` by a copy of `image`, which `keep_image` returned."""
        remove_folder(folder)
        shutil.copytree(image, folder, symlinks=True)

    def save_written(self, folder: Path, target: Path) -> list[str]:
        """Copy a work folder to `target` without its links to files in `inputs`; return the paths of these links."""
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
        """Restore into `folder` what `save_written` copied to `saved`; `inputs` is the list that it returned."""
        remove_folder(folder)
        shutil.copytree(saved, folder, symlinks=True)
        for name in inputs:
            ref = version.files.get(name)
            if ref is not None and ref.file is not None:
                self._put(folder / PROJECT / name, ref)

    def link_former_path(self, former_path: Path) -> None:
        """Link `former_path` to the work folder of this replay.

        It is the path of the work folder in an earlier replay; a state that the earlier replay stored may contain it.
        """
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
    """Return those of `names` in the folder `parent` that are sockets or pipes, which cannot be copied."""
    return [
        name
        for name in names
        if stat.S_ISSOCK(mode := (Path(parent) / name).lstat().st_mode) or stat.S_ISFIFO(mode)
    ]


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content; do nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def can_mount() -> bool:
    """Return True if a process can mount a folder that only it sees; a replay with several workers needs this."""
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
    """Return the environment variables for cell processes: the `current` ones with changes for a replay."""
    environment = dict(current)
    temporary = str(folders.work / TEMPORARY)
    if len(os.fsencode(temporary)) <= LONGEST_TEMPORARY:
        environment["TMPDIR"] = temporary
    environment.setdefault("PYTHONHASHSEED", "0")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    # with huge pages, a fork of a process of several gigabytes takes only milliseconds
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    inline = "module://matplotlib_inline.backend_inline"
    environment.setdefault("MPLBACKEND", inline if notebook else "Agg")
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "REARVIEW_SEGMENT"):
        environment.pop(name, None)
    return environment
