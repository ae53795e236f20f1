"""What a run logged itself, for a replay to check against: sealed or not, value by value."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import DamagedError
from rearview.model import Origin
from rearview.store.records import line_of, scan
from rearview.store.tables.duck import quoted
from rearview.store.tables.kinds import cell
from rearview.store.tables.summary import MARK

_TAIL = struct.Struct("<I4s")
"""How a Parquet file ends: the length of what stands before, and a mark."""
_ENTRY = b"\x18" + bytes([len(MARK)]) + MARK.encode() + b"\x18"
"""How the entry with our summary begins there; the length of the summary follows."""
Logged = tuple[tuple[str, ...], tuple[int, ...], str, Any]
"""Loops, iterations, name, and the value as `store.values` converts it."""


@dataclass(frozen=True, slots=True)
class _Part:
    attempt: int
    process: str
    since: int
    rows: Iterable[tuple[int, Logged]]
    """With the number that each record has within its process."""


def recorded(folder: Path) -> Iterator[Logged]:
    """Yield all that the run in `folder` logged itself, in order.

    What an attempt logged after the checkpoint that the next one began from was logged again
    there, and is left out here.
    """
    parts = sorted(
        (*_open(folder), *_sealed(folder)), key=lambda part: (part.attempt, part.process)
    )
    for part in parts:
        end = min((p.since for p in parts if p.attempt > part.attempt), default=None)
        for number, row in part.rows:
            if end is None or number < end:
                yield row


def _open(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.jsonl")):
        header, data, _ = scan(file)
        if header.origin == Origin.RECORDED:
            yield _Part(header.attempt, header.process, header.since, _lines(data))


def _lines(data: bytes) -> Iterator[tuple[int, Logged]]:
    for raw in data.splitlines():
        try:
            line = line_of(raw)
        except msgspec.MsgspecError:
            continue  # torn by a kill or a full disk
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield line.s + k, (tuple(line.l), tuple(line.i), name, value)


def _sealed(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.parquet")):
        summary = about(file)
        if summary.get("replay") is None:
            since = int(summary.get("since", 0))
            yield _Part(int(summary["attempt"]), str(summary["process"]), since, _rows(file))


def about(file: Path) -> dict[str, Any]:
    """Return what a sealed file says about itself.

    It is taken from the last bytes: DuckDB takes longer to load than many replays take to begin,
    and most files of a run with many questions hold answers, which need not be read.
    """
    try:
        foot = _foot(file)
        at = foot.rindex(_ENTRY) + len(_ENTRY)
        length, shift = 0, 0
        while shift == 0 or foot[at - 1] >= 0x80:  # seven bits a byte, as Thrift writes lengths
            length |= (foot[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        found: dict[str, Any] = msgspec.json.decode(foot[at : at + length])
    except (ValueError, IndexError, struct.error, msgspec.MsgspecError) as exc:
        raise DamagedError(
            f"{file} does not say which records it holds ({exc}). `rearview verify` says more.",
            slug="records-damaged",
        ) from exc
    return found


def _foot(file: Path) -> bytes:
    with file.open("rb") as opened:
        end = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, end - _TAIL.size))
        size, _ = _TAIL.unpack(opened.read())
        opened.seek(max(0, end - _TAIL.size - size))
        return opened.read(size)


def _rows(file: Path) -> Iterator[tuple[int, Logged]]:
    import duckdb

    found = duckdb.connect().execute(
        f"SELECT seq, path, indices, name, {cell('mixed')} FROM read_parquet({quoted(file)}) "
        "WHERE kind != 'repr' ORDER BY seq"
    )
    while batch := found.fetchmany(10_000):
        for seq, path, indices, name, text in batch:
            value = msgspec.json.decode(text) if text is not None else None
            yield seq, (tuple(path.split("/")) if path else (), tuple(indices), name, value)
