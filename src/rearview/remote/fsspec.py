"""A remote at a URL that the library fsspec opens: s3://, gs://, webdav+http://, sftp:// and others."""

from __future__ import annotations

import base64
import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rearview.remote import base
from rearview.remote.base import HIDDEN, Retry, VerifiedRemote, scheme_of

PIECE = 64 << 20
"""Bytes per piece of a large file that is sent to an object store: an interrupted `put` continues after a piece."""

STORE_PART = 50 << 20
"""Size in bytes of the parts in which s3fs sends a file by default."""

APPENDS = {"file", "local", "memory", "sftp", "ssh"}
"""Protocols whose file systems can append to a file."""


class FsspecRemote(VerifiedRemote):
    """A remote whose keys are objects below `url`; `options` go to fsspec's file system (credentials, endpoints…)."""

    def __init__(
        self, url: str, *, retry: Retry | None = None, piece: int = PIECE, **options: Any
    ) -> None:
        super().__init__(retry)
        self.url, self.options, self.piece = url.rstrip("/"), options, piece
        self.name = self.url
        self._opened: tuple[int, Any, str] | None = None

    @property
    def _fs(self) -> Any:
        return self._open()[0]

    def _path(self, key: str) -> str:
        return f"{self._open()[1]}/{key}"

    def _open(self) -> tuple[Any, str]:
        # open again after a fork, because the event loop of an asynchronous file system does not survive a fork
        if self._opened is None or self._opened[0] != os.getpid():
            import fsspec

            options = dict(self.options)
            if self._opened is not None:
                options["skip_instance_cache"] = True
            if scheme_of(self.url).startswith("webdav"):
                fs, root = _webdav(self.url, self.options)
                weakref.finalize(self, fs.client.http.close).atexit = False
            else:
                fs, root = fsspec.core.url_to_fs(self.url, **options)
            self._opened = (os.getpid(), fs, root.rstrip("/"))
        return self._opened[1], self._opened[2]

    def _send(self, local: Path, staged: str) -> None:
        fs, path, size = self._fs, self._path(staged), local.stat().st_size
        if "webdav" in _protocols(fs):
            _make_folder(fs, path.rpartition("/")[0])
        else:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        sent_size = self._size(staged) or 0
        if size > self.piece and hasattr(fs, "merge"):
            if sent_size != size:
                self._send_pieces(local, staged, size)
            return
        if 0 < sent_size < size and not APPENDS.isdisjoint(_protocols(fs)):
            with fs.open(path, "ab") as file:
                for data in base.chunks(local, sent_size):
                    file.write(data)
        elif sent_size != size or size == 0:
            fs.put_file(str(local), path)

    def _send_pieces(self, local: Path, staged: str, size: int) -> None:
        fs, pieces = self._fs, []
        for number, offset in enumerate(range(0, size, self.piece)):
            length = min(self.piece, size - offset)
            key = f"{staged}.{number:05d}"
            pieces.append(key)
            if self._size(key) != length:
                with local.open("rb") as file:
                    file.seek(offset)
                    fs.pipe_file(self._path(key), file.read(length))
        fs.merge(self._path(staged), [self._path(key) for key in pieces])
        for key in pieces:
            self._remove(key)

    def _read(self, key: str, offset: int) -> Iterator[bytes]:
        with self._fs.open(self._path(key), "rb", block_size=base.CHUNK) as file:
            file.seek(offset)
            while data := file.read(base.CHUNK):
                yield data

    def _publish(self, staged: str, key: str) -> None:
        fs, source, target = self._fs, self._path(staged), self._path(key)
        if "webdav" in _protocols(fs):
            fs.client.move(source, target, overwrite=True)  # webdav4's mv never overwrites
        else:
            fs.mv(source, target)

    def _info(self, key: str) -> dict[str, Any] | None:
        fs = self._fs
        fs.invalidate_cache()
        try:
            info: dict[str, Any] = fs.info(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info if info.get("type", "file") == "file" else None

    def _size(self, key: str) -> int | None:
        info = self._info(key)
        return None if info is None else int(info.get("size") or 0)

    def _checksum(self, key: str) -> str:
        fs, info = self._fs, self._info(key) or {}
        protocols = _protocols(fs)
        if not protocols.isdisjoint({"s3", "s3a"}) and info.get("ETag"):
            tag = str(info["ETag"]).strip('"')
            return f"etag:{tag}" if "-" in tag else f"md5:{tag}"
        if not protocols.isdisjoint({"gs", "gcs"}) and info.get("md5Hash"):
            return "md5:" + base64.b64decode(info["md5Hash"]).hex()
        return ""

    def _agrees(self, stated: str, local: Path) -> bool:
        if stated.startswith("etag:"):
            return any(
                stated == f"etag:{base.etag(local, size)}" for size in (self.piece, STORE_PART)
            )
        return super()._agrees(stated, local)

    def _keys(self, prefix: str) -> Iterable[str]:
        fs, root = self._open()
        fs.invalidate_cache()
        folder = prefix.rpartition("/")[0]
        start = f"{root}/{folder}" if folder else root
        for path in fs.find(start):
            key = str(path).removeprefix(root).lstrip("/")
            if key.startswith(prefix):
                yield key

    def _remove(self, key: str) -> None:
        if HIDDEN in key and hasattr(self._fs, "merge"):
            # `key` belongs to a transfer in progress: remove its pieces too
            for piece in [k for k in self._keys(key + ".") if k != key]:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(piece))
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _webdav(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return (file system, path in this file system) for a URL such as webdav+https://host/path."""
    from urllib.parse import urlsplit

    from webdav4.fsspec import WebdavFileSystem

    plain = url.partition("+")[2] if "+" in url else "https://" + url.partition("://")[2]
    parts = urlsplit(plain)
    fs = WebdavFileSystem(f"{parts.scheme}://{parts.netloc}", skip_instance_cache=True, **options)
    return fs, parts.path.strip("/")


def _make_folder(fs: Any, path: str) -> None:
    """Create the folder `path` and its missing parents.

    Parents of existing folders are not touched, because the user may have no access to these parents.
    """
    if not path or fs.exists(path):
        return
    _make_folder(fs, path.rpartition("/")[0])
    try:
        fs.mkdir(path)
    except FileExistsError:
        return
