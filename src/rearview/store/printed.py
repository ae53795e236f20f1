"""The lines that a run printed, with the point at which each was printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

FILE = "printed.jsonl"
"""In a run's folder. Lines: {"format": 1}, then [loops, iterations, stream, text], or
{"dropped": why} where lines were printed that are not kept."""
FORMAT = 1
STREAMS = ("", "out", "err")


@dataclass(frozen=True, slots=True)
class Line:
    """One line that was printed, or the place of some that were not kept."""

    loops: tuple[str, ...]
    indices: tuple[int, ...]
    stream: str
    """`out` or `err`; empty for a remark of ours."""
    text: str

    @property
    def where(self) -> str:
        """The point, as points are written.

        >>> Line(("epoch", "step"), (3, 20), "out", "loss 0.5").where
        'epoch=3/step=20'
        """
        return "/".join(f"{a}={b}" for a, b in zip(self.loops, self.indices, strict=True))


def printed(folder: Path) -> Iterator[Line]:
    """Yield the lines that the run in `folder` printed, as far as they were kept."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            one = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue  # cut off by a kill
        if isinstance(one, dict):
            if "dropped" in one:
                yield Line((), (), "", str(one["dropped"]))
            continue
        loops, indices, stream, text = one
        yield Line(tuple(loops), tuple(indices), STREAMS[stream], text)
