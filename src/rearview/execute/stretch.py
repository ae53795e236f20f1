"""Which checkpoints of a run one replay can come to, and what it does with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rearview.model import Checkpoint, Wanted
from rearview.model.segment import may_hold

START = "start"
END = "end"
FAR = 1 << 62


class Use(Enum):
    """What a replay does with a checkpoint."""

    RESTORED = "restored"
    """The state may be put back: every part of it is read."""
    COMPARED = "compared"
    """The state is compared with what was reached: large parts by their names alone, if equal."""
    ANCHORS = "anchors"
    """Only what the loop was entered with is looked up."""


@dataclass(frozen=True, slots=True)
class Touch:
    """A checkpoint that a replay can come to."""

    checkpoint: Checkpoint
    use: Use


def touched(wanted: Wanted, checkpoints: Sequence[Checkpoint]) -> list[Touch]:
    """Return the checkpoints, in order, that a replay of `wanted` can come to.

    Those outside the stretch that it runs are left out. What is kept is enough to decide at
    every boundary as with all of them: where to begin, whether to wait for a proof, and when.
    """
    loops: dict[tuple[str, int], list[Checkpoint]] = {}
    out: list[Touch] = []
    for one in checkpoints:
        if not one.meta.get("path"):
            out.append(Touch(one, Use.RESTORED))
            continue
        site, ordinal, _ = one.meta["path"][0]
        loops.setdefault((str(site), int(ordinal)), []).append(one)
    for (site, _), group in loops.items():
        out += _of_loop(wanted, site, group)
    return sorted(out, key=lambda touch: touch.checkpoint.seq)


def _of_loop(wanted: Wanted, site: str, group: Sequence[Checkpoint]) -> Iterator[Touch]:
    ranges = wanted.ranges.get(site) if site == wanted.main else None
    begins: set[int] = set()
    spans = [(0, FAR)]
    if ranges is not None and _reached(wanted, [site]):
        starts = sorted(
            _index(one)
            for one in group
            if one.complete and one.edge == START and len(one.meta["path"]) == 1
        )
        jumps = wanted.jump and wanted.levels >= 1
        spans = list(_spans(sorted(ranges), starts, jumps=jumps))
        begins = {first for first, _ in spans} if jumps else set()
    anchored: dict[int, Checkpoint] = {}
    for one in sorted(group, key=lambda one: not one.complete):
        anchored.setdefault(int(one.meta.get("anchored", 0)), one)
    for one in group:
        after = one.edge == END and len(one.meta["path"]) == 1
        if after or any(first <= _index(one) <= last for first, last in spans):
            restored = one.complete and _restored(wanted, one, begins)
            yield Touch(one, Use.RESTORED if restored else Use.COMPARED)
        elif any(one is first for first in anchored.values()):
            yield Touch(one, Use.ANCHORS)


def _spans(
    ranges: Sequence[tuple[int, int]], starts: Sequence[int], *, jumps: bool
) -> Iterator[tuple[int, int]]:
    """Yield where each stretch begins, and the checkpoint up to which it may wait for its proof.

    >>> list(_spans([(5, 7)], [0, 4, 6, 9, 12], jumps=True))
    [(4, 9)]
    >>> list(_spans([(5, 7)], [0, 4, 6, 9, 12], jumps=False))
    [(0, 9)]
    """
    at = 0
    for first, last in ranges:
        nearest = max((start for start in starts if start <= first), default=0)
        begin = max(at, nearest) if jumps else at
        yield begin, min((start for start in starts if start >= last), default=FAR)
        at = last


def _restored(wanted: Wanted, one: Checkpoint, begins: set[int]) -> bool:
    """Say whether a replay may put this state back, rather than only compare with it."""
    path = one.meta["path"]
    sites = [str(site) for site, _, _ in path]
    limited = len(path) == 2 and sites[0] == wanted.main and sites[1] in wanted.ranges
    if not wanted.jump:
        return False
    if one.edge == START:
        if len(path) == 1:
            return _index(one) in begins
        return limited and len(path) <= wanted.levels
    needed = all(_in_range(wanted, path, level) for level in range(len(path) - 1))
    if not needed or not _reached(wanted, sites):
        return True
    return wanted.after if len(path) == 1 else limited


def _reached(wanted: Wanted, sites: Sequence[str]) -> bool:
    """Return True if something wanted may stand inside the loops `sites`."""
    return wanted.everywhere or any(may_hold(chain, sites) for chain in wanted.chains)


def _in_range(wanted: Wanted, path: Sequence[Sequence[Any]], level: int) -> bool:
    """Return True if the iteration of one loop of a path is wanted."""
    if str(path[0][0]) != wanted.main or level > 1:
        return True
    ranges = wanted.ranges.get(str(path[level][0]))
    index = int(path[level][2])
    return ranges is None or any(first <= index < last for first, last in ranges)


def _index(one: Checkpoint) -> int:
    return int(one.meta["path"][0][2])
