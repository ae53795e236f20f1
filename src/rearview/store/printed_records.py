"""Records made from the lines that a run printed: a cache that readers fill and that may be deleted.

The training process only stores the lines. A reader extracts the numbers when the run is queried, so this
costs training nothing and works for older runs too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rearview.model import MainLoop, Point, Run, Step
from rearview.model.run import MARK, Origin, name_of
from rearview.source.printed_numbers import PrintedNumbers
from rearview.store.files import make_folder, open_file
from rearview.store.printed_lines import FILE, PrintedLine, printed
from rearview.store.project import Project
from rearview.store.records import RecordFile, encode_point

RULES = 1
"""Version of the rules by which numbers are extracted; a new version rebuilds the cache."""
COLUMNS = 40
"""Different names at most that the printed lines of one run give."""


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
