"""Read and append the JSON files of the store: files of JSON lines, and files with one JSON document.

The facts of a line or document are the fields of its JSON object, without the checksum. Several processes may
append lines to one file. From format 2 on, every line and every document has a checksum (`durable_files.add_check`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rearview.durable_files import add_check, is_intact
from rearview.errors import DamagedError, StoreError
from rearview.store.create_files import open_file

CHECKED = 2
"""First format in which lines and documents have a checksum."""


def append_line(file: Path, facts: Mapping[str, Any]) -> None:
    """Append `facts` to a file as one JSON line; after a crash, readers see the complete line or no line."""
    fd = open_file(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        # if a dead process left its line incomplete, end that line, so that the new line can be read
        is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * is_torn + add_check(encode(facts)) + b"\n")
    finally:
        os.close(fd)


def read_lines(file: Path, newest: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of every intact JSON line of a file; raise if a line has a format above `newest`."""
    for line in _lines(file):
        facts = decode_facts(line, newest)
        if (
            facts is not None
        ):  # None: the line is damaged, or was cut off by a crash before `append_line` returned
            check_format(facts, newest, file)
            yield facts


def damaged_lines(file: Path, newest: int) -> int:
    """Return how many JSON lines of a file are damaged or were cut off by a crash; `newest` is as in `decode_facts`."""
    return sum(decode_facts(line, newest) is None for line in _lines(file) if line)


def _lines(file: Path) -> list[bytes]:
    try:
        *complete_lines, last_line = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    # an incomplete last line is ignored; a last line of which only the byte of the line end is damaged is read
    return [*complete_lines, last_line[:-1]] if is_intact(last_line[:-1]) else complete_lines


def decode_facts(text: bytes, newest: int) -> dict[str, Any] | None:
    """Return the fields of `text`, a JSON line or document, without its checksum; return None if it is damaged.

    A checksum may be missing only in formats before `CHECKED` and in formats above `newest`.
    """
    intact = is_intact(text)
    try:
        facts = json.loads(text) if intact is not False else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict):
        return None
    number = facts.get("format", 1)
    if intact is None and (type(number) is not int or CHECKED <= number <= newest):
        return None
    facts.pop("c", None)
    return facts


def read_facts(file: Path, newest: int) -> dict[str, Any]:
    """Return the fields of the JSON document in a file; raise if it is damaged or has a format above `newest`."""
    try:
        facts = decode_facts(file.read_bytes(), newest)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise DamagedError(
            f"{file} cannot be read: {exc.strerror or exc}. `rearview verify` lists all damage.",
            slug="damaged",
        ) from exc
    if facts is None:
        raise DamagedError(
            f"{file} cannot be read: its content is damaged. `rearview verify` lists all damage.",
            slug="damaged",
        )
    check_format(facts, newest, file)
    return facts


def encode(facts: Mapping[str, Any]) -> bytes:
    """Return `facts` as one line of JSON; values that JSON cannot express are converted, most of them by `repr`."""
    return json.dumps(facts, default=_plain, separators=(",", ":")).encode("ascii")


def fields_of_struct(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct by name; fields that are None are left out, as in old files."""
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not None}


def check_format(facts: Mapping[str, Any], newest: int, file: Path) -> None:
    """Raise if `facts`, which were read from `file`, have a format above `newest`: a newer Rearview wrote them."""
    number = facts.get("format", 1)
    if not isinstance(number, int) or number > newest:
        raise StoreError(
            f"{file} has format {number!r}; this Rearview reads up to {newest}. Upgrade with "
            "`pip install --upgrade rearview`.",
            slug="store-newer",
        )


def _plain(value: Any) -> Any:
    """Return a value that JSON can express in place of `value`, which JSON cannot express."""
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, msgspec.Struct):
        return fields_of_struct(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)  # scalars of numpy and torch
    if item is not None and getattr(value, "shape", None) == ():
        return item()
    return repr(value)
