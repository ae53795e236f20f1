"""Find the source files of a project, and store those that changed since the last version."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from zlib import crc32

import msgspec

from rearview.model.run import NOTEBOOK
from rearview.model.secrets import holds_secret, is_secret_file
from rearview.source.notebooks import without_outputs
from rearview.store.files import make_folder, publish
from rearview.store.project import FOLDER
from rearview.store.versions.git import Entry, GitDatabase

CACHE_FORMAT = 2
"""From 2 on, the file begins with four bytes, the CRC of the rest."""
LARGEST_NOTEBOOK = 256 << 20
"""Bytes of a notebook that is looked into: most of them are outputs, which are not kept."""
MANY, MUCH = 5_000, 64 << 20
"""With more untracked files, or more untracked bytes, only untracked code files are taken."""
SETTLED = 1_000_000_000
"""Nanoseconds after a change before a file's time distinguishes a later change from it."""

CODE = frozenset(
    b".py .pyi .pyx .pxd .ipynb .toml .cfg .ini .yaml .yml .sh .sql .c .cc .cpp .h .hpp .cu .cuh "
    b".jinja .j2 .gin .r .jl .rs .go .js .ts".split()
)
CODE_TEXT = frozenset(
    b".py .pyi .pyx .pxd .ipynb .c .cc .cpp .h .hpp .cu .cuh .r .jl .rs .go".split()
)
"""Suffixes of code, which is always taken."""
BINARY = frozenset(
    b".npy .npz .pt .pth .ckpt .safetensors .bin .onnx .h5 .hdf5 .parquet .arrow .feather .pkl "
    b".pickle .joblib .zip .gz .bz2 .xz .zst .tar .tgz .7z .jpg .jpeg .png .gif .bmp .webp .tif "
    b".tiff .ico .pdf .mp3 .wav .flac .ogg .mp4 .avi .mov .mkv .so .o .a .dll .dylib .pyc .whl "
    b".root .fits .db .sqlite .tfrecord .model .spm".split()
)
"""Suffixes of binary files, which need not be opened to find out."""
SKIP_FOLDERS = frozenset(
    b"__pycache__ .venv venv site-packages node_modules .tox .nox .mypy_cache .pytest_cache "
    b".ruff_cache .ipynb_checkpoints .eggs wandb mlruns lightning_logs .git .hg .svn".split()
) | {FOLDER.encode()}


class Seen(msgspec.Struct, array_like=True):
    """A file when its content was last read; `oid` is empty if it is not source."""

    mtime: int
    ctime: int
    size: int
    inode: int
    mode: int
    oid: str = ""


class Cache(msgspec.Struct):
    """The result of the last scan: files that did not change are not opened again."""

    format: int = CACHE_FORMAT
    place: str = ""
    tree: str = ""
    asof: int = 0
    limit: int = 0
    files: dict[bytes, Seen] = {}

    @classmethod
    def read(cls, file: Path, place: str, limit: int) -> Cache:
        """Return the cache for this database and size limit, or an empty one."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            data = file.read_bytes()
            if crc32(data[4:]).to_bytes(4, "little") != data[:4]:
                return cls(place=place, limit=limit)
            cache = msgspec.msgpack.decode(data[4:], type=cls)
            if (cache.format, cache.place, cache.limit) == (CACHE_FORMAT, place, limit):
                return cache
        return cls(place=place, limit=limit)

    def write(self, file: Path) -> None:
        """Write the cache; losing it only costs time."""
        with contextlib.suppress(OSError):
            make_folder(file.parent)
            data = msgspec.msgpack.encode(self)
            publish(file, crc32(data).to_bytes(4, "little") + data, durable=False)


class Database(Protocol):
    """The methods of a git database that a scan uses."""

    work_tree: Path

    def listed(self) -> Iterator[tuple[bool, bytes]]:
        """Yield (tracked?, path) of all files that are not ignored."""
        ...

    def put(self, data: bytes) -> str:
        """Store bytes."""
        ...

    def put_files(self, paths: list[bytes]) -> list[str]:
        """Store files of the work tree."""
        ...


@dataclass(slots=True)
class SourceScan:
    """The files of a project: their facts, and those whose content must be read."""

    files: dict[bytes, Seen] = field(default_factory=dict)
    changed: list[bytes] = field(default_factory=list)

    def entries(self) -> dict[bytes, Entry]:
        """Return the entries of the tree."""
        return {path: (_mode(seen.mode), seen.oid) for path, seen in self.files.items() if seen.oid}


def scan_source(database: Database, cache: Cache) -> SourceScan:
    """Find the source files and store the content of those that changed since `cache`."""
    out, listing = SourceScan(), dict(_facts(database, b""))
    for path in _taken(listing):
        seen, old = listing[path][1], cache.files.get(path)
        out.files[path] = seen
        if old is not None and _same(old, seen) and seen.mtime < cache.asof - SETTLED:
            seen.oid = old.oid
        elif seen.size <= (LARGEST_NOTEBOOK if _is_notebook(path) else cache.limit):
            out.changed.append(path)
    _store(database, out, cache.limit)
    return out


def _store(database: Database, scan: SourceScan, limit: int) -> None:
    root, texts = os.fsencode(database.work_tree), []
    for path in scan.changed:
        seen, whole = scan.files[path], root + b"/" + path
        try:
            if stat.S_ISLNK(seen.mode):
                seen.oid = _put_link(database, whole)
            elif _is_notebook(path):
                seen.oid = _put_notebook(database, whole, limit)
            elif _is_text(path, whole) and not _is_secret(path, whole):
                texts.append(path)
        except OSError:  # gone or unreadable since it was listed: not part of this version
            del scan.files[path]
    try:
        names = database.put_files(texts)
    except Exception:  # a file that was just removed must not lose the others
        names = [_put_one(database, root + b"/" + path) for path in texts]
    for path, name in zip(texts, names, strict=True):
        scan.files[path].oid = name


def _put_one(database: Database, whole: bytes) -> str:
    try:
        return database.put(Path(os.fsdecode(whole)).read_bytes())
    except OSError:
        return ""


def _put_notebook(database: Database, whole: bytes, limit: int) -> str:
    """Store a notebook without its outputs and counts: executing it does not change the source."""
    data = without_outputs(Path(os.fsdecode(whole)).read_bytes())
    return database.put(data) if len(data) <= limit else ""


def _put_link(database: Database, whole: bytes) -> str:
    """Store a link as a link, wherever it leads: its target may be outside the project."""
    return database.put(os.readlink(whole))  # noqa: PTH115


def _facts(database: Database, prefix: bytes) -> Iterator[tuple[bytes, tuple[bool, Seen]]]:
    """Yield path, tracked? and facts of every file, also of repositories inside."""
    top = os.open(database.work_tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for tracked, path in database.listed():
            parts = path.split(b"/")[:-1]
            if (FOLDER.encode() in parts) if tracked else not SKIP_FOLDERS.isdisjoint(parts):
                continue
            try:
                facts = os.stat(path, dir_fd=top, follow_symlinks=False)
            except OSError:  # tracked, but deleted in the work tree
                continue
            kind = facts.st_mode
            if stat.S_ISREG(kind) or stat.S_ISLNK(kind):
                times = facts.st_mtime_ns, facts.st_ctime_ns
                yield prefix + path, (tracked, Seen(*times, facts.st_size, facts.st_ino, kind))
            elif stat.S_ISDIR(kind) and isinstance(database, GitDatabase):
                inner = database.work_tree / os.fsdecode(path)
                if (inner / ".git").exists():  # a submodule that is checked out, or a clone
                    below = GitDatabase(inner / ".git", inner, inner, own=False)
                    yield from _facts(below, prefix + path.rstrip(b"/") + b"/")
    finally:
        os.close(top)


def _taken(listing: Mapping[bytes, tuple[bool, Seen]]) -> Iterator[bytes]:
    """Yield tracked files, and untracked ones that look like source."""
    loose = [seen.size for path, (tracked, seen) in listing.items() if not tracked]
    only_code = len(loose) > MANY or sum(size for size in loose if size <= 1 << 20) > MUCH
    for path in sorted(listing):
        name = path.rsplit(b"/", 1)[-1]
        if is_secret_file(os.fsdecode(path)):
            continue  # even if tracked: a version may be sent further than the repository
        if not listing[path][0]:
            if only_code and not (_suffix(name) in CODE or name.startswith(b"requirements")):
                continue
        yield path


def _is_text(path: bytes, whole: bytes) -> bool:
    if _suffix(path) in BINARY:
        return False
    with open(whole, "rb") as file:  # noqa: PTH123
        return b"\0" not in file.read(8000)  # git's own rule


def _is_secret(path: bytes, whole: bytes) -> bool:
    """Return True if a file that is not code holds a private key or a token."""
    if _suffix(path) in CODE_TEXT:
        return (
            False  # code stays: without it the run could not be replayed, and the store is private
        )
    with open(whole, "rb") as file:  # noqa: PTH123
        return holds_secret(file.read())


def _is_notebook(path: bytes) -> bool:
    return path.endswith(NOTEBOOK.encode())


def _suffix(path: bytes) -> bytes:
    return os.path.splitext(path)[1].lower()  # noqa: PTH122


def _same(a: Seen, b: Seen) -> bool:
    return (a.mtime, a.ctime, a.size, a.inode, a.mode) == (
        b.mtime,
        b.ctime,
        b.size,
        b.inode,
        b.mode,
    )


def _mode(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & 0o100 else "100644"
