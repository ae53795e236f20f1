"""Records made from the lines that a run printed: a cache that readers fill and anyone may delete.

The training process only keeps the lines. What numbers they hold is worked out when somebody looks at
the run, so it costs training nothing and works for runs that were recorded before this was known.
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
"""Number of the rules by which lines are read; another number has the cache made again."""
COLUMNS = 40
"""Names that printed lines of one run may give."""


def printed_records(project: Project, run: Run, folder: Path) -> Path | None:
    """Return the file with the numbers in the lines that a run printed; None if there are none.

    `folder` is the run's. The file is made now if it is not there; sealing it is left to the caller.
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
        return None  # a store that cannot be written to: there are no such columns


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
        made = next(Path(aside).glob("records-*.jsonl"))
        shutil.move(made, target)
    return target


def _numbers(
    lines: Iterator[PrintedLine], main: MainLoop
) -> Iterator[tuple[Point, dict[str, int | float]]]:
    """Yield the named numbers of each line with its point."""
    streams = {"out": PrintedNumbers(), "err": PrintedNumbers()}
    known: set[str] = set()
    for line in lines:
        if line.stream not in streams:
            continue
        found = streams[line.stream].read(line.text)
        found = {n: v for n, v in found.items() if n in known or len(known) < COLUMNS}
        if found:
            known.update(found)
            yield _point(line, main), found


def _point(line: PrintedLine, main: MainLoop) -> Point:
    """Return where a line was printed; loops show the values of their targets where they are known."""
    steps = []
    for depth, (loop, index) in enumerate(zip(line.loops, line.indices, strict=True)):
        value = _target(loop, index, main, outermost=depth == 0)
        steps.append(Step(loop, index, None if value == index else value))
    return Point(tuple(steps))


def _target(loop: str, index: int, main: MainLoop, *, outermost: bool) -> Any:
    """Return what the target of a loop held in iteration `index`; None if that is not known."""
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
