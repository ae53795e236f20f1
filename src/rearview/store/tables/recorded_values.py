"""The values that a run logged itself, sealed or not: their names, and all values for a replay to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import DamagedError
from rearview.model import Origin
from rearview.store.records import line_of, scan
from rearview.store.tables.connection import quoted
from rearview.store.tables.pivot import cell
from rearview.store.tables.seal import checked_summary, read_summary

_LONG = 4 << 20
"""Bytes of unsealed lines above which they are sealed before their names are read."""
LoggedValue = tuple[tuple[str, ...], tuple[int, ...], str, Any]
"""Loops, iterations, name, and the value as `store.values` converts it."""


@dataclass(frozen=True, slots=True)
class _Part:
    attempt: int
    process: str
    since: int
    rows: Iterable[tuple[int, LoggedValue]]
    """Each with the number of the record within its process."""


def recorded(folder: Path) -> Iterator[LoggedValue]:
    """Yield all values that the run in `folder` logged itself, in order.

    Values that an attempt logged after the checkpoint from which the next attempt resumed are left out:
    the next attempt logged them again.
    """
    parts = sorted(
        (*_open(folder), *_sealed(folder)), key=lambda part: (part.attempt, part.process)
    )
    for part in parts:
        end = min((p.since for p in parts if p.attempt > part.attempt), default=None)
        for number, row in part.rows:
            if end is None or number < end:
                yield row


def recorded_names(folder: Path) -> set[str]:
    """Return the names that the run in `folder` logged itself; damaged files are left out.

    It is read from the summaries of sealed files and from lines: a question about a small project is
    answered sooner than DuckDB is loaded.
    """
    names: set[str] = set()
    for file in folder.glob("records-*"):
        try:
            names |= _names_in(file)
        except FileNotFoundError:  # another reader has just sealed it
            sealed = file.with_suffix(".parquet")
            names |= _names_in(sealed) if sealed.exists() else set()
        except DamagedError:
            continue
    return names


def has_long_lines(folder: Path) -> bool:
    """Return True if a run has so many unsealed records that sealing them first is faster."""
    sizes = (file.stat().st_size for file in folder.glob("records-*.jsonl"))
    return sum(sizes) > _LONG


def _names_in(file: Path) -> set[str]:
    """Return the names in one file of records; none if they are those of a replay, or captured."""
    if file.suffix == ".parquet":
        summary = checked_summary(file)
        own = summary.get("replay") is None
        return {each["name"] for each in summary["names"]} if own else set()
    header, data, *_ = scan(file)
    if header.origin != Origin.RECORDED:
        return set()
    return {name for _, (_, _, name, _) in _lines(data)}


def _open(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.jsonl")):
        header, data, *_ = scan(file)
        if header.origin == Origin.RECORDED:
            yield _Part(header.attempt, header.process, header.since, _lines(data))


def _lines(data: bytes) -> Iterator[tuple[int, LoggedValue]]:
    for raw in data.splitlines():
        try:
            line = line_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # torn by a kill or a full disk
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield line.s + k, (tuple(line.l), tuple(line.i), name, value)


def _sealed(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.parquet")):
        summary = read_summary(file)
        if summary.get("replay") is None:
            checked_summary(file)  # a damaged value would look like a difference
            since = int(summary.get("since", 0))
            yield _Part(int(summary["attempt"]), str(summary["process"]), since, _rows(file))


def _rows(file: Path) -> Iterator[tuple[int, LoggedValue]]:
    import duckdb

    with duckdb.connect() as connection:
        cursor = connection.execute(
            f"SELECT seq, path, indices, name, {cell('mixed')} FROM read_parquet({quoted(file)}) "
            "WHERE kind != 'repr' ORDER BY seq"
        )
        while batch := cursor.fetchmany(10_000):
            for seq, path, indices, name, text in batch:
                value = msgspec.json.decode(text) if text is not None else None
                yield seq, (tuple(path.split("/")) if path else (), tuple(indices), name, value)
