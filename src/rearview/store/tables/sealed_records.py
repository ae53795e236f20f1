"""Summary and checksum of a sealed Parquet file.

DuckDB writes the file with our summary (`seal.Summary`) in its metadata. The summary ends in `"check":"…"`: the
XXH3 hash of the whole file, computed with these 32 digits as zeros. Files of summary format 1 have none.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rearview.errors import DamagedError

MARK = "rearview"
"""Key of the summary in the metadata of the Parquet file."""
NO_CHECK = "0" * 32
"""Placeholder of the checksum until it is computed."""
_KEY = b'"check":"'
_TAIL = struct.Struct("<I4s")
"""Last bytes of a Parquet file: the length of the metadata before them, and a magic."""
_ENTRY = b"\x18" + bytes([len(MARK)]) + MARK.encode() + b"\x18"
"""First bytes of the metadata entry with our summary; the length of the summary follows."""


def read_summary(file: Path) -> dict[str, Any]:
    """Return the summary of a sealed file, unchecked.

    It is parsed from the last bytes: loading DuckDB takes longer than many replays take to start, and most
    files of a run with many backfills hold records of replays, which need not be read.
    """
    with _mapped(file) as data:
        return _decoded(file, _summary(file, data)[0])


def checked_summary(file: Path) -> dict[str, Any]:
    """Return the summary of a sealed file; raise if any of its bytes is damaged.

    The summary of an old file without a checksum has no `check`.
    """
    with _mapped(file) as data:
        text, at = _summary(file, data)
        facts = _decoded(file, text)
        place = text.rfind(_KEY)
        if place >= 0 and _hash(data, at + place + len(_KEY)) != facts.get("check"):
            raise _damaged(file, "its checksum does not match")
    if place < 0 and facts.get("format") != 1:
        raise _damaged(file, "it has no checksum")
    return facts


def write_check(file: Path) -> None:
    """Write the checksum of a new file into its summary."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as data:
        text, at = _summary(file, data)
        start = at + text.rindex(_KEY) + len(_KEY)
        data[start : start + len(NO_CHECK)] = _hash(data, start).encode()
        data.flush()


def _hash(data: mmap.mmap, start: int) -> str:
    """Return the hash of a file whose checksum begins at `start`."""
    with memoryview(data) as view, view[:start] as before, view[start + len(NO_CHECK) :] as after:
        hashed = xxhash.xxh3_128(before)
        hashed.update(NO_CHECK.encode())
        hashed.update(after)
        return str(hashed.hexdigest())


@contextlib.contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    with file.open("rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            raise _damaged(file, "it is empty")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _summary(file: Path, data: Any) -> tuple[bytes, int]:
    """Return the text of the summary and its offset in the file."""
    try:
        size, _ = _TAIL.unpack(data[-_TAIL.size :])
        begin = max(0, len(data) - _TAIL.size - size)
        foot = bytes(data[begin : len(data) - _TAIL.size])
        at = foot.rindex(_ENTRY) + len(_ENTRY)
        length, shift = 0, 0
        while shift == 0 or foot[at - 1] >= 0x80:  # Thrift writes lengths with seven bits per byte
            length |= (foot[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        return foot[at : at + length], begin + at
    except (ValueError, IndexError, struct.error) as exc:
        raise _damaged(file, str(exc)) from exc


def _decoded(file: Path, text: bytes) -> dict[str, Any]:
    try:
        facts = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise _damaged(file, str(exc)) from exc
    if not isinstance(facts, dict):
        raise _damaged(file, "its summary is not one")
    return facts


def _damaged(file: Path, why: str) -> DamagedError:
    return DamagedError(
        f"{file} is damaged: {why}. `rearview verify --repair` moves it away and lists what is lost.",
        slug="records-damaged",
    )
