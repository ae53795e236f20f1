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
from rearview.store.create_files import make_folder, publish
from rearview.store.project import FOLDER
from rearview.store.versions.git_database import Entry, GitDatabase

CACHE_FORMAT = 2
"""Format of the cache file. From format 2 on, it begins with the CRC (four bytes) of the bytes that follow."""
LARGEST_NOTEBOOK = 256 << 20
"""Most bytes of a notebook that is read. The limit is high because most bytes are outputs, which are not stored."""
MANY, MUCH = 5_000, 64 << 20
"""If a project has more untracked files than `MANY` or more bytes in them than `MUCH`, only those with code are stored."""
SETTLED = 1_000_000_000
"""Nanoseconds after a change of a file until a second change certainly gives the file another modification time."""

CODE = frozenset(
    b".py .pyi .pyx .pxd .ipynb .toml .cfg .ini .yaml .yml .sh .sql .c .cc .cpp .h .hpp .cu .cuh "
    b".jinja .j2 .gin .r .jl .rs .go .js .ts".split()
)
"""Suffixes of code and configuration files, which are stored even if a project has many untracked files."""
CODE_TEXT = frozenset(
    b".py .pyi .pyx .pxd .ipynb .c .cc .cpp .h .hpp .cu .cuh .r .jl .rs .go".split()
)
"""Suffixes of code files, which are stored even if they contain a secret."""
BINARY = frozenset(
    b".npy .npz .pt .pth .ckpt .safetensors .bin .onnx .h5 .hdf5 .parquet .arrow .feather .pkl "
    b".pickle .joblib .zip .gz .bz2 .xz .zst .tar .tgz .7z .jpg .jpeg .png .gif .bmp .webp .tif "
    b".tiff .ico .pdf .mp3 .wav .flac .ogg .mp4 .avi .mov .mkv .so .o .a .dll .dylib .pyc .whl "
    b".root .fits .db .sqlite .tfrecord .model .spm".split()
)
"""Suffixes of files that are known to be binary without opening them."""
SKIP_FOLDERS = frozenset(
    b"__pycache__ .venv venv site-packages node_modules .tox .nox .mypy_cache .pytest_cache "
    b".ruff_cache .ipynb_checkpoints .eggs wandb mlruns lightning_logs .git .hg .svn".split()
) | {FOLDER.encode()}


class FileFacts(msgspec.Struct, array_like=True):
    """Times, size, inode and mode of one file when its content was last read, and its object name in git (`oid`).

    `oid` is empty if the file is not source.
    """

    mtime: int
    ctime: int
    size: int
    inode: int
    mode: int
    oid: str = ""


class ScanCache(msgspec.Struct):
    """The files that the last scan of a project found, so that unchanged files are not opened again."""

    format: int = CACHE_FORMAT
    place: str = ""
    tree: str = ""
    asof: int = 0
    limit: int = 0
    files: dict[bytes, FileFacts] = {}

    @classmethod
    def read(cls, file: Path, place: str, limit: int) -> ScanCache:
        """Return the cache in `file`, or an empty cache if the file is unreadable or for another `place` or `limit`.

        `place` is the folder of the git database, `limit` the most bytes of a source file.
        """
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            data = file.read_bytes()
            if crc32(data[4:]).to_bytes(4, "little") != data[:4]:
                return cls(place=place, limit=limit)
            cache = msgspec.msgpack.decode(data[4:], type=cls)
            if (cache.format, cache.place, cache.limit) == (CACHE_FORMAT, place, limit):
                return cache
        return cls(place=place, limit=limit)

    def write(self, file: Path) -> None:
        """Write the cache; an error is ignored, because a scan without a cache is only slower."""
        with contextlib.suppress(OSError):
            make_folder(file.parent)
            data = msgspec.msgpack.encode(self)
            publish(file, crc32(data).to_bytes(4, "little") + data, durable=False)


class Database(Protocol):
    """The methods of a git database that a scan uses."""

    work_tree: Path

    def listed(self) -> Iterator[tuple[bool, bytes]]:
        """Yield (whether git tracks the file, path) for each file of the work tree that git does not ignore."""
        ...

    def put(self, data: bytes) -> str:
        """Store `data` as a git blob; return its object name."""
        ...

    def put_files(self, paths: list[bytes]) -> list[str]:
        """Store files of the work tree as git blobs; return their object names, in the order of `paths`."""
        ...


@dataclass(slots=True)
class SourceScan:
    """The source files of a project as one scan found them."""

    files: dict[bytes, FileFacts] = field(default_factory=dict)
    changed: list[bytes] = field(default_factory=list)
    """Paths of files that changed since the last scan, so that their content must be read."""

    def entries(self) -> dict[bytes, Entry]:
        """Return a mapping: path of each file that is source -> (mode, object name), as git stores them in a tree."""
        return {
            path: (_mode(facts.mode), facts.oid) for path, facts in self.files.items() if facts.oid
        }


def scan_source(database: Database, cache: ScanCache) -> SourceScan:
    """Return the source files of a project, after storing the content of those that changed since the scan of `cache`."""
    out, listing = SourceScan(), dict(_list_files(database, b""))
    for path in _source_paths(listing):
        facts, cached = listing[path][1], cache.files.get(path)
        out.files[path] = facts
        if cached is not None and _same(cached, facts) and facts.mtime < cache.asof - SETTLED:
            facts.oid = cached.oid
        elif facts.size <= (LARGEST_NOTEBOOK if _is_notebook(path) else cache.limit):
            out.changed.append(path)
    _store_changed(database, out, cache.limit)
    return out


def _store_changed(database: Database, scan: SourceScan, limit: int) -> None:
    root, texts = os.fsencode(database.work_tree), []
    for path in scan.changed:
        facts, absolute_path = scan.files[path], root + b"/" + path
        try:
            if stat.S_ISLNK(facts.mode):
                facts.oid = _put_link(database, absolute_path)
            elif _is_notebook(path):
                facts.oid = _put_notebook(database, absolute_path, limit)
            elif _is_text(path, absolute_path) and not _is_secret(path, absolute_path):
                texts.append(path)
        except OSError:  # the file was removed or made unreadable since it was listed: leave it out
            del scan.files[path]
    try:
        names = database.put_files(texts)
    except Exception:  # one file was just removed: store the files one by one
        names = [_put_one(database, root + b"/" + path) for path in texts]
    for path, name in zip(texts, names, strict=True):
        scan.files[path].oid = name


def _put_one(database: Database, absolute_path: bytes) -> str:
    try:
        return database.put(Path(os.fsdecode(absolute_path)).read_bytes())
    except OSError:
        return ""


def _put_notebook(database: Database, absolute_path: bytes, limit: int) -> str:
    """Store a notebook without outputs and execution counts, so that executing it does not change the version.

    Return its object name, or "" if it has more than `limit` bytes without them.
    """
    data = without_outputs(Path(os.fsdecode(absolute_path)).read_bytes())
    return database.put(data) if len(data) <= limit else ""


def _put_link(database: Database, absolute_path: bytes) -> str:
    """Store the target path of a link, not the file behind it, which may be outside the project; return its object name."""
    return database.put(os.readlink(absolute_path))  # noqa: PTH115


def _list_files(
    database: Database, prefix: bytes
) -> Iterator[tuple[bytes, tuple[bool, FileFacts]]]:
    """Yield (path, (whether git tracks the file, its facts)) for every file that git does not ignore.

    `prefix` is put before each path. Files in git repositories inside the work tree are included.
    """
    top = os.open(database.work_tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for tracked, path in database.listed():
            parts = path.split(b"/")[:-1]
            if (FOLDER.encode() in parts) if tracked else not SKIP_FOLDERS.isdisjoint(parts):
                continue
            try:
                facts = os.stat(path, dir_fd=top, follow_symlinks=False)
            except OSError:  # the file is tracked, but was deleted
                continue
            kind = facts.st_mode
            if stat.S_ISREG(kind) or stat.S_ISLNK(kind):
                times = facts.st_mtime_ns, facts.st_ctime_ns
                yield prefix + path, (tracked, FileFacts(*times, facts.st_size, facts.st_ino, kind))
            elif stat.S_ISDIR(kind) and isinstance(database, GitDatabase):
                inner = database.work_tree / os.fsdecode(path)
                # a folder with `.git` is a submodule that is checked out, or a clone
                if (inner / ".git").exists():
                    below = GitDatabase(inner / ".git", inner, inner, own=False)
                    yield from _list_files(below, prefix + path.rstrip(b"/") + b"/")
    finally:
        os.close(top)


def _source_paths(listing: Mapping[bytes, tuple[bool, FileFacts]]) -> Iterator[bytes]:
    """Yield the paths of files that may be source: tracked files, and untracked files, without files of secrets.

    If there are too many untracked files (see `MANY`), only those with code are included.
    """
    untracked_sizes = [facts.size for path, (tracked, facts) in listing.items() if not tracked]
    only_code = (
        len(untracked_sizes) > MANY
        or sum(size for size in untracked_sizes if size <= 1 << 20) > MUCH
    )
    for path in sorted(listing):
        name = path.rsplit(b"/", 1)[-1]
        if is_secret_file(os.fsdecode(path)):
            # skip the file even if git tracks it: a version may be copied to places where the repository is not
            continue
        if not listing[path][0]:
            if only_code and not (_suffix(name) in CODE or name.startswith(b"requirements")):
                continue
        yield path


def _is_text(path: bytes, absolute_path: bytes) -> bool:
    if _suffix(path) in BINARY:
        return False
    with open(absolute_path, "rb") as file:  # noqa: PTH123
        return b"\0" not in file.read(8000)  # the rule by which git recognizes binary files


def _is_secret(path: bytes, absolute_path: bytes) -> bool:
    """Return True if the file is not code, and holds a private key or a token."""
    if _suffix(path) in CODE_TEXT:
        return False  # code is stored, whatever it contains: a run cannot be replayed without it, and the store is private
    with open(absolute_path, "rb") as file:  # noqa: PTH123
        return holds_secret(file.read())


def _is_notebook(path: bytes) -> bool:
    return path.endswith(NOTEBOOK.encode())


def _suffix(path: bytes) -> bytes:
    return os.path.splitext(path)[1].lower()  # noqa: PTH122


def _same(a: FileFacts, b: FileFacts) -> bool:
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
