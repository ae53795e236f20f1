"""Replay a segment of a run: skip iterations that are not needed, run the others, and compare with what was recorded."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, Protocol

import msgspec

from rearview.checkpointer.signals import leave_at_once
from rearview.errors import RearviewError
from rearview.model import Checkpoint, EarlyEnd, Edge, LoopStep, Point, ReplayReport, SegmentFile
from rearview.model.process_messages import ReplayFailure, may_hold
from rearview.model.run import name_of
from rearview.model.wording import plural
from rearview.runtime.base_session import Session
from rearview.runtime.loops import LoopEntry
from rearview.runtime.measurements import changed_inputs, changed_versions, surroundings
from rearview.runtime.program_frames import position, unobserved
from rearview.runtime.replay.silent_trackers import EventFiles
from rearview.runtime.restore_checkpoints import CheckpointIndex
from rearview.store.create_files import caused_by_full_disk, publish
from rearview.store.records import RecordFile, encode_point
from rearview.store.tables.read_record_files import own_values
from rearview.store.values_as_json import Put, convert, family

_COMPARING_SHARE = 8
"""If the last comparison with a checkpoint took t seconds, an optional one is made after this many times t at the
earliest."""


class SetupWatcher(Protocol):
    """Decides up to which statement several segments can share one process, as a session sees it.

    The code that they share, from the start of the program on, is the set-up.
    """

    def on_log(self, *, fresh: bool) -> None:
        """React to values that the program logs; `fresh` is True if the run has not recorded all of them."""

    def on_loop(self, site: str, index: int) -> None:
        """React to the boundary before iteration `index` of the outermost loop with id `site`."""


@dataclass
class Replayer(Session):
    """A session that replays one segment, and ends the process when the segment is done."""

    segment: SegmentFile = field(kw_only=True)
    checkpoint_index: CheckpointIndex = field(init=False)
    records: RecordFile = field(kw_only=True)
    put: Put | None = None
    surroundings: Mapping[str, str] = field(default_factory=dict)
    """Name -> library version or thread count in the recorded run."""
    inputs: Mapping[str, list[Any]] = field(default_factory=dict)
    """Path of a file that the run read -> its fingerprint."""
    run_code: int | None = None
    """Exit code of the run; None if the run did not record its end."""
    run_early: EarlyEnd | None = None
    """Where the run was when it failed; None if it did not fail."""
    created_files: Collection[str] = ()
    """Paths of the files that the run created."""
    recorded: Mapping[tuple[Any, ...], list[bytes]] = field(kw_only=True)
    """(loops, indices, name) -> encoded values that the run logged by this name at this point, in order."""
    report: ReplayReport = field(default_factory=ReplayReport)
    occurrences: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """(loops, indices, name) -> number of values in `recorded` that the replay has reached."""
    ran_code: bool = False
    """Whether code of the program was executed since the state was last compared with a checkpoint."""
    ran_loops: bool = False
    """Whether loops were executed since the last comparison with a checkpoint, or since the last jump to one."""
    skipped_before: int = 0
    """Value of `report.skipped` (number of skipped loops) when the last iteration of the outermost loop ended."""
    repeated_before: int = 0
    """Value of `report.repeated` (number of recorded values logged again) at the last jump to a checkpoint."""
    comparison_seconds: float = 0.0
    """Seconds that the last comparison with a checkpoint took."""
    last_comparison: float = 0.0
    """Time of the last comparison with a checkpoint."""
    probing: int = 0
    """Number of probes that are running; above 0 while a probe runs."""
    probe_error: str = ""
    """Message about the last probe that raised an exception; empty if none did."""
    misplaced: bool = False
    """Whether the exception in `probe_error` shows that the probe is at a wrong place in the program."""
    visited: Counter[str] = field(default_factory=Counter)
    """Id of a loop that logs requested values -> number of its iterations that ran and belong to this segment."""
    visited_until: int = 0
    """Iteration of the main loop up to which `visited` is counted."""
    entered_main: bool = False
    """Whether the main loop, which is divided into segments, was entered."""
    _last_need: tuple[list[int], bool, list[LoopEntry]] = field(default=([], False, []))
    """Memory of the last call of `needs`: `id()` and iteration of each loop, the result, and the loops. While the loop
    objects exist, no other object gets one of their ids."""
    closed: bool = False
    """Whether the report is written, or must not be written by this process."""
    shared_setup: SetupWatcher | None = None
    """Observer of the code that this process runs for several segments; None if it runs for one segment."""
    event_files: EventFiles | None = None
    """Writes the values that probes log to TensorBoard into event files; None if they are not written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.began = perf_counter()

    @unobserved
    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:
        """Skip the loop `entry`, jump to a checkpoint or continue, as the segment requires.

        Return the iteration with which the loop continues, or None to end the loop. If necessary, the state is first
        compared with the checkpoint of this boundary.
        """
        if entry.site.loose or self.nest is None:
            return index
        outermost = self.nest.entry is entry
        if outermost:
            self.enter_main(entry, index)
        if outermost and index == 0 and not self.report.setup:
            self.report.setup = perf_counter() - self.began
        if outermost and self.segment.until == entry.site.id:
            self.leave_program()
        self.stop_if_beyond_run(entry, index)
        try:
            self.checkpoint_index.walk_recorded_anchors(entry, index, frame)
        except Exception as exc:
            self.give_up(exc)
        if outermost and self.in_main:
            self.count_main_iterations(index)
        path = self.path(entry, index)
        wanted_iteration = self.next_wanted(entry, index)
        idle = index == 0 and not self.needs(entry)
        # compare before a restore overwrites the state, and before the replay ends
        must_compare = wanted_iteration != index or idle
        if (outermost and self.end_outer_iteration()) or must_compare or self.should_compare():
            self.prove(self.checkpoint_index.to_compare(Edge.START, path), frame)
        if idle and self.skip(path, frame):
            return None
        if wanted_iteration is None:
            if outermost and not self.segment.after:
                if self.may_end(entry, index):
                    self.leave_program()
            elif self.skip(path, frame):
                return None
        elif wanted_iteration > index and self.segment.jump and len(path) <= self.segment.levels:
            self.checkpoint_index.pending = self.checkpoint_index.nearest(path, wanted_iteration)
            if self.checkpoint_index.pending is not None:
                target: int = self.checkpoint_index.pending.meta.path[-1].iteration
                return target
        self.report.iterations += outermost
        self.ran_code = True
        self.ran_loops = self.ran_loops or not outermost
        return index

    def enter_main(self, entry: LoopEntry, index: int) -> None:
        """Remember whether the outermost loop `entry` is the main loop; code shared by segments ends before it."""
        if self.shared_setup is not None:
            self.shared_setup.on_loop(entry.site.id, index)
        if entry.site.id == self.segment.main:
            self.entered_main = True

    def is_beyond_run(self, entry: LoopEntry, index: int) -> bool:
        """Return True if the run was interrupted before it reached iteration `index` of the loop `entry`."""
        if self.run_early is None or not self.run_early.interrupted:
            return False
        for step, last in zip(self.path(entry, index), self.run_early.path, strict=False):
            if (step.loop, step.ordinal) != tuple(last[:2]):
                return False
            if step.iteration != last[2]:
                return step.iteration > last[2]
        return False

    def stop_if_beyond_run(self, entry: LoopEntry, index: int) -> None:
        """End the replay if the run was interrupted before it reached iteration `index` of the loop `entry`."""
        if self.is_beyond_run(entry, index):
            while self.stack:  # `leave` counts the iterations of each loop
                self.leave(self.stack[-1], None, ended=True)
            self.leave_program()

    def end_outer_iteration(self) -> bool:
        """Record that an iteration of the outermost loop has ended; return True if an inner loop was skipped in it.

        If so, the state must be compared now: no later comparison would check the code after the skipped loop.
        """
        skipped = self.report.skipped != self.skipped_before
        self.ran_loops = self.ran_loops or (self.ran_code and not skipped)
        self.skipped_before = self.report.skipped
        return skipped

    def slice(self, entry: LoopEntry, size: int) -> int:
        """Return how many iterations of the loop `entry` may run before the next boundary, at most `size`.

        This is 1 if inner loops are skipped, because the state must be compared after each iteration in which an
        inner loop was skipped, and 1 near the point where the run was interrupted.
        """
        skips = self.report.skipped > 0 and self.nest is not None and self.nest.entry is entry
        if skips or self.is_beyond_run(entry, entry.index + size):
            return 1
        return super().slice(entry, size)

    def add_to_history(self, entry: LoopEntry) -> None:
        """Add the execution `entry` of a loop to the loop's history, unless the loop was skipped."""
        if entry.now >= 0:
            self.count_iterations(entry)
            super().add_to_history(entry)

    def leave(self, entry: LoopEntry, frame: FrameType | None, *, ended: bool) -> None:
        """Take the loop `entry` off the stack; if it is the main loop, count its last iterations."""
        if self.in_main and self.nest is not None and self.nest.entry is entry:
            self.count_main_iterations(entry.now + 1)
        super().leave(entry, frame, ended=ended)

    def count_main_iterations(self, index: int) -> None:
        """Add to `visited` the iterations of the main loop before `index` that belong to the segment."""
        ranges = self.segment.ranges.get(self.segment.main, [])
        for first, last in ranges:
            self.visited[self.segment.main] += max(
                0, min(last, index) - max(first, self.visited_until)
            )
        self.visited_until = index

    def count_iterations(self, entry: LoopEntry) -> None:
        """Add to `visited` the iterations of the loop `entry`, which has ended, if they belong to this segment."""
        if entry.site.id not in self.segment.owed:
            return
        if self.segment.main:
            if entry.site.id == self.segment.main and not self.stack:
                return  # `count_main_iterations` has counted the main loop while it ran
            if not (all(map(self.in_range, self.stack)) if self.in_main else self.segment.tail):
                return
        self.visited[entry.site.id] += entry.now + 1

    def missing_iterations(self) -> list[str]:
        """Return a message for each loop with requested values that ran fewer iterations than in the run."""
        return [
            f"`{name_of(site)}` ({site.partition(':')[0]}) had {plural(self.visited[site], 'iteration')}, "
            f"in the run {recorded_count}"
            for site, recorded_count in self.segment.owed.items()
            if self.visited[site] < recorded_count and site not in self.unwatched
        ]

    def should_compare(self) -> bool:
        """Return True if an optional comparison of the state with a checkpoint should be made now.

        A thorough replay searches for the start of a difference, so it makes every possible comparison.
        """
        return (
            self.segment.thorough
            or perf_counter() - self.last_comparison >= _COMPARING_SHARE * self.comparison_seconds
        )

    def count_uncompared(self) -> None:
        """Count in `report.open` that loops ran whose results cannot be checked any more.

        Their state was not compared with a checkpoint, and they logged no value that the run had recorded.
        """
        self.report.open += self.ran_loops and self.report.repeated == self.repeated_before
        self.ran_loops, self.repeated_before = False, self.report.repeated

    def needs(self, entry: LoopEntry) -> bool:
        """Return True if the segment must log values inside the loop `entry`.

        It need not if a loop around `entry` is in an iteration that is not requested.
        """
        outer_loops = [loop for loop in self.stack if loop is not entry]
        key = [id(entry), *[number for loop in outer_loops for number in (id(loop), loop.now)]]
        if key == self._last_need[0]:  # `needs` is called before every iteration of the loop
            return self._last_need[1]
        is_needed = all(map(self.in_range, outer_loops))
        if is_needed and not self.segment.everywhere:
            sites = [loop.site.id for loop in (*outer_loops, entry)]
            is_needed = any(may_hold(chain, sites) for chain in self.segment.chains)
        self._last_need = key, is_needed, [entry, *outer_loops]
        return is_needed

    @property
    def in_main(self) -> bool:
        """Whether the program is in the main loop, which is divided into segments."""
        return self.nest is not None and self.nest.entry.site.id == self.segment.main

    def in_range(self, entry: LoopEntry) -> bool:
        """Return True if the current iteration of the loop `entry` is requested by the segment."""
        ranges = self.ranges_of(entry)
        return ranges is None or any(first <= entry.now < last for first, last in ranges)

    def ranges_of(self, entry: LoopEntry) -> list[tuple[int, int]] | None:
        """Return the requested iterations of the loop `entry`, as (first, after the last), or None if all are.

        They hold for the current iteration of the main loop. Only the main loop and the loops directly inside it have
        ranges. If the lines of such a loop run inside another loop or by recursion, all iterations are requested.
        """
        ranges = self.segment.ranges.get(entry.site.id)
        spans = self.segment.spans.get(entry.site.id)
        if ranges is None and spans is None:
            return None
        if not self.in_main or not any(entry is loop for loop in self.stack[:2]):
            return None
        if entry is self.stack[0]:
            return ranges
        if entry.site.id == self.segment.main:  # recursion: the main loop runs inside itself
            return None
        span = spans.get(self.stack[0].now) if spans else None
        if span is None:
            return ranges
        low, high = span
        wanted_ranges = [(max(first, low), min(last, high)) for first, last in ranges or [span]]
        return [(first, last) for first, last in wanted_ranges if first < last]

    def next_wanted(self, entry: LoopEntry, index: int) -> int | None:
        """Return the first requested iteration of the loop `entry` that is not before `index`, or None if none is.

        If the segment needs nothing inside the loop, return `index`.
        """
        if not self.needs(entry):
            return index
        ranges = self.ranges_of(entry)
        if ranges is None:
            return index
        return min((max(first, index) for first, last in ranges if last > index), default=None)

    def may_end(self, entry: LoopEntry, index: int) -> bool:
        """Return True if the replay may end before iteration `index` of the outermost loop `entry`.

        It may if the state was compared with a checkpoint since code last ran, or if the next checkpoint to compare
        with is more iterations away than this replay has run.
        """
        reach = index + self.report.iterations
        return not self.ran_code or not self.checkpoint_index.has_more(
            self.path(entry, index), reach
        )

    def skip(self, path: tuple[LoopStep, ...], frame: FrameType) -> bool:
        """Restore the checkpoint at the end of the loop at `path` instead of running the loop.

        Return False, and do nothing, if there is no such checkpoint or if a state was not compared yet.
        """
        checkpoint = self.checkpoint_index.at(Edge.END, path) if self.segment.jump else None
        # after loops ran, compare first: a restore would overwrite their results
        if checkpoint is None or self.ran_loops:
            return False
        try:
            self.checkpoint_index.restore(checkpoint, frame)
        except Exception as exc:
            self.give_up(exc)
        self.report.skipped += 1
        self.ran_code = True  # the program now executes the code after the loop
        return True

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Bring the loop `entry` from iteration `index` to the checkpoint that `boundary` chose; return its iteration."""
        self.count_uncompared()
        try:
            self.checkpoint_index.advance(source, target - index, frame)
        except Exception as exc:
            self.give_up(exc)
        self.ran_code = True
        outermost = self.nest is not None and self.nest.entry is entry
        self.report.iterations += outermost
        if outermost:
            self.visited_until = target
        return target

    @unobserved
    def on_exhausted(self, entry: LoopEntry, index: int, frame: FrameType) -> bool:
        """Compare the state after the loop `entry`; end the process if the segment is done.

        Return True: the loop has ended.
        """
        if entry.site.loose or self.nest is None:
            return True
        outermost = self.nest.entry is entry
        if outermost:
            self.end_outer_iteration()
        self.stop_if_beyond_run(entry, sys.maxsize)
        if outermost or self.should_compare():
            self.prove(self.checkpoint_index.to_compare(Edge.END, self.path(entry, index)), frame)
        if outermost and self.needs(entry) and not self.segment.after:
            if not self.segment.main or entry.site.id == self.segment.main:
                self.leave_program()
        return True

    @unobserved
    def on_early_exit(self, entry: LoopEntry, frame: FrameType) -> None:
        """If the loop `entry` was left by `break`, compare the state, as after the end of a loop."""
        if position(frame) in entry.site.breaks:
            self.on_exhausted(entry, entry.now, frame)

    def give_up(self, exc: Exception) -> None:
        """End the replay because using a checkpoint raised `exc`, and request a second replay that jumps to none.

        If this is the second replay, report the error as a difference and continue without restoring checkpoints.
        """
        if not self.segment.jump:
            self.report.difference = self.report.difference or _message(exc)
            self.checkpoint_index.complete = {}
            return
        self.report.retry = True
        self.report.error = _message(exc)
        self.note_failure(exc)
        self.finish(1)
        leave_at_once(1)

    def prove(self, checkpoint: Checkpoint | None, frame: FrameType) -> None:
        """Compare the live state with `checkpoint` and count the result in the report.

        Do nothing if `checkpoint` is None, if no code ran since the last comparison, or after a difference was found.
        """
        if checkpoint is None or not self.ran_code or self.report.difference is not None:
            return
        begun = perf_counter()
        try:
            difference = self.checkpoint_index.difference(checkpoint, frame)
        except Exception as exc:
            self.report.difference = f"at {checkpoint.point}: {_message(exc)}"
            return
        self.last_comparison = perf_counter()
        self.comparison_seconds = self.last_comparison - begun
        if difference is None:
            self.report.states += 1
        else:
            self.report.difference = (
                f"{difference.path} at {checkpoint.point}: recorded {difference.recorded}, "
                f"now {difference.current}"
            )
        self.ran_code = self.ran_loops = False

    def log(self, items: Mapping[str, Any], place: bytes = b"") -> None:
        """Compare `items` (name -> value) with the values that the run recorded at this point; record new names."""
        if self.pid != os.getpid():
            return
        if self.shared_setup is not None:
            repeated = not self.probing and all(
                (*self.loops_and_indices(), name) in self.recorded for name in items
            )
            self.shared_setup.on_log(fresh=not repeated)
        self.mark_logging()
        point = self.point()
        where = (point.loops, point.indices)
        fresh = list(items.items()) if self.probing else []
        if fresh and self.segment.kinds:
            self.check_kinds(items)
        for name, value in () if self.probing else items.items():
            key = (*where, name)
            recorded_values = self.recorded.get(key)
            if recorded_values is None:
                fresh.append((name, value))
                continue
            occurrence = self.occurrences[key]
            encoded = msgspec.json.encode(convert(value, self.put))
            if self.report.skipped or self.checkpoint_index.restored:
                # several loops of one name share a point, and skipped ones logged the first values: search
                occurrence = next(
                    (
                        k
                        for k in range(occurrence, len(recorded_values))
                        if recorded_values[k] == encoded
                    ),
                    occurrence,
                )
            self.occurrences[key] = occurrence + 1
            if occurrence < len(recorded_values) and recorded_values[occurrence] == encoded:
                self.report.repeated += 1
            elif name not in self.report.differing:
                self.report.differing.append(name)
        if fresh and self.writes_at(point):
            self.records.append(encode_point(point), fresh, place=place)
            self.report.written += len(fresh)

    def check_kinds(self, items: Mapping[str, Any]) -> None:
        """Raise `WrongKindError` if a value in `items` is not of the kind that other versions log by its name.

        Kinds are number, text and so on.
        """
        for name, value in items.items():
            expected = self.segment.kinds.get(name)
            kind = family(convert(value, self.put)) if expected else ""
            if expected and kind and kind != expected:
                raise WrongKindError(f"{name} is {kind} here and {expected} in other versions")

    def writes_at(self, point: Point) -> bool:
        """Return True if this segment, and no other segment, records the values that probes log at `point`.

        The first segment records the values before the main loop, and the segment that runs to the end of the
        program records the values after the main loop.
        """
        if self.segment.main and not (point.steps and self.in_main):
            return self.segment.tail if self.entered_main else self.segment.head
        return all(map(self.in_range, self.stack))

    def note_probe_error(self, exc: Exception, trace: TracebackType | None) -> None:
        """Remember that a probe raised `exc`, and in which line: the exception may end the program.

        The first frame of `trace` is the probe's.
        """
        line = trace.tb_lineno if trace is not None else 0
        path = trace.tb_frame.f_code.co_filename if trace is not None else ""
        file = Path(path).name
        self.misplaced = isinstance(exc, WrongKindError) or _is_unknown_name(exc, trace)
        files = [
            probed for probed in self.segment.probes if Path(path).as_posix().endswith(f"/{probed}")
        ]
        self.report.probe = (max(files, key=len), line) if files else None
        self.report.raised = f"{type(exc).__name__}: {exc}"
        where = f" at {point}" if (point := self.point()).steps else ""
        self.probe_error = (
            f"the added statement at {file}:{line} raised {type(exc).__name__}: {exc}{where}. Put it "
            "under a condition (`if …:`) or inside `try:`, and run the command again"
        )

    def note_failure(self, exc: BaseException) -> None:
        """Remember the exception `exc`, which ends the program, and whether a full disk caused it."""
        super().note_failure(exc)
        with contextlib.suppress(Exception):
            sys.stdout.flush()  # so that the traceback comes last in the output
        if caused_by_full_disk(exc):
            self.report.failure = ReplayFailure.DISK_FULL

    def _read_by_run(self) -> dict[str, list[Any]]:
        """Return path -> fingerprint of the files that the run read and did not create.

        Files that the run created are left out, because a replay that ends early has not created them yet.
        """
        return {
            path: fingerprint
            for path, fingerprint in self.inputs.items()
            if path not in self.created_files
        }

    def record_arguments(self, values: Mapping[str, Any], origin: str = "") -> None:
        """Do nothing: the run has recorded its hyper-parameters."""

    def on_fork(self) -> None:
        """Stop watching loops in a forked child process."""
        self.watching = False
        self.stack = []

    def leave_program(self) -> None:
        """Write the report and end the process, because the segment has been replayed."""
        self.report.finished = True
        self.finish(0)
        leave_at_once(0)

    def ended_as_run(self, code: int) -> bool:
        """Return True if the run failed, and this replay ends with the same exit code, exception and iteration.

        `code` is the exit code of the replay.
        """
        if not code or code != self.run_code:
            return False
        recorded_end, end = self.run_early, self.early_end(code)
        if recorded_end is None or end is None:
            return recorded_end is None  # runs of old releases recorded only their exit code
        # compare only the outermost loop: inner loops are not always watched
        return recorded_end.exception == end.exception and recorded_end.path[:1] == end.path[:1]

    def finish(self, code: int | None) -> None:
        """Complete the report and write it for the backfill; `code` is the exit code, None if it is in `self.code`."""
        if self.closed or self.pid != os.getpid():
            return
        self.closed = True
        self.count_uncompared()
        final = code if code is not None else self.code
        as_run = not self.probe_error and not self.report.retry and self.ended_as_run(final or 0)
        if not self.report.finished:
            self.report.finished = final == 0 or as_run
        if self.report.finished and not self.report.retry and self.report.error is None:
            self.report.lacking = self.missing_iterations()
        if final and not as_run and self.report.error is None:
            self.report.error = self.probe_error or f"the program ended with exit code {final}"
            if self.probe_error and self.report.failure is None:
                self.report.failure = (
                    ReplayFailure.WRONG_PLACE if self.misplaced else ReplayFailure.PROBE_RAISED
                )
        self.report.seconds = perf_counter() - self.began
        self.report.restoring = self.checkpoint_index.seconds
        self.report.restored = self.checkpoint_index.restored
        if not self.report.proved:
            self.report.surroundings = [
                *changed_versions(self.surroundings, surroundings()),
                *changed_inputs(self._read_by_run(), self.real),
            ]
        if self.event_files is not None:
            differs = self.report.difference is not None or self.report.differing
            self.event_files.close(
                good=self.report.finished and not differs and not self.report.retry
            )
        self.records.close()
        publish(Path(self.segment.report), msgspec.json.encode(self.report))


class WrongKindError(TypeError):
    """Raised if a probe logs a value of another kind than other versions log, such as a number in place of a text."""


def _is_unknown_name(exc: Exception, trace: TracebackType | None) -> bool:
    """Return True if `exc` says that a name or attribute is unknown and the probe itself, no function it calls, raised it.

    `trace` begins with the frame of the probe.
    """
    if trace is None or not isinstance(exc, (NameError, AttributeError)):
        return False
    statement_file = trace.tb_frame.f_code.co_filename
    while trace.tb_next is not None:
        trace = trace.tb_next
        code = trace.tb_frame.f_code
        if code.co_filename != statement_file or not code.co_name.startswith("<"):
            return False  # a called function raised it: only comprehensions and lambdas belong to the probe
    return True


def _message(exc: Exception) -> str:
    return str(exc) if isinstance(exc, RearviewError) else f"{type(exc).__name__}: {exc}"


def recorded_values(folder: Path) -> dict[tuple[Any, ...], list[bytes]]:
    """Return (loops, indices, name) -> encoded values that a run logged by this name at this point, in order.

    `folder` is the folder of the run.
    """
    values: dict[tuple[Any, ...], list[bytes]] = {}
    for loops, indices, name, value in own_values(folder):
        values.setdefault((loops, indices, name), []).append(msgspec.json.encode(value))
    return values
