"""Results of cells on disk: the inputs of a cell, the variables that it left, and its output.

Results are in `cache/cells` of the store, which can be deleted at any time. One execution of a cell ("entry") is a
file `entries/<code>/<key>.json`, where `key` is a hash of the inputs. Pickled variables, outputs and other bytes
to which entries refer are files `contents/<digest>`. `seeds/<notebook>` has the bytes from which the random
generators of a notebook are seeded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rearview.model.cell_lineage import Event
from rearview.state.variable_groups import Serialized, object_of
from rearview.store.create_files import make_folder

FORMAT = 3
SEED_BYTES = 32
"""Number of bytes from which the random generators of a notebook are seeded."""
MOST_ENTRIES = 8
"""Largest number of executions that are stored for the code of one cell."""
DRAFT_SECONDS = 3600.0
"""Age in seconds after which an unfinished file is removed: the process that wrote it was probably killed."""
MOST_BYTES = 4 << 30
"""Size in bytes that all contents together may take; the least recently used ones are removed first."""


class GroupRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group of variables that share objects, with the digest of their content after a cell."""

    names: tuple[str, ...]
    content: str
    """Digest of the content of the variables, or, if they cannot be stored, of the inputs of the cell that set them."""
    stored: bool = False
    """Whether the content is stored. If not, the cell is run again when a later cell needs the variables."""
    uses: tuple[str, ...] = ()
    """Names of the notebook's functions and classes to which the content refers; `*` if they are not known."""
    why: str = ""
    """Reason why the content was not stored; empty if it was stored."""


class CellEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stored execution of a cell: inputs, effects and outputs, with digests of stored contents."""

    format: int
    key: str
    inputs: dict[str, str]
    settings: str
    random: dict[str, str] = {}
    """Library -> digest of the random state from which the cell drew."""
    random_before_imports: str = ""
    """Digest of the state of Python's `random` before the cell, if only imports drew from it; else empty."""
    draws_seeds: bool = False
    """Whether the cell drew seeds from the system: it created random generators without a seed."""
    seeds: str = ""
    """Digest that is equal for runs whose random generators begin in the same states."""
    random_loaded: dict[str, str] = {}
    """Library that the cell imported -> digest of the first state of its random generator."""
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    environment: dict[str, str] = {}
    """Environment variable that this or an earlier cell read -> hash of its value before this cell ran."""
    environment_after: dict[str, str] = {}
    """Environment variable that the cell changed -> hash of its value after the cell ran."""
    modules: dict[str, str] = {}
    groups: tuple[GroupRef, ...] = ()
    deleted: tuple[str, ...] = ()
    definitions: dict[str, str] = {}
    """Function or class that the cell defined -> digest of its content."""
    random_after: dict[str, str] = {}
    settings_after: str = ""
    written: dict[str, str] = {}
    again: bool = False
    """Whether the whole cell must run before the next cell that runs, because it changes state outside variables."""
    setup: str = ""
    """Hash of the statements that change state outside variables, such as settings; empty if there are none."""
    setup_text: str = ""
    """The statements hashed in `setup`, if they use no variables: only they must run again, not the whole cell."""
    settings_values: dict[str, str] = {}
    """Library whose settings the cell changed -> digest under which the new settings are stored."""
    messages: str = ""
    seconds: float = 0.0
    size: int = 0
    events: tuple[Event, ...] = ()


class ResultStore:
    """The stored results of cells of one project, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._entries = folder / "entries"
        self._contents = folder / "contents"
        self._seeds = folder / "seeds"
        make_folder(self._entries)
        make_folder(self._contents)

    def seeds(self, notebook: str) -> bytes:
        """Return the bytes that seed the random generators of a notebook; the first call draws and stores them."""
        name = xxhash.xxh3_128(notebook.encode("utf-8", "surrogatepass")).hexdigest()
        file = self._seeds / name
        try:
            data = file.read_bytes()
        except OSError:
            data = b""
        if len(data) != SEED_BYTES:
            data = os.urandom(SEED_BYTES)
            make_folder(self._seeds)
            _publish(file, lambda out: out.write(data))
        return data

    def entries(self, code: str) -> list[CellEntry]:
        """Return the stored executions of the cell with the hash `code`, newest first, without damaged files."""
        dated: list[tuple[float, CellEntry]] = []
        for file in (self._entries / code).glob("*.json"):
            try:
                entry = msgspec.json.decode(file.read_bytes(), type=CellEntry)
                if entry.format == FORMAT:
                    dated.append((file.stat().st_mtime, entry))
            except (OSError, msgspec.MsgspecError):
                continue
        dated.sort(key=lambda each: each[0], reverse=True)
        return [entry for _, entry in dated]

    def add(self, code: str, entry: CellEntry) -> None:
        """Store an execution of the cell with the hash `code`; remove the oldest ones beyond MOST_ENTRIES."""
        folder = self._entries / code
        make_folder(folder)
        _publish(folder / f"{entry.key}.json", lambda file: file.write(msgspec.json.encode(entry)))
        for _, file in _oldest_first(folder.glob("*.json"))[:-MOST_ENTRIES]:
            file.unlink(missing_ok=True)

    def has(self, digest: str) -> bool:
        """Return True if a content with this digest is stored."""
        return (self._contents / digest).is_file()

    def put(self, content: Serialized) -> None:
        """Store the serialized variables `content` under `content.digest`, unless they are stored already."""
        buffers = [buffer.raw() for buffer in content.buffers]
        head = struct.pack(
            f"<{len(buffers) + 2}Q", len(buffers), len(content.data), *map(len, buffers)
        )
        self._write(content.digest, [head, content.data, *buffers])

    def put_bytes(self, data: bytes) -> str:
        """Store `data`; return the digest under which it is stored."""
        digest = str(xxhash.xxh3_128(data).hexdigest())
        self._write(digest, [data])
        return digest

    def _write(self, digest: str, parts: Iterable[Any]) -> None:
        file = self._contents / digest
        try:
            os.utime(file)
        except FileNotFoundError:
            _publish(file, lambda out: [out.write(part) for part in parts])

    def get_bytes(self, digest: str) -> bytes:
        """Return the bytes stored under `digest`; raise ValueError if they are damaged."""
        file = self._contents / digest
        data = file.read_bytes()
        if xxhash.xxh3_128(data).hexdigest() != digest:
            raise ValueError(f"{file} is damaged")
        _mark_used(file)
        return data

    def get(self, digest: str, find: Callable[[str], Any]) -> dict[str, Any]:
        """Return name -> value of the variables stored under `digest`; raise ValueError if they are damaged.

        `find(name)` returns the notebook's present function or class with this name, to which the variables may refer.
        """
        file = self._contents / digest
        data = memoryview(bytearray(file.read_bytes()))
        count, size = struct.unpack_from("<2Q", data)
        sizes = struct.unpack_from(f"<{count}Q", data, 16)
        at = 16 + 8 * count
        pickled = data[at : at + size]
        check = xxhash.xxh3_128(pickled)
        at += size
        buffers = []
        for length in sizes:
            buffers.append(data[at : at + length])
            check.update(buffers[-1])
            at += length
        if check.hexdigest() != digest:
            raise ValueError(f"{file} is damaged")
        _mark_used(file)

        class ContentUnpickler(pickle.Unpickler):
            def persistent_load(self, pid: str) -> Any:
                return object_of(pid, find)

        import io

        return dict(ContentUnpickler(io.BytesIO(bytes(pickled)), buffers=buffers).load())

    def prune(self, most: int = MOST_BYTES) -> None:
        """Remove the least recently used contents until the remaining ones take at most `most` bytes, and old drafts.

        Other processes may add and remove contents at the same time.
        """
        files = _oldest_first(self._contents.iterdir())
        oldest_draft = time.time() - DRAFT_SECONDS
        for status, file in files:
            if _is_draft(file) and status.st_mtime < oldest_draft:
                file.unlink(missing_ok=True)
        files = [(status, file) for status, file in files if not _is_draft(file)]
        total = sum(status.st_size for status, _ in files)
        for status, file in files:
            if total <= most:
                break
            file.unlink(missing_ok=True)
            total -= status.st_size

    def clear(self) -> None:
        """Remove all stored results and seeds of the project."""
        shutil.rmtree(self._entries.parent, ignore_errors=True)


def _oldest_first(files: Iterable[Path]) -> list[tuple[os.stat_result, Path]]:
    """Return (status, file) of the existing ones of `files`, the least recently used first."""
    existing = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            existing.append((file.stat(), file))
    return sorted(existing, key=lambda each: each[0].st_mtime)


def _is_draft(file: Path) -> bool:
    return file.name.startswith(".")


def _mark_used(file: Path) -> None:
    """Set the modification time of a file to now; do nothing if another process has removed the file."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(file)


def _publish(file: Path, fill: Callable[[Any], object]) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with part.open("wb") as out:
        fill(out)
    part.rename(file)
