"""The lines that a run printed, with the point at which each was printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rearview.model.checksum import add_check, add_item, is_intact, is_intact_list

FILE = "printed.jsonl"
"""File in a run's folder. Its lines are {"format": 2}, then [loops, iterations, stream, text], or
{"dropped": why} in place of lines that were not stored; each with its checksum. Format 1 has none."""
FORMAT = 2
STREAMS = ("", "out", "err")


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One printed line, or a remark in place of lines that were not stored."""

    loops: tuple[str, ...]
    indices: tuple[int, ...]
    stream: str
    """`out` or `err`; empty for a remark of Rearview."""
    text: str

    @property
    def where(self) -> str:
        """The point, as points are written.

        >>> PrintedLine(("epoch", "step"), (3, 20), "out", "loss 0.5").where
        'epoch=3/step=20'
        """
        return "/".join(f"{a}={b}" for a, b in zip(self.loops, self.indices, strict=True))


class _Note(msgspec.Struct):
    format: int = 0
    dropped: str = ""


_Row = tuple[tuple[str, ...], tuple[int, ...], int, str]
_decode_row = msgspec.json.Decoder(_Row).decode
_decode_checked = msgspec.json.Decoder(
    tuple[tuple[str, ...], tuple[int, ...], int, str, int]
).decode
_decode_note = msgspec.json.Decoder(_Note).decode


def encode(row: _Row | Mapping[str, object]) -> bytes:
    """Return one line of the file, with its checksum."""
    text = msgspec.json.encode(row)
    return (add_check(text) if isinstance(row, Mapping) else add_item(text)) + b"\n"


def printed(folder: Path) -> Iterator[PrintedLine]:
    """Yield the lines that the run in `folder` printed, if they were stored and are intact."""
    for raw, line in _read(folder):
        if line is not None and raw:
            yield line


def intact_lines(folder: Path) -> tuple[list[bytes], int]:
    """Return the intact lines of the file, and the number of damaged ones."""
    lines = [(raw, line) for raw, line in _read(folder) if raw]
    good = [raw for raw, line in lines if line is not None or _is_head(raw)]
    return good, len(lines) - len(good)


def is_checked(folder: Path) -> bool:
    """Return True if the lines of the file have checksums."""
    return _first(folder) != _OLD


def _read(folder: Path) -> Iterator[tuple[bytes, PrintedLine | None]]:
    try:
        *whole, last_line = (folder / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    old = _first(folder) == _OLD
    if old or is_intact_list(last_line[:-1]):  # without a last line that a kill cut off
        whole.append(last_line if old else last_line[:-1])
    for raw in whole:
        try:
            yield raw, _line(raw, old=old)
        except (msgspec.MsgspecError, ValueError, IndexError):
            if not old or raw is not last_line:
                yield raw, None


def _line(raw: bytes, *, old: bool) -> PrintedLine | None:
    if raw.startswith(b"{"):
        if not (is_intact(raw) or (old and is_intact(raw) is None)):
            return None
        note = _decode_note(raw)
        return PrintedLine((), (), "", note.dropped) if note.dropped else None
    if is_intact_list(raw):
        loops, indices, stream, text, _ = _decode_checked(raw)
    elif old:
        loops, indices, stream, text = _decode_row(raw)
    else:
        return None
    if len(loops) != len(indices):
        raise ValueError(raw)
    return PrintedLine(loops, indices, STREAMS[stream], text)


_OLD = b'{"format":1}'


def _first(folder: Path) -> bytes:
    with (folder / FILE).open("rb") as file:
        return file.readline(100).strip()


def _is_head(raw: bytes) -> bool:
    return raw == _OLD or (raw.startswith(b'{"format":') and bool(is_intact(raw)))
