"""Read one logged value of a run at a point, or write logged values to files.

Arrays are written as `.npy`, images as `.png`, and all other values as text or JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rearview.errors import StoreError, UsageError
from rearview.store.stored_arrays_and_media import StoredValue, is_png
from rearview.store.tables.result_table import Table

MAX_NAME_LENGTH = 180
"""Maximum number of characters of a file name, without its hash and extension."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+,-]+")


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A file that holds one logged value."""

    path: Path
    name: str
    point: str
    what: str
    """Short description of the value: its type, or for an array or image, its kind and size."""
    written: bool
    """True if the file is new, False if a file with the same content existed before."""


def load_stored(value: Any) -> Any:
    """Return `value` with every array, image etc. that it contains loaded from the store."""
    if isinstance(value, StoredValue):
        return value.load()
    if isinstance(value, list):
        return [load_stored(item) for item in value]
    if isinstance(value, dict):
        return {key: load_stored(item) for key, item in value.items()}
    return value


def save_values(table: Table, folder: Path, *, every: bool) -> list[SavedValue]:
    """Write each array, image etc. of a table to a file in `folder`; with `every`, numbers and texts too.

    If a file exists with other content, it is not overwritten, and a UsageError is raised.
    """
    loops, names = _columns(table)
    saved: list[SavedValue] = []
    stem_counts: dict[str, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for row in table.described():
            point = ",".join(f"{loop}={row[loop]}" for loop in loops if row[loop] is not None)
            for name in names:
                value = row[name]
                if value is None or not (every or _has_stored(value)):
                    continue
                stem = safe_name(*filter(None, (str(row["run"]), point, name)))
                stem_counts[stem] = stem_counts.get(stem, 0) + 1
                stem = f"{stem}_{stem_counts[stem]}" if stem_counts[stem] > 1 else stem
                description = str(value) if isinstance(value, StoredValue) else type(value).__name__
                for ending, data in _files(value, stem):
                    path, written = _write(folder / f"{stem}{ending}", data)
                    saved.append(SavedValue(path, name, point, description, written))
    except OSError as exc:
        raise StoreError(
            f"The values cannot be written to {folder}: {exc.strerror or exc}. Name a folder that "
            "can be written to.",
            slug="save-failed",
        ) from exc
    return saved


def safe_name(*parts: str) -> str:
    """Return a file name made of all `parts`; it contains no character that could lead to another folder.

    Characters that are unsafe in file names become `_`. A name that was changed gets a short hash at its end, so
    that different parts give different names.

    >>> safe_name("run1", "epoch=3", "loss")
    'run1_epoch=3_loss'
    >>> safe_name("../../etc", "passwd")[:-8]
    'etc_passwd-'
    """
    text = "_".join(parts)
    safe = _UNSAFE.sub("_", text).lstrip("._-")[:MAX_NAME_LENGTH] or "value"
    if safe == text:
        return safe
    return (
        f"{safe}-{hashlib.sha256(repr(parts).encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"
    )


def _columns(table: Table) -> tuple[list[str], list[str]]:
    """Return (columns of loops, columns of logged values) of the table."""
    names = [column for column in table.columns if table.kinds.get(column)]
    not_loops = {"run", table.mark, *names}
    return [column for column in table.columns if column not in not_loops], names


def _has_stored(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_stored, value.values()))
    if isinstance(value, list):
        return any(map(_has_stored, value))
    return isinstance(value, StoredValue)


def _files(value: Any, stem: str) -> Iterator[tuple[str, bytes]]:
    """Yield (extension, content) of each file for a value: a list or mapping gets one more file per array in it."""
    if isinstance(value, StoredValue):
        yield _file(value)
    elif isinstance(value, str):
        yield ".txt", value.encode("utf-8", "backslashreplace")
    elif isinstance(value, bytes):
        yield ".bin", value
    else:
        inner: list[tuple[str, bytes]] = []
        text = json.dumps(_as_json(value, stem, "", inner), indent=2, ensure_ascii=False)
        yield from inner
        yield ".json", f"{text}\n".encode("utf-8", "backslashreplace")


def _file(value: StoredValue) -> tuple[str, bytes]:
    if value.kind == "image":
        data = value.raw()
        return (".png" if is_png(data) else ".bin"), data
    if value.kind == "histogram":
        counts, edges = value.histogram()
        return ".json", f"{json.dumps({'counts': counts, 'edges': edges})}\n".encode()
    if value.kind not in {"array", "tensor"}:
        media = value.load()
        return (".bin", value.raw()) if media is value else media.file()
    try:
        return ".npy", value.npy()
    except UsageError:  # the library that defines this dtype is not installed
        return f".{_UNSAFE.sub('_', value.dtype)}.bin", value.raw()


def _as_json(value: Any, stem: str, path: str, inner: list[tuple[str, bytes]]) -> Any:
    """Return `value` as JSON data in which each array or image is replaced by the name of its file.

    (extension, content) of each of these files is added to `inner`. `path` is the path to `value` inside the
    logged value.
    """
    if isinstance(value, StoredValue):
        ending, data = _file(value)
        ending = f".{safe_name(path.strip('.'))}{ending}"
        inner.append((ending, data))
        return {"file": f"{stem}{ending}"}
    if isinstance(value, Mapping):
        return {k: _as_json(v, stem, f"{path}.{k}", inner) for k, v in value.items()}
    if isinstance(value, list):
        return [_as_json(v, stem, f"{path}.{k}", inner) for k, v in enumerate(value)]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _write(path: Path, data: bytes) -> tuple[Path, bool]:
    """Create a file and return (path, True); if it exists with the same content, return (path, False).

    Raise if it exists with other content.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags, 0o666)
    except FileExistsError as exc:
        if not path.is_symlink() and path.is_file() and path.read_bytes() == data:
            return path, False
        raise UsageError(
            f"{path} exists already, with other content, and is not overwritten. Move it away, or name "
            "another folder.",
            slug="save-exists",
        ) from exc
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path, True


def single_value(table: Table, run: str, name: str, point_values: Mapping[str, Any]) -> Any:
    """Return the only value of `name` in `table` at the point `point_values` (loop -> value).

    `table` has the rows of the run `run`. Raise if there is not exactly one value.
    """
    unknown = [loop for loop in point_values if loop not in table.columns]
    if unknown:
        raise UsageError(
            f"{name} is not logged in a loop {unknown[0]!r}. Its row has the columns "
            f"{', '.join(table.columns)}.",
            slug="no-point",
        )
    label = name if name in table.columns[:-1] and name not in point_values else f"{name}_logged"
    label = label if label in table.columns else name
    rows = [
        row
        for row in table.described()
        if row[label] is not None and all(_equal(row[k], v) for k, v in point_values.items())
    ]
    if len(rows) != 1:
        where = (
            "/".join(f"{loop}={value}" for loop, value in point_values.items()) or "the whole run"
        )
        raise UsageError(
            f"Run {run} has {len(rows) or 'no'} values of "
            f"{name} at {where}, not one. Name the loops to say which; "
            f"`rearview table {name}` shows all.",
            slug="no-single-value",
        )
    return load_stored(rows[0][label])


def _equal(value: Any, requested: Any) -> bool:
    """Return True if a loop's `value` equals `requested`, or is a text that equals `requested` written as text."""
    return bool(value == requested) or (isinstance(value, str) and value == str(requested))
