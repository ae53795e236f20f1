"""A remote that is a folder, on a shared disk or any mounted file system."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rearview.durable_files import sync_folder
from rearview.remote import base
from rearview.remote.base import Retry, VerifiedRemote, check_key


class FolderRemote(VerifiedRemote):
    """A remote that stores `key` as the file `root/key`; a file gets this name after it is written to the disk."""

    def __init__(self, root: Path, *, retry: Retry | None = None) -> None:
        super().__init__(retry)
        self.root = Path(root).absolute()
        self.name = str(self.root)

    def path(self, key: str) -> Path:
        """Return the path of the file that holds `key`."""
        return self.root / check_key(key)

    def _send(self, local: Path, staged: str) -> None:
        target = self.root / staged
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            size = local.stat().st_size
            sent_size = os.lseek(fd, 0, os.SEEK_END)
            if sent_size > size:
                os.ftruncate(fd, 0)
                sent_size = os.lseek(fd, 0, os.SEEK_SET)
            for data in base.chunks(local, sent_size):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
            # drop the file from the page cache, so that `_compare` reads the bytes from the disk
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _read(self, key: str, offset: int) -> Iterable[bytes]:
        return base.chunks(self.root / key, offset)

    def _publish(self, staged: str, key: str) -> None:
        target = self.root / key
        (self.root / staged).replace(target)
        sync_folder(target.parent)

    def _size(self, key: str) -> int | None:
        path = self.root / key
        try:
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _keys(self, prefix: str) -> Iterable[str]:
        # walk only the folder of the prefix, because other folders may have many keys
        start = self.root / prefix.rpartition("/")[0]
        for folder, _, names in os.walk(start):
            for name in names:
                key = Path(folder, name).relative_to(self.root).as_posix()
                if key.startswith(prefix):
                    yield key

    def _remove(self, key: str) -> None:
        path = self.root / key
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:
                return
