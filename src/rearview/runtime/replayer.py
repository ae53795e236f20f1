"""Replay a stretch of a run: skip what holds nothing asked for, run the rest, prove it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any

import msgspec

from rearview.checkpointer.signals import leave_at_once
from rearview.errors import RearviewError
from rearview.model import Checkpoint, Point, ReplayReport, SegmentFile
from rearview.model.plan import PROBE_RAISED, may_hold
from rearview.model.run import name_of
from rearview.runtime.checkpoint_index import END, START, Jumps
from rearview.runtime.event_files import EventFiles
from rearview.runtime.frames import position, unobserved
from rearview.runtime.loops import LoopEntry
from rearview.runtime.measurements import changed_inputs, changes, surroundings
from rearview.runtime.session import Session
from rearview.store.project import publish
from rearview.store.records import RecordFile, encode_point, recorded
from rearview.store.values import Put, convert

_SELDOM = 8
"""While execution goes on, comparing may take one part in so many."""


@dataclass
class Replayer(Session):
    """A session that replays one segment and then leaves the program."""

    wanted: SegmentFile = field(kw_only=True)
    jumps: Jumps = field(init=False)
    records: RecordFile = field(kw_only=True)
    put: Put | None = None
    surroundings: Mapping[str, str] = field(default_factory=dict)
    """What the run stood on."""
    inputs: Mapping[str, list[Any]] = field(default_factory=dict)
    """Fingerprints of the files that it read."""
    made: Collection[str] = ()
    """Files that the run made, which were not there before."""
    recorded: Mapping[tuple[Any, ...], list[bytes]] = field(kw_only=True)
    report: ReplayReport = field(default_factory=ReplayReport)
    seen: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    moved: bool = False
    """Something was executed since the last restore."""
    worked: bool = False
    """Loops were executed since something was last compared."""
    skips: int = 0
    """Loops that were skipped before the present iteration of the outermost loop."""
    repeats: int = 0
    """Recorded values that had come out equal when the last stretch ended."""
    proving: float = 0.0
    """Seconds that the last comparison took."""
    compared: float = 0.0
    """When that was."""
    probing: int = 0
    raised: str = ""
    """What the last probe said that raised something."""
    visited: Counter[str] = field(default_factory=Counter)
    """Iterations that ran of loops in which something is wanted, by site."""
    since: int = 0
    """Iteration of the main loop from which on they are not counted yet."""
    entered: bool = False
    """The loop that is divided among segments was entered."""
    closed: bool = False
    events: EventFiles | None = None
    """Writes event files of what probes give to TensorBoard; None: there are none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.began = perf_counter()

    @unobserved
    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:
        """Skip, jump or go on, by what is wanted."""
        if entry.site.loose or self.nest is None:
            return index
        outermost = self.nest.entry is entry
        if outermost and entry.site.id == self.wanted.main:
            self.entered = True
        if outermost and index == 0 and not self.report.setup:
            self.report.setup = perf_counter() - self.began
        if outermost and self.wanted.until == entry.site.id:
            self.leave_program()
        try:
            self.jumps.anchor(entry, index, frame)
        except Exception as exc:
            self.give_up(exc)
        if outermost and self.in_main:
            self.gone_on(index)
        path = self.path(entry, index)
        goal = self.goal(entry, index)
        idle = index == 0 and not self.needed(entry)
        last = goal != index or idle  # before something is restored, or the end
        if (outermost and self.turned()) or last or self.due():
            self.prove(self.jumps.proof(START, path), frame)
        if idle and self.skip(path, frame):
            return None
        if goal is None:
            if outermost and not self.wanted.after:
                if self.may_leave(entry, index):
                    self.leave_program()
            elif self.skip(path, frame):
                return None
        elif goal > index and self.wanted.jump and len(path) <= self.wanted.levels:
            self.jumps.pending = self.jumps.nearest(path, goal)
            if self.jumps.pending is not None:
                target: int = self.jumps.pending.meta["path"][-1][2]
                return target
        self.report.iterations += outermost
        self.moved = True
        self.worked = self.worked or not outermost
        return index

    def turned(self) -> bool:
        """Take in that an iteration of the outermost loop has ended: work, if nothing was skipped.

        Say whether something was: no later comparison would cover what followed it.
        """
        skipped = self.report.skipped != self.skips
        self.worked = self.worked or (self.moved and not skipped)
        self.skips = self.report.skipped
        return skipped

    def slice(self, entry: LoopEntry, size: int) -> int:
        """Act before every iteration once loops inside are skipped: what followed is compared there."""
        skips = self.report.skipped > 0 and self.nest is not None and self.nest.entry is entry
        return 1 if skips else super().slice(entry, size)

    def learn(self, entry: LoopEntry) -> None:
        """Take in what a loop took; one that was skipped tells nothing, and may be skipped again."""
        if entry.now >= 0:
            self.count(entry)
            super().learn(entry)

    def leave(self, entry: LoopEntry, frame: FrameType | None, *, ended: bool) -> None:
        """Count the last iterations of the main loop."""
        if self.in_main and self.nest is not None and self.nest.entry is entry:
            self.gone_on(entry.now + 1)
        super().leave(entry, frame, ended=ended)

    def gone_on(self, index: int) -> None:
        """Count the wanted iterations of the main loop that have run, up to `index`."""
        ranges = self.wanted.ranges.get(self.wanted.main, [])
        for first, last in ranges:
            self.visited[self.wanted.main] += max(0, min(last, index) - max(first, self.since))
        self.since = index

    def count(self, entry: LoopEntry) -> None:
        """Count the iterations of a loop that has ended, as far as they are this segment's."""
        if entry.site.id not in self.wanted.owed:
            return
        if self.wanted.main:
            if entry.site.id == self.wanted.main and not self.stack:
                return  # counted as it went on
            if not (all(map(self.in_range, self.stack)) if self.in_main else self.wanted.tail):
                return
        self.visited[entry.site.id] += entry.now + 1

    def lacking(self) -> list[str]:
        """Return the loops that went round less often than in the run, each in words."""
        return [
            f"`{name_of(site)}` ({site.partition(':')[0]}) went round {self.visited[site]} times, "
            f"in the run {owed}"
            for site, owed in self.wanted.owed.items()
            if self.visited[site] < owed and site not in self.quiet
        ]

    def due(self) -> bool:
        """Say whether to compare although execution goes on: a later comparison covers this one.

        A replay that is to find out where a difference begins compares wherever it can.
        """
        return not self.wanted.jump or perf_counter() - self.compared >= _SELDOM * self.proving

    def end_stretch(self) -> None:
        """Count it if what was executed so far ends here without having been compared."""
        self.report.open += self.worked and self.report.repeated == self.repeats
        self.worked, self.repeats = False, self.report.repeated

    def needed(self, entry: LoopEntry) -> bool:
        """Say whether something inside this loop is wanted, at the current iterations around it."""
        around = [other for other in self.stack if other is not entry]
        if not all(map(self.in_range, around)):
            return False
        if self.wanted.everywhere:
            return True
        sites = [other.site.id for other in (*around, entry)]
        return any(may_hold(chain, sites) for chain in self.wanted.chains)

    @property
    def in_main(self) -> bool:
        """Whether the program is in the loop that is divided among segments."""
        return self.nest is not None and self.nest.entry.site.id == self.wanted.main

    def in_range(self, entry: LoopEntry) -> bool:
        """Return True if the iteration that a loop is in is wanted."""
        ranges = self.ranges_of(entry)
        return ranges is None or any(first <= entry.now < last for first, last in ranges)

    def ranges_of(self, entry: LoopEntry) -> list[tuple[int, int]] | None:
        """Return which iterations of a loop are wanted in this one of the main loop; None: all.

        Only the main loop and those directly inside it have ranges: the same lines of the program
        may run elsewhere as well, under another loop or by recursion.
        """
        if not self.in_main or not any(entry is other for other in self.stack[:2]):
            return None
        ranges = self.wanted.ranges.get(entry.site.id)
        spans = self.wanted.spans.get(entry.site.id)
        if entry is self.stack[0]:
            return ranges
        if entry.site.id == self.wanted.main:  # it calls itself
            return None
        span = spans.get(self.stack[0].now) if spans else None
        if span is None:
            return ranges
        low, high = span
        found = [(max(first, low), min(last, high)) for first, last in ranges or [span]]
        return [(first, last) for first, last in found if first < last]

    def goal(self, entry: LoopEntry, index: int) -> int | None:
        """Return the next wanted iteration from `index` on; None if there is none."""
        if not self.needed(entry):
            return index
        ranges = self.ranges_of(entry)
        if ranges is None:
            return index
        return min((max(first, index) for first, last in ranges if last > index), default=None)

    def may_leave(self, entry: LoopEntry, index: int) -> bool:
        """Say whether the proof is in, or too far away to wait for."""
        reach = index + self.report.iterations
        return not self.moved or not self.jumps.ahead(self.path(entry, index), reach)

    def skip(self, path: list[list[Any]], frame: FrameType) -> bool:
        """Restore what the loop left behind, if that was saved; then it need not run."""
        checkpoint = self.jumps.at(END, path) if self.wanted.jump else None
        if checkpoint is None or self.worked:  # what was not compared yet must not be overwritten
            return False
        try:
            self.jumps.restore(checkpoint, frame)
        except Exception as exc:
            self.give_up(exc)
        self.report.skipped += 1
        self.moved = True  # what follows the loop is executed
        return True

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Go to the pending checkpoint."""
        self.end_stretch()
        try:
            self.jumps.advance(source, target - index, frame)
        except Exception as exc:
            self.give_up(exc)
        self.moved = True
        outermost = self.nest is not None and self.nest.entry is entry
        self.report.iterations += outermost
        if outermost:
            self.since = target
        return target

    @unobserved
    def exhausted(self, entry: LoopEntry, index: int, frame: FrameType) -> bool:
        """Prove the state after the loop; leave if nothing is wanted any more."""
        if entry.site.loose or self.nest is None:
            return True
        outermost = self.nest.entry is entry
        if outermost:
            self.turned()
        if outermost or self.due():
            self.prove(self.jumps.proof(END, self.path(entry, index)), frame)
        if outermost and self.needed(entry) and not self.wanted.after:
            if not self.wanted.main or entry.site.id == self.wanted.main:
                self.leave_program()
        return True

    @unobserved
    def broken(self, entry: LoopEntry, frame: FrameType) -> None:
        """Prove the state after a loop that was left by `break`."""
        if position(frame) in entry.site.breaks:
            self.exhausted(entry, entry.now, frame)

    def give_up(self, exc: Exception) -> None:
        """End a replay whose state can no longer be trusted; one without jumps tells more."""
        if not self.wanted.jump:
            self.report.difference = self.report.difference or _said(exc)
            self.jumps.found = {}
            return
        self.report.retry = True
        self.report.error = _said(exc)
        self.finish(1)
        leave_at_once(1)

    def prove(self, checkpoint: Checkpoint | None, frame: FrameType) -> None:
        """Compare the state reached by execution with the one recorded here."""
        if checkpoint is None or not self.moved or self.report.difference is not None:
            return
        begun = perf_counter()
        try:
            found = self.jumps.difference(checkpoint, frame)
        except Exception as exc:
            self.report.difference = f"at {checkpoint.point}: {_said(exc)}"
            return
        self.compared = perf_counter()
        self.proving = self.compared - begun
        if found is None:
            self.report.states += 1
        else:
            self.report.difference = (
                f"{found.path} at {checkpoint.point}: recorded {found.then}, now {found.now}"
            )
        self.moved = self.worked = False

    def log(self, items: Mapping[str, Any]) -> None:
        """Check what was recorded, and keep what is new."""
        if self.pid != os.getpid():
            return
        self.loudly()
        point = self.point()
        place = (point.loops, point.indices)
        fresh = list(items.items()) if self.probing else []
        for name, value in () if self.probing else items.items():
            key = (*place, name)
            before = self.recorded.get(key)
            if before is None:
                fresh.append((name, value))
                continue
            occurrence = self.seen[key]
            now = msgspec.json.encode(convert(value, self.put))
            if self.report.skipped or self.jumps.restored:
                # loops of one name share their points, and those that were passed by logged first
                occurrence = next(
                    (k for k in range(occurrence, len(before)) if before[k] == now), occurrence
                )
            self.seen[key] = occurrence + 1
            if occurrence < len(before) and before[occurrence] == now:
                self.report.repeated += 1
            elif name not in self.report.differing:
                self.report.differing.append(name)
        if fresh and self.asked(point):
            self.records.append(encode_point(point), fresh)
            self.report.written += len(fresh)

    def asked(self, point: Point) -> bool:
        """Say whether values at a point are this segment's to write.

        Outside the loop that is divided among segments, the first writes what comes before it and
        the one that goes on to the end what comes after.
        """
        if self.wanted.main and not (point.steps and self.in_main):
            return self.wanted.tail if self.entered else self.wanted.head
        return all(map(self.in_range, self.stack))

    def note_raised(self, exc: Exception, trace: TracebackType | None) -> None:
        """Keep that a probe raised, and where: should the program end by it, that is why."""
        line = trace.tb_lineno if trace is not None else 0
        file = Path(trace.tb_frame.f_code.co_filename).name if trace is not None else ""
        where = f" at {point}" if (point := self.point()).steps else ""
        self.raised = (
            f"{PROBE_RAISED} {file}:{line} raised {type(exc).__name__}: {exc}{where}. Let it "
            "log only where it can (`if …:`, or `try:` around it), and ask again"
        )

    def _read_by_run(self) -> dict[str, list[Any]]:
        """Return the files that the run read and had not made itself.

        A replay that ended before it wrote one of its own would miss it.
        """
        return {path: about for path, about in self.inputs.items() if path not in self.made}

    def argument(self, values: Mapping[str, Any], origin: str = "") -> None:
        """Leave arguments as they were recorded."""

    def forked(self) -> None:
        """Become a child, which replays nothing."""
        self.watching = False
        self.stack = []

    def leave_program(self) -> None:
        """End the process: all that was wanted has been replayed."""
        self.report.finished = True
        self.finish(0)
        leave_at_once(0)

    def finish(self, code: int | None) -> None:
        """Write the report."""
        if self.closed or self.pid != os.getpid():
            return
        self.closed = True
        self.end_stretch()
        final = code if code is not None else self.code
        if not self.report.finished:
            self.report.finished = final == 0
        if self.report.finished and not self.report.retry and self.report.error is None:
            self.report.lacking = self.lacking()
        if final and self.report.error is None:
            self.report.error = self.raised or f"the program ended with exit code {final}"
        self.report.seconds = perf_counter() - self.began
        self.report.restoring = self.jumps.seconds
        self.report.restored = self.jumps.restored
        if not self.report.proved:
            self.report.surroundings = [
                *changes(self.surroundings, surroundings()),
                *changed_inputs(self._read_by_run(), self.real),
            ]
        if self.events is not None:
            differs = self.report.difference is not None or self.report.differing
            self.events.close(good=self.report.finished and not differs and not self.report.retry)
        self.records.close()
        publish(Path(self.wanted.report), msgspec.json.encode(self.report))


def _said(exc: Exception) -> str:
    return str(exc) if isinstance(exc, RearviewError) else f"{type(exc).__name__}: {exc}"


def recorded_values(folder: Path) -> dict[tuple[Any, ...], list[bytes]]:
    """Return what a run logged itself, by place and name, in order."""
    found: dict[tuple[Any, ...], list[bytes]] = {}
    for loops, indices, name, value in recorded(folder):
        found.setdefault((loops, indices, name), []).append(msgspec.json.encode(value))
    return found
