"""Append-only files of JSON lines: small facts about a run, written by several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rearview.errors import StoreError


def append_line(file: Path, facts: Mapping[str, Any]) -> None:
    """Add one line; it is there whole or, after a crash, not at all for readers."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        # a line that a dead process left torn is closed, so that it spoils only itself
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * torn + encode(facts) + b"\n")
    finally:
        os.close(fd)


def read_lines(file: Path, newest: int) -> Iterator[dict[str, Any]]:
    """Yield the facts of every whole line; refuse lines of a format above `newest`."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:
        try:
            facts = json.loads(line)
        except ValueError:
            continue  # torn by a crash: it was never acknowledged
        if isinstance(facts, dict):
            check_format(facts, newest, file)
            yield facts


def encode(facts: Mapping[str, Any]) -> bytes:
    """Return facts as one line of JSON; any text comes back, other objects as their `repr`."""
    return json.dumps(facts, default=_plain, separators=(",", ":")).encode("ascii")


def check_format(facts: Mapping[str, Any], newest: int, file: Path) -> None:
    """Refuse what a newer Rearview wrote."""
    number = facts.get("format", 1)
    if not isinstance(number, int) or number > newest:
        raise StoreError(
            f"{file} has format {number!r}; this Rearview reads up to {newest}. Upgrade with "
            "`pip install --upgrade rearview`.",
            slug="store-newer",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)  # scalars of numpy and torch
    if item is not None and getattr(value, "shape", None) == ():
        return item()
    return repr(value)
