"""Read the lines that a run printed, each with its point, and convert the numbers in these lines to records.

The training process only stores the lines. The numbers are extracted when the run is first queried, and stored in a
cache that may be deleted. So extraction does not slow down training, and also works for older runs.
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
"""File in a run's folder. Its first line is {"format": 2}. Each other line is [loops, iterations, stream, text], or
{"dropped": reason} in place of printed lines that were not stored. Each line has a checksum, except in format 1."""
FORMAT = 2
STREAMS = ("", "out", "err")


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line that a run printed, or a remark of Rearview in place of printed lines that were not stored."""

    loops: tuple[str, ...]
    indices: tuple[int, ...]
    stream: str
    """`out` or `err` (standard output or error); empty for a remark of Rearview."""
    text: str

    @property
    def where(self) -> str:
        """The point at which the line was printed, as text; empty for a line outside of loops.

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
    """Return `row` as one line of the file `printed.jsonl`, with its checksum."""
    text = msgspec.json.encode(row)
    return (add_check(text) if isinstance(row, Mapping) else add_item(text)) + b"\n"


def read_printed_lines(folder: Path) -> Iterator[PrintedLine]:
    """Yield the lines that the run in `folder` printed; damaged lines are left out."""
    for raw, line in _read(folder):
        if line is not None and raw:
            yield line


def intact_lines(folder: Path) -> tuple[list[bytes], int]:
    """Return (intact lines as bytes, number of damaged lines) of the file `printed.jsonl` in `folder`."""
    lines = [(raw, line) for raw, line in _read(folder) if raw]
    intact = [raw for raw, line in lines if line is not None or _is_head(raw)]
    return intact, len(lines) - len(intact)


def has_checksums(folder: Path) -> bool:
    """Return True if the lines of the file `printed.jsonl` in `folder` have checksums."""
    return _first(folder) != _OLD


def _read(folder: Path) -> Iterator[tuple[bytes, PrintedLine | None]]:
    """Yield (bytes, content) of each line of `printed.jsonl` in `folder`.

    The content is None for a damaged line, and for the first line, which holds the format.
    """
    try:
        *complete_lines, last_line = (folder / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    has_no_checksums = _first(folder) == _OLD
    if has_no_checksums or is_intact_list(
        last_line[:-1]
    ):  # a last line that a kill cut off is ignored
        complete_lines.append(last_line if has_no_checksums else last_line[:-1])
    for raw in complete_lines:
        try:
            yield raw, _line(raw, old=has_no_checksums)
        except (msgspec.MsgspecError, ValueError, IndexError):
            if not has_no_checksums or raw is not last_line:
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
"""Version of the rules by which numbers are extracted; caches of another version are rebuilt."""
COLUMNS = 40
"""Most names of numbers that are extracted from the lines of one run."""


def printed_records(project: Project, run: Run, folder: Path) -> Path | None:
    """Return the file of records that holds the numbers in the lines that `run` printed, or None if it printed none.

    `folder` is the folder of the run. The file is in the cache of the project, and is created if it does not exist.
    A new file has JSON lines, which the caller converts to Parquet. Return None also if the cache cannot be written.
    """
    try:
        size = (folder / FILE).stat().st_size
    except OSError:
        return None
    cache = project.cache / "printed" / run.id
    stem = f"records-{size}-{RULES}"
    for suffix in (".parquet", ".jsonl"):
        if (file := cache / (stem + suffix)).exists():
            return file
    if (cache / f"{stem}.none").exists():
        return None
    try:
        return _extract_records(cache, stem, run, folder)
    except OSError:
        # without a cache, as in a read-only store, there are no columns of printed numbers
        return None


def _extract_records(cache: Path, stem: str, run: Run, folder: Path) -> Path | None:
    make_folder(cache)
    for old_file in cache.glob("records-*"):
        with contextlib.suppress(OSError):
            old_file.unlink()
    target = cache / f"{stem}.jsonl"
    with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as making:
        out = RecordFile(Path(making), run.id, origin=MARK + Origin.PRINTED.value)
        written = False
        for point, items in _numbers(read_printed_lines(folder), run.end.main):
            out.append(encode_point(point), list(items.items()))
            written = True
        out.close()
        if not written:
            os.close(open_file(cache / f"{stem}.none", os.O_WRONLY | os.O_CREAT))
            return None
        new_file = next(Path(making).glob("records-*.jsonl"))
        shutil.move(new_file, target)
    return target


def _numbers(
    lines: Iterator[PrintedLine], main: MainLoop
) -> Iterator[tuple[Point, dict[str, int | float]]]:
    """Yield (point, numbers by name) for each printed line that holds numbers.

    `main` is the main loop of the run, from which the values of loop targets are known.
    """
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
    """Return the point at which `line` was printed, with the values of the loop targets if `main` has them."""
    steps = []
    for depth, (loop, index) in enumerate(zip(line.loops, line.indices, strict=True)):
        value = _target(loop, index, main, outermost=depth == 0)
        steps.append(Step(loop, index, None if value == index else value))
    return Point(tuple(steps))


def _target(loop: str, index: int, main: MainLoop, *, outermost: bool) -> Any:
    """Return the value of the loop target of the loop named `loop` in iteration `index`, or None if it is unknown.

    `main` has the values of loops over a range, and of loops whose values were recorded. The value is unknown if
    two inner loops have the name `loop`.
    """
    if outermost:
        if loop != main.name:
            return None
        span, values = main.span, main.held
    else:
        spans_by_loop, values_by_loop = main.spans or {}, main.helds or {}
        same_name = [
            loop_id for loop_id in {**spans_by_loop, **values_by_loop} if name_of(loop_id) == loop
        ]
        if len(same_name) != 1:
            return None
        span, values = spans_by_loop.get(same_name[0]), values_by_loop.get(same_name[0])
    if span:
        return span[0] + span[1] * index
    return values[index] if values and 0 <= index < len(values) else None
