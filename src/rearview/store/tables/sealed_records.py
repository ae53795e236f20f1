"""Sealed records: what a Parquet file says about itself, and the checksum of all its bytes.

DuckDB writes the file with our summary (`tables.summary`) among its metadata. The summary ends in
`"check":"…"`: the XXH3 hash of the whole file, taken with these 32 digits as zeros. Files of summary
format 1 have none.
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
"""Key under which a Parquet file carries its summary."""
NO_CHECK = "0" * 32
"""What stands in the place of the checksum until it is known."""
_KEY = b'"check":"'
_TAIL = struct.Struct("<I4s")
"""How a Parquet file ends: the length of what stands before, and a mark."""
_ENTRY = b"\x18" + bytes([len(MARK)]) + MARK.encode() + b"\x18"
"""How the entry with our summary begins there; the length of the summary follows."""


def about(file: Path) -> dict[str, Any]:
    """Return what a sealed file says about itself, unchecked.

    It is taken from the last bytes: DuckDB takes longer to load than many replays take to begin,
    and most files of a run with many questions hold answers, which need not be read.
    """
    with _mapped(file) as data:
        return _decoded(file, _summary(file, data)[0])


def checked(file: Path) -> dict[str, Any]:
    """Return what a sealed file says about itself; an error if any of its bytes is damaged.

    The summary of a file that was written before there were checksums holds no `check`.
    """
    with _mapped(file) as data:
        text, at = _summary(file, data)
        found = _decoded(file, text)
        place = text.rfind(_KEY)
        if place >= 0 and _hash(data, at + place + len(_KEY)) != found.get("check"):
            raise _damaged(file, "its checksum does not match")
    if place < 0 and found.get("format") != 1:
        raise _damaged(file, "it has no checksum")
    return found


def stamp(file: Path) -> None:
    """Put the checksum of a new file into the place that its summary has for it."""
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
    """Return the text of the summary, and where in the file it begins."""
    try:
        size, _ = _TAIL.unpack(data[-_TAIL.size :])
        begin = max(0, len(data) - _TAIL.size - size)
        foot = bytes(data[begin : len(data) - _TAIL.size])
        at = foot.rindex(_ENTRY) + len(_ENTRY)
        length, shift = 0, 0
        while shift == 0 or foot[at - 1] >= 0x80:  # seven bits a byte, as Thrift writes lengths
            length |= (foot[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        return foot[at : at + length], begin + at
    except (ValueError, IndexError, struct.error) as exc:
        raise _damaged(file, str(exc)) from exc


def _decoded(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise _damaged(file, str(exc)) from exc
    if not isinstance(found, dict):
        raise _damaged(file, "its summary is not one")
    return found


def _damaged(file: Path, why: str) -> DamagedError:
    return DamagedError(
        f"{file} does not hold the records that were written to it: {why}. `rearview verify "
        "--repair` sets it aside and says what is lost.",
        slug="records-damaged",
    )
