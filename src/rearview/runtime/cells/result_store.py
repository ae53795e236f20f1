"""Results of cells on disk: the inputs of a cell, the variables that it left, and its output.

Below `cache/cells` of the store, which can be deleted at any time: `entries/<code>/<key>.json`, one for each
set of inputs with which a cell was run, `contents/<digest>`, the pickles and outputs that they name, and
`seeds/<notebook>`, the bytes from which the notebook's random generators are seeded.
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
"""Sets of inputs that are kept for the code of one cell."""
DRAFT_SECONDS = 3600.0
"""Seconds after which an unfinished file counts as left by a process that was killed."""
MOST_BYTES = 4 << 30
"""Most bytes that all results may take; the least recently used are removed first."""


class GroupRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """Variables that share objects, as a cell left them."""

    names: tuple[str, ...]
    content: str
    """Equal for equal content: a digest of the content, or of the cells that made it."""
    stored: bool = False
    """Whether the content can be loaded; if not, the cell runs again when it is needed."""
    uses: tuple[str, ...] = ()
    """Functions and classes of the notebook that the content refers to; `*`: not known."""
    why: str = ""
    """Why it was not stored."""


class CellEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One execution of a cell: inputs, effects, outputs."""

    format: int
    key: str
    inputs: dict[str, str]
    settings: str
    random: dict[str, str] = {}
    """Random states that it drew from, by library."""
    random_before_imports: str = ""
    """State of Python's generator from which only its imports drew."""
    draws_seeds: bool = False
    """Whether it made generators whose seed the system draws."""
    seeds: str = ""
    """Equal for runs whose random generators begin in the same state."""
    random_loaded: dict[str, str] = {}
    """First states of the generators of libraries that it imported, by library."""
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    environment: dict[str, str] = {}
    """Environment variables that it and the cells before it read, as it found them."""
    environment_after: dict[str, str] = {}
    """Those of them that it changed, as it left them."""
    modules: dict[str, str] = {}
    groups: tuple[GroupRef, ...] = ()
    deleted: tuple[str, ...] = ()
    definitions: dict[str, str] = {}
    """Functions and classes that it defined, each with a digest of its content."""
    random_after: dict[str, str] = {}
    settings_after: str = ""
    written: dict[str, str] = {}
    again: bool = False
    """Whether it sets up something outside the variables: it then runs again before any other cell."""
    setup: str = ""
    """Hash of the statements that do so."""
    setup_text: str = ""
    """Those statements alone, if they need no variables: they run instead of the whole cell."""
    settings_values: dict[str, str] = {}
    """Settings that it changed, by library: the digests under which they are stored."""
    messages: str = ""
    seconds: float = 0.0
    size: int = 0
    events: tuple[Event, ...] = ()


class ResultStore:
    """Entries and contents of one project."""

    def __init__(self, folder: Path) -> None:
        self._entries = folder / "entries"
        self._contents = folder / "contents"
        self._seeds = folder / "seeds"
        make_folder(self._entries)
        make_folder(self._contents)

    def seeds(self, notebook: str) -> bytes:
        """Return the bytes from which the random generators of a notebook are seeded; the first call draws them."""
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
        """Return the executions of a cell, newest first; damaged ones are left out."""
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
        """Keep an execution; the oldest ones of the same code are removed."""
        folder = self._entries / code
        make_folder(folder)
        _publish(folder / f"{entry.key}.json", lambda file: file.write(msgspec.json.encode(entry)))
        for _, file in _oldest_first(folder.glob("*.json"))[:-MOST_ENTRIES]:
            file.unlink(missing_ok=True)

    def has(self, digest: str) -> bool:
        """Return True if a content is stored."""
        return (self._contents / digest).is_file()

    def put(self, content: Serialized) -> None:
        """Store serialized variables under their digest."""
        buffers = [buffer.raw() for buffer in content.buffers]
        head = struct.pack(
            f"<{len(buffers) + 2}Q", len(buffers), len(content.data), *map(len, buffers)
        )
        self._write(content.digest, [head, content.data, *buffers])

    def put_bytes(self, data: bytes) -> str:
        """Store bytes; return their digest."""
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
        """Return stored bytes; raise ValueError if they are damaged."""
        file = self._contents / digest
        data = file.read_bytes()
        if xxhash.xxh3_128(data).hexdigest() != digest:
            raise ValueError(f"{file} is damaged")
        _mark_used(file)
        return data

    def get(self, digest: str, find: Callable[[str], Any]) -> dict[str, Any]:
        """Return stored variables; `find` returns the function or class of a name in the notebook."""
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
        """Remove the least recently used contents until the others fit.

        Other processes may add and remove contents at the same time.
        """
        files = _oldest_first(self._contents.iterdir())
        oldest_draft = time.time() - DRAFT_SECONDS
        for about, file in files:
            if _is_draft(file) and about.st_mtime < oldest_draft:
                file.unlink(missing_ok=True)  # left by a process that was killed
        files = [(about, file) for about, file in files if not _is_draft(file)]
        total = sum(about.st_size for about, _ in files)
        for about, file in files:
            if total <= most:
                break
            file.unlink(missing_ok=True)
            total -= about.st_size

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._entries.parent, ignore_errors=True)


def _oldest_first(files: Iterable[Path]) -> list[tuple[os.stat_result, Path]]:
    """Return files with their status, the least recently used first; files that were removed are left out."""
    existing = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            existing.append((file.stat(), file))
    return sorted(existing, key=lambda each: each[0].st_mtime)


def _is_draft(file: Path) -> bool:
    return file.name.startswith(".")


def _mark_used(file: Path) -> None:
    """Note that a content was used now; another process may have removed its file since it was read."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(file)


def _publish(file: Path, fill: Callable[[Any], object]) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with part.open("wb") as out:
        fill(out)
    part.rename(file)
