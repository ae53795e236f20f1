"""The lines that a run printed, with the point at which each was printed, and the records made from them.

The training process only stores the lines. A reader extracts the numbers when the run is queried, into a
cache that may be deleted: this costs training nothing and works for older runs too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.durable_files import add_check, add_item, is_intact, is_intact_list
from rearview.model import MainLoop, Point, Run, Step
from rearview.model.run import MARK, Origin, name_of
from rearview.source.numbers_in_output import PrintedNumbers
from rearview.store.create_files import make_folder, open_file
from rearview.store.project import Project
from rearview.store.records import RecordFile, encode_point

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


RULES = 1
"""Version of the rules by which numbers are extracted; a new version rebuilds the cache."""
COLUMNS = 40
"""Most columns that the printed lines of one run give."""


def printed_records(project: Project, run: Run, folder: Path) -> Path | None:
    """Return the file with the numbers in the lines that a run printed; None if there are none.

    `folder` is the run's. The file is created if it does not exist; the caller seals it.
    """
    try:
        size = (folder / FILE).stat().st_size
    except OSError:
        return None
    place = project.cache / "printed" / run.id
    stem = f"records-{size}-{RULES}"
    for suffix in (".parquet", ".jsonl"):
        if (file := place / (stem + suffix)).exists():
            return file
    if (place / f"{stem}.none").exists():
        return None
    try:
        return _make(place, stem, run, folder)
    except OSError:
        return None  # the store is read-only: the run has no such columns


def _make(place: Path, stem: str, run: Run, folder: Path) -> Path | None:
    make_folder(place)
    for old in place.glob("records-*"):
        with contextlib.suppress(OSError):
            old.unlink()
    target = place / f"{stem}.jsonl"
    with tempfile.TemporaryDirectory(dir=place, prefix=".making-") as aside:
        out = RecordFile(Path(aside), run.id, origin=MARK + Origin.PRINTED.value)
        written = False
        for point, items in _numbers(printed(folder), run.end.main):
            out.append(encode_point(point), list(items.items()))
            written = True
        out.close()
        if not written:
            os.close(open_file(place / f"{stem}.none", os.O_WRONLY | os.O_CREAT))
            return None
        new_file = next(Path(aside).glob("records-*.jsonl"))
        shutil.move(new_file, target)
    return target


def _numbers(
    lines: Iterator[PrintedLine], main: MainLoop
) -> Iterator[tuple[Point, dict[str, int | float]]]:
    """Yield the named numbers of each line with its point."""
    streams = {"out": PrintedNumbers(), "err": PrintedNumbers()}
    names: set[str] = set()
    for line in lines:
        if line.stream not in streams:
            continue
        numbers = streams[line.stream].read(line.text)
        numbers = {n: v for n, v in numbers.items() if n in names or len(names) < COLUMNS}
        if numbers:
            names.update(numbers)
            yield _point(line, main), numbers


def _point(line: PrintedLine, main: MainLoop) -> Point:
    """Return the point at which a line was printed, with the values of loop targets if known."""
    steps = []
    for depth, (loop, index) in enumerate(zip(line.loops, line.indices, strict=True)):
        value = _target(loop, index, main, outermost=depth == 0)
        steps.append(Step(loop, index, None if value == index else value))
    return Point(tuple(steps))


def _target(loop: str, index: int, main: MainLoop, *, outermost: bool) -> Any:
    """Return the value of a loop's target in iteration `index`; None if it is not known."""
    if outermost:
        if loop != main.name:
            return None
        span, held = main.span, main.held
    else:
        spans, helds = main.spans or {}, main.helds or {}
        sites = [site for site in {**spans, **helds} if name_of(site) == loop]
        if len(sites) != 1:
            return None
        span, held = spans.get(sites[0]), helds.get(sites[0])
    if span:
        return span[0] + span[1] * index
    return held[index] if held and 0 <= index < len(held) else None
