"""A remote on grid storage, reached over XRootD with its official Python client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rearview.remote.base import CHUNK, HIDDEN, DiffersError, Retry, VerifiedRemote

NOT_FOUND = 3011
CHECKSUM_KINDS = {"adler32", "md5"}


class XrootdRemote(VerifiedRemote):
    """A remote whose keys are files below the URL of a folder, such as `root://host:1094//pnfs/site/user/run`."""

    def __init__(self, url: str, *, retry: Retry | None = None, timeout: int = 60) -> None:
        super().__init__(retry)
        scheme, _, location = url.partition("://")
        host, _, path = location.partition("/")
        self.server = f"{scheme}://{host}"
        self.root = "/" + path.strip("/")
        self.timeout = timeout
        self.name = f"{self.server}/{self.root}"
        self._client: Any = None

    @property
    def _fs(self) -> Any:
        if self._client is None:
            from XRootD import client

            self._client = client.FileSystem(self.server)
        return self._client

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def _url(self, key: str) -> str:
        # a key must have no question mark: the client reads the text after it as options of the URL
        return f"{self.server}/{self._path(key)}"

    def _send(self, local: Path, staged: str) -> None:
        sent_size, size = self._size(staged), local.stat().st_size
        if sent_size is not None and sent_size == size and size:
            return
        resume = sent_size is not None and 0 < sent_size < size
        try:
            self._copy(_file(local), self._url(staged), resume=resume)
        except OSError:
            if not resume:
                raise
            # some storage lets a file be written only once and cannot continue it: send the file again
            self._remove(staged)
            self._copy(_file(local), self._url(staged), resume=False)

    def _copy(self, source: str, target: str, *, resume: bool) -> None:
        from XRootD import client

        process = client.CopyProcess()
        process.add_job(source, target, force=not resume, cont=resume, mkdir=True)
        _check(process.prepare())
        status, results = process.run()
        _check(status)
        for result in results:
            _check(result["status"])

    def _fetch(self, key: str, part: Path, size: int) -> None:
        received_size = part.stat().st_size if part.exists() else 0
        if received_size > size:
            part.unlink()
            received_size = 0
        if not size:
            part.touch()  # the client creates no file if the file to copy is empty
        elif received_size < size:
            self._copy(self._url(key), _file(part), resume=0 < received_size < size)
        if (received_size := part.stat().st_size) != size:
            raise DiffersError(f"{received_size} bytes of {key} arrived; it has {size}")

    def _read(self, key: str, offset: int) -> Iterator[bytes]:
        from XRootD import client
        from XRootD.client.flags import OpenFlags

        file = client.File()
        status, _ = file.open(self._url(key), OpenFlags.READ, timeout=self.timeout)
        _check(status)
        try:
            while True:
                status, data = file.read(offset, CHUNK, timeout=self.timeout)
                _check(status)
                if not data:
                    return
                offset += len(data)
                yield data
        finally:
            file.close()

    def _publish(self, staged: str, key: str) -> None:
        try:
            self._move(staged, key)
        except OSError:
            if self._size(key) is None:
                raise
            # this storage cannot replace a file by a rename: keep the old file until the new file has its name
            folder, _, name = key.rpartition("/")
            old = f"{folder + '/' if folder else ''}{HIDDEN}old-{name}"
            self._move(key, old)
            try:
                self._move(staged, key)
            except OSError:
                self._move(old, key)
                raise
            self._remove(old)

    def _move(self, source: str, target: str) -> None:
        status, _ = self._fs.mv(self._path(source), self._path(target), timeout=self.timeout)
        _check(status)

    def _size(self, key: str) -> int | None:
        from XRootD.client.flags import StatInfoFlags

        status, info = self._fs.stat(self._path(key), timeout=self.timeout)
        if not status.ok and (status.errno == NOT_FOUND or "not a directory" in status.message):
            return None
        _check(status)
        return None if info.flags & StatInfoFlags.IS_DIR else int(info.size)

    def _checksum(self, key: str) -> str:
        from XRootD.client.flags import QueryCode

        status, answer = self._fs.query(QueryCode.CHECKSUM, self._path(key), timeout=self.timeout)
        if not status.ok:
            return ""
        kind, _, value = answer.decode("ascii", "replace").strip("\0 \n").partition(" ")
        return f"{kind}:{value}" if kind in CHECKSUM_KINDS else ""

    def _keys(self, prefix: str) -> Iterable[str]:
        yield from self._walk(prefix.rpartition("/")[0], prefix)

    def _walk(self, folder: str, prefix: str) -> Iterator[str]:
        from XRootD.client.flags import DirListFlags, StatInfoFlags

        status, listing = self._fs.dirlist(
            self._path(folder), DirListFlags.STAT, timeout=self.timeout
        )
        if not status.ok and status.errno == NOT_FOUND:
            return
        _check(status)
        for entry in listing:
            key = f"{folder}/{entry.name}" if folder else str(entry.name)
            if entry.statinfo.flags & StatInfoFlags.IS_DIR:
                yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                yield key

    def _remove(self, key: str) -> None:
        status, _ = self._fs.rm(self._path(key), timeout=self.timeout)
        if not status.ok and status.errno != NOT_FOUND:
            _check(status)
        folder = key.rpartition("/")[0]
        while folder:
            with contextlib.suppress(OSError):
                status, _ = self._fs.rmdir(self._path(folder), timeout=self.timeout)
                if not status.ok:
                    return
            folder = folder.rpartition("/")[0]


def _file(path: Path) -> str:
    # not `path.as_uri()`: the client does not decode escapes such as %20 after file://
    return f"file://{path.absolute()}"


def _check(status: Any) -> None:
    if status.ok:
        return
    message = str(status.message).strip()
    if status.errno == 3010:  # the error kXR_NotAuthorized of XRootD
        raise PermissionError(message)
    raise OSError(message)
