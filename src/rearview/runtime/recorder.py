"""Record a run: append records, and save a checkpoint at each boundary where the policy decides to.

Recording never breaks or changes training: a failure of Rearview becomes one warning, and the program
continues unrecorded.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, process_time, thread_time
from types import FrameType
from typing import Any

import msgspec

from rearview.checkpointer.signals import Signals, leave_at_once
from rearview.energy import EnergyLog
from rearview.errors import UsageError
from rearview.model import CheckpointMeta, Edge, Point, RunEnd, Snapshot, Step
from rearview.model.run import EXIT_PAUSED
from rearview.model.wording import printable
from rearview.runtime.base_session import LoopNest, PointEncoder, Session
from rearview.runtime.cells.cell_inputs import ScriptCells
from rearview.runtime.final_message import closing_lines, print_closing_lines
from rearview.runtime.loops import SLICE, STRIDE, LoopEntry, ended_at_test
from rearview.runtime.measurements import Timeline, surroundings
from rearview.runtime.observed_values.assigned_scalars import AssignedScalars
from rearview.runtime.observed_values.captured_records import CapturedRecords
from rearview.runtime.program_frames import position, unobserved
from rearview.runtime.sandbox.clock import Clock
from rearview.runtime.sandbox.printed_lines import PrintedLines
from rearview.runtime.sandbox.program_inputs import InputFiles
from rearview.runtime.sandbox.written_files import Outputs
from rearview.runtime.saving.changes import CopyHints
from rearview.runtime.saving.overhead import Overhead
from rearview.runtime.saving.policy import INNER_LEAST, Reason
from rearview.runtime.saving.writer import RemoteCopy, Writer
from rearview.state.capture import capture
from rearview.state.codecs.tensors import memory_of
from rearview.store.records import RecordFile
from rearview.store.runs import Runs

_WALKING_SHARE = 0.01
"""Fraction of the run's duration so far that walks over the program's objects may take."""
_FREE_WALKING = 0.1
"""Seconds that walks over the program's objects may take even if `_WALKING_SHARE` allows less."""
_CAPTURED_ITERATIONS = 100
"""Variables are captured after each of this many first iterations of an outermost loop; then only after some."""
_BRIEF = 0.001
"""An inner loop that took fewer seconds gets no checkpoint at its end: skipping it in a replay saves nothing."""
_CROWDED = 0.5
"""A late copy is made only if the training leaves more than half a core free; see `Overhead.crowded`."""
_RECONSIDER_AFTER = 0.05
"""Seconds after a refusal of the policy during which it is not asked about similar boundaries."""


@dataclass
class Recorder(Session):
    """A session that records its run: values, checkpoints, timings, and the inputs of the program."""

    runs: Runs = field(kw_only=True)
    records: RecordFile = field(kw_only=True)
    writer: Writer = field(kw_only=True)
    overhead: Overhead = field(kw_only=True)
    script: str = ""
    clock: Clock | None = None
    """Records the clock readings of the program."""
    inputs: InputFiles | None = None
    """Records which files the program reads."""
    script_cells: ScriptCells | None = None
    """Records the lineage of each cell of a script; None if the script has no cells."""
    signals: Signals | None = None
    """Watches for signals that ask the program to stop; None if the run is not preemptible."""
    remote_copy: RemoteCopy | None = None
    """Copies the run to a remote after each save; None if the run has no remote."""
    outputs: Outputs | None = None
    """Watches the files that the program writes, which are part of its state; None if no files are watched."""
    energy: EnergyLog | None = None
    """Measures the energy that the run uses; None in a child process of the run."""
    printing: PrintedLines = field(default_factory=PrintedLines)
    """Records the lines that the program prints."""
    captured: CapturedRecords | None = None
    """Records values that the program does not log with Rearview; None if such values are not recorded."""
    assigned: AssignedScalars | None = None
    """Records the values of variables that loops assign; None if variables are not recorded."""
    prints_closing_lines: bool = False
    """Whether lines about the run are printed at its end, as `rearview run` does."""
    logged: set[str] = field(default_factory=set)
    """Up to a hundred names that the program logged with Rearview."""
    log_calls: int = 0
    loops_begin: Callable[[FrameType], None] | None = None
    """Function to call once with the frame of the first watched loop; None after the call."""
    joins: bool = False
    """Whether this process is a child of the process in which the run began."""
    only_names: frozenset[str] | None = None
    """In a child process of a replay: the names to record, because other names were recorded before; None: all."""
    seq: int = 0
    """Number of the last checkpoint."""
    not_before: dict[str, float] = field(default_factory=dict)
    """Loop id -> time before which no checkpoint at the end of the loop is considered. `Edge.START` -> time before
    which no checkpoint between iterations of inner loops is considered."""
    failed: bool = False
    """Whether recording has failed: the program continues unrecorded."""
    iteration_began: float = 0.0
    """Time of the last boundary of the outermost loop at which the policy was asked, or of the start of the loop."""
    last_saved: float = 0.0
    """Time at which a checkpoint between two iterations was last saved: a replay can start from it."""
    finished: bool = False
    hint: str = ""
    """Advice about the exception that ended the program; empty if Rearview has none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.began = perf_counter()
        self.stride = SLICE if self.settings.every else STRIDE
        self.walk_seconds = 0.0
        self._waited_before = 0.0
        """Total seconds that the program had waited for Rearview when the current iteration began."""
        self._outer_not_before = 0.0
        """Time before which no boundary of the outermost loop is considered."""
        self.timeline = Timeline()
        self._prefixes = PointEncoder()

    @property
    def pending(self) -> bool:
        """Whether a resumed program has not yet reached its checkpoint; always False for a run from the start."""
        return False

    def push(self, entry: LoopEntry) -> None:
        """Put the loop `entry` on the stack; add it to the timeline if it is an outermost loop."""
        super().push(entry)
        if self.nest is not None and self.nest.entry is entry:
            self.timeline.enter(entry.site.id, entry.site.name)

    def leave(self, entry: LoopEntry, frame: FrameType | None, *, ended: bool) -> None:
        """Take the loop `entry` off the stack and add its duration to the timeline.

        `ended` is False if the loop was left early.
        """
        outermost = self.nest is not None and self.nest.entry is entry
        if outermost and not ended and not ended_at_test(entry, frame):
            self._begin_iteration(entry.now + 1)
        super().leave(entry, frame, ended=ended)
        if self.assigned is not None:
            self._capture_after_loop(entry, frame)
        if outermost:
            self.timeline.leave(entry.span, entry.values())
        elif self.stack and not entry.site.loose:
            self._add_inner_loop(entry)

    def _add_inner_loop(self, entry: LoopEntry) -> None:
        """Add the inner loop `entry`, which has ended, and the number of its iterations to the timeline."""
        outermost, *middle_loops = self.stack
        count = max(0, entry.now + 1)
        self.timeline.add_iterations(entry.site.id, outermost.now, count)
        if middle_loops:
            path = [*(loop.site.id for loop in middle_loops), entry.site.id]
            self.timeline.add_deep_loop(path, outermost.now, count)
        else:
            took = perf_counter() - entry.started
            values = entry.values()
            self.timeline.add_inner_loop(
                entry.site.id, outermost.now, took, count, entry.span, values
            )

    def _capture_after_iteration(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Record the values of variables that the loop `entry` assigned in iteration `index`, which has ended."""
        if self.assigned is None or self.failed or index < 0 or self.nest is None or self.pending:
            return
        try:
            leaf = self.nest.entry is not entry and not entry.history.nests
            self.assigned.iteration_ended(entry, index, frame, leaf=leaf)
        except Exception as exc:
            self.fail(exc)

    def slice(self, entry: LoopEntry, size: int) -> int:
        """Return how many iterations of the loop may run before the next boundary, at most `size`.

        This is 1 if the loop's variables are captured after each iteration.
        """
        return 1 if self._captures_each_iteration(entry) else super().slice(entry, size)

    def _captures_each_iteration(self, entry: LoopEntry) -> bool:
        """Return True if the variables of the loop `entry` are captured after each iteration, even a short one.

        This is done in the first iterations of an outermost loop, until the time allowed for capturing is used up.
        """
        nest = self.nest
        return (
            self.assigned is not None
            and nest is not None
            and nest.entry is entry
            and bool(entry.site.assigned)
            and entry.history.iterations + entry.now < _CAPTURED_ITERATIONS
            and not self.assigned.allowance.used_up
        )

    @unobserved
    def _capture_after_loop(self, entry: LoopEntry, frame: FrameType | None) -> None:
        """Capture the variables of the loop `entry`, which has ended, if the loop around it is in another function."""
        assert self.assigned is not None
        self.assigned.loop_ended(entry)
        if (
            self.failed
            or not self.stack
            or entry.site.loose
            or entry.history.unwatched
            or self.pending
        ):
            return
        outer_loop = self.stack[-1]
        outer_loop.history.nests = True
        if frame is None or id(frame) != entry.frame or outer_loop.frame == entry.frame:
            return  # the loop around `entry` is in the same function: its boundary captures these variables
        if entry.history.nests or entry.now < 0:
            return
        try:
            self.assigned.inner_loop_ended(entry, frame)
        except Exception as exc:
            self.fail(exc)

    @unobserved
    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int:
        """Save a checkpoint before iteration `index` of the loop `entry` if the policy decides to; return `index`."""
        nest = self.nest
        if not self.checkpointing or entry.site.loose or self.failed or nest is None:
            return index
        if self.assigned is None or not index or not self._captures_each_iteration(entry):
            self._at_boundary(nest, entry, index, frame)
            return index
        # the loop has this boundary only because its variables are captured: count its time as capturing
        allowance, counts = self.assigned.allowance, (self.seq, self.walk_seconds)
        began, spent = thread_time(), allowance.spent
        self._at_boundary(nest, entry, index, frame)
        if (self.seq, self.walk_seconds) == counts:  # the time contains neither a save nor a walk
            allowance.add(began, counted=allowance.spent - spent)
        return index

    def _at_boundary(self, nest: LoopNest, entry: LoopEntry, index: int, frame: FrameType) -> None:
        if self.loops_begin is not None:
            begin, self.loops_begin = self.loops_begin, None
            begin(frame)
        self._capture_after_iteration(entry, index - 1, frame)
        if self.signals is not None and self.signals.requested is not None:
            self.leave_program(entry, index, frame)
        due = False
        try:
            if nest.entry is entry:
                self._begin_iteration(index)
                self.printing.resume_if_affordable()
                if self._outer_boundary_is_due(index):
                    if index:
                        self.overhead.end_iteration(
                            entry.site.id + Edge.START, perf_counter() - self.iteration_began
                        )
                    self.iteration_began = perf_counter()
                    due = True
            elif len(self.stack) == 2:
                self.overhead.begin_step(entry.site.id, index, self.writer.background_seconds)
            if nest.anchors is None:
                if nest.entry is entry and self._may_walk(entry):
                    anchors = self.walk_anchors(nest, index, self.roots(frame)[0])
                    self.walk_seconds += nest.seconds
                    self.overhead.enter_loop(nest.seconds, memory_of(anchors.alive()))
                    self.writer.prepare(self.overhead.nbytes)
            elif index and (
                due or (nest.entry is not entry and self._inner_boundary_is_due(entry))
            ):
                self.consider(entry, index, Edge.START, frame)
            if nest.entry is entry:
                self.overhead.add_wait(self.writer.training_resumes())
        except Exception as exc:
            self.fail(exc)

    def _begin_iteration(self, index: int) -> None:
        """Record on the timeline that iteration `index` of the outermost loop begins."""
        waited = self.overhead.total_wait
        self.timeline.begin_iteration(index, waited - self._waited_before)
        self._waited_before = waited

    def _outer_boundary_is_due(self, index: int) -> bool:
        """Return True if the policy should be asked about the boundary before iteration `index` of the outermost loop.

        Soon after a refusal the policy is not asked again, so that boundaries of short iterations cost less.
        """
        return not index or self.settings.every or perf_counter() >= self._outer_not_before

    def _inner_boundary_is_due(self, entry: LoopEntry) -> bool:
        """Return True if the policy should be asked about a boundary of the inner loop `entry`: asking takes 0.1 ms."""
        now = perf_counter()
        since = now - max(entry.started, self.last_saved)
        return since >= INNER_LEAST and now >= self.not_before.get(Edge.START, 0.0)

    def leave_program(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Save a checkpoint and end the process with exit code 85, because a signal asked the program to stop.

        The run can be resumed. If the state cannot be saved completely inside an inner loop, the program continues to
        the next boundary of its outermost loop and ends there in any case: the last complete checkpoint still exists.
        """
        nest = self.nest
        assert nest is not None
        assert self.signals is not None
        self.signals.absorb()
        if nest.anchors is not None and index:
            try:
                if (
                    not self.save(entry, index, Edge.START, frame, wait=True)
                    and nest.entry is not entry
                ):
                    self.signals.stop_absorbing()
                    return
            except Exception as exc:
                self.fail(exc)
        elif nest.anchors is not None and nest.entry is not entry:
            self.signals.stop_absorbing()
            return
        self.signals.settle()
        self.code = EXIT_PAUSED
        self.finish(EXIT_PAUSED)
        leave_at_once(self.code)

    def _may_walk(self, entry: LoopEntry) -> bool:
        """Return True if there is time to collect the program's objects, which checkpoints of the loop `entry` need."""
        if self.settings.epsilon <= 0 and not self.settings.every and self.signals is None:
            return False  # no checkpoint will be saved
        now = perf_counter()
        allowed = _FREE_WALKING + _WALKING_SHARE * (now - self.began)
        return self.walk_seconds <= allowed or now - entry.started > 20 * self.walk_seconds

    def on_exhausted(self, entry: LoopEntry, index: int, frame: FrameType) -> bool:
        """Save a checkpoint after the loop `entry`, whose iterator has no more items, if the policy decides to.

        Return True: the loop has ended.
        """
        self.after_loop(entry, index, frame)
        return True

    def on_early_exit(self, entry: LoopEntry, frame: FrameType) -> None:
        """Save a checkpoint after the loop `entry`, if it was left by `break` and the policy decides to."""
        if not entry.site.loose and not ended_at_test(entry, frame):
            self._capture_after_iteration(entry, entry.now, frame)
        if position(frame) in entry.site.breaks:
            self.after_loop(entry, entry.now, frame)

    @unobserved
    def after_loop(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Save a checkpoint after the loop `entry`, which was exhausted or left by `break`, if the policy decides to."""
        nest = self.nest
        if not self.checkpointing or self.failed or entry.site.loose or nest is None:
            return
        try:
            now = perf_counter()
            early = now - entry.started < _BRIEF or now < self.not_before.get(entry.site.id, 0.0)
            if nest.anchors is not None and (nest.entry is entry or not early):
                self.consider(entry, index, Edge.END, frame)
        except Exception as exc:
            self.fail(exc)

    def consider(self, entry: LoopEntry, index: int, edge: Edge, frame: FrameType) -> None:
        """Save a checkpoint of the loop `entry` if the policy decides to and the writer can take one.

        It is before iteration `index`, or, if `edge` is the end, after the loop.
        """
        depth = len(self.stack) - 1
        # with a checkpoint at the end of an inner loop, a replay can skip the loop
        ends = edge is Edge.END and depth == 1
        begun = perf_counter()
        since = begun - (entry.started if edge is Edge.END else max(entry.started, self.last_saved))
        decision = self.overhead.decide(entry.site.id + edge, since, depth * (not ends), ends=ends)
        if not decision.save and not self._is_affordable_end(entry, edge):
            if edge is Edge.START and not depth:
                self._outer_not_before = begun + _RECONSIDER_AFTER
            else:
                self.not_before[Edge.START if edge is Edge.START else entry.site.id] = (
                    begun + _RECONSIDER_AFTER
                )
            self.overhead.add_wait(perf_counter() - begun)
            return
        refusal = None if self.settings.every else self.writer.refusal()
        if refusal is not None:
            self.overhead.refusals[refusal] += 1
            return
        accepted = self.save(entry, index, edge, frame)
        if accepted and edge is Edge.START:
            self.last_saved = perf_counter()
        self.overhead.add_wait(perf_counter() - begun)

    def _is_affordable_end(self, entry: LoopEntry, edge: Edge) -> bool:
        """Return True if the end of the outermost loop `entry` should be saved although the policy refused.

        A replay compares its own state with this checkpoint. The time for checkpoints against the policy is limited.
        """
        nest = self.nest
        if edge is not Edge.END or nest is None or nest.entry is not entry:
            return False
        return self.overhead.affords(entry.site.id + Edge.END)

    def save(
        self, entry: LoopEntry, index: int, edge: Edge, frame: FrameType, *, wait: bool = False
    ) -> bool:
        """Capture the state before iteration `index`, or after the loop if `edge` is its end, and submit it.

        Return True if the writer accepted the state, and with `wait` only if no part of the state is missing.
        """
        nest = self.nest
        assert nest is not None
        assert nest.anchors is not None
        begun = perf_counter()
        roots, frames = self.roots(frame)
        captured = capture(nest.anchors, roots)
        if not nest.encoded:
            anchors = {"names": nest.names, "signature": nest.anchors.signature}
            nest.encoded = msgspec.json.encode(anchors)
        origin = {
            "names": list(roots),
            "frames": [program_frame.f_code.co_qualname for program_frame in frames],
        }
        files, outputs = self.outputs.parts() if self.outputs is not None else ({}, {})
        buffers: dict[str, Any] = {
            "anchors": nest.encoded,
            "roots": msgspec.json.encode(origin),
            **captured.buffers,
            **files,
        }
        if self.clock is not None:
            self.clock.flush()
        self.seq += 1
        self.overhead.begin_save(self.seq, entry.site.id + edge, perf_counter() - begun)
        path = self.path(entry, index)
        snapshot = Snapshot(
            self.run,
            self.seq,
            self.point_of(entry, index),
            edge,
            captured.skeleton,
            buffers,
            meta=CheckpointMeta(
                path=path,
                anchored=nest.iteration,
                records=self.records.position,
                seconds=begun - self.began,
                outputs=outputs,
            ),
            missing=tuple(captured.missing),
        )
        hints = CopyHints(
            # after an inner loop, the next boundary of the outer loop captures nearly the same state
            recapture=edge is Edge.END and len(path) > 1,
            likely_unchanged=captured.likely_unchanged,
            free_core=self.overhead.crowded < _CROWDED,
        )
        accepted = self.writer.submit(snapshot, wait=wait or self.settings.every, hints=hints)
        if not accepted:
            self.overhead.skip_save(self.seq, self.writer.reason or Reason.FAILED)
        return accepted and not (wait and captured.missing)

    def point_of(self, entry: LoopEntry, index: int) -> Point:
        """Return the point of a checkpoint of `entry` at iteration `index`."""
        steps = [loop.step() for loop in self.stack]
        value = entry.sequence[index] if entry.sequence and index < len(entry.sequence) else None
        steps[-1] = Step(entry.site.name, index, None if value == index else value)
        return Point((*self.cell_steps(), *steps))

    def log(self, items: Mapping[str, Any], place: bytes = b"") -> None:
        """Append `items` (name -> value) to the records at the current point; `place` is the source line, encoded.

        After the call, even a kill does not lose the values.
        """
        try:
            if self.finished:
                return
            if self.only_names is not None:
                items = {name: value for name, value in items.items() if name in self.only_names}
            if self.loose or not (self.stack and self.stack[-1].history.logs):
                self.mark_logging()
            self.records.append(self._prefixes.of(self), list(items.items()), place=place)
            self.log_calls += 1
            if len(self.logged) < 100:
                self.logged.update(items)
        except Exception as exc:
            self.fail(exc)

    def record_arguments(self, values: Mapping[str, Any], origin: str = "") -> None:
        """Record hyper-parameters of the run; `origin` says where the program got them from."""
        try:
            self.runs.update_args(self.run, values, origin)
        except Exception as exc:
            self.fail(exc)

    def on_fork(self) -> None:
        """Stop watching loops and saving checkpoints in a forked child process; its records still go to the run."""
        self.watching = False
        self.checkpointing = 0
        self.stack = []
        self.captured = self.assigned = None
        self.printing.remove()

    def stop_recording(self) -> None:
        """Stop recording, because the program is about to remove the store."""
        self.writer.close()
        self.records.close()
        if self.captured is not None:
            self.captured.close()
        self.printing.remove()
        self.finished = True
        self.fail(UsageError("the program removes the store itself", slug="store-removed"))

    def fail(self, exc: BaseException) -> None:
        """Warn once that recording has failed with `exc`; the program continues unrecorded.

        If a signal handler of the program raised `exc`, raise it again.
        """
        if _raised_by_handler(exc):
            raise exc  # not a failure of Rearview: the program's handler ran while Rearview's code was running
        if not self.failed and not self.store_is_gone():
            self.failed = True
            if os.environ.get("REARVIEW_DEBUG"):
                traceback.print_exception(exc)
            warnings.warn(
                f"rearview stopped recording ({type(exc).__name__}: {printable(str(exc))}). Your program "
                "continues; everything recorded so far is kept.",
                RuntimeWarning,
                stacklevel=2,
            )

    def begin_cells(self, texts: Sequence[str]) -> None:
        """Record the lineage of the script's cells, whose source is `texts`."""
        if not self.joins:
            folder = self.runs.folder(self.run)
            self.script_cells = ScriptCells(self, folder, texts, self.fail)

    def on_cell(self, number: int) -> None:
        """Record the lineage of the cell that has ended: the script begins cell `number`."""
        if self.script_cells is not None and self.pid == os.getpid():
            self.script_cells.enter(number)

    def note_failure(self, exc: BaseException) -> None:
        """Remember where the exception `exc` ended the program, and advice to the user about it."""
        super().note_failure(exc)
        if isinstance(exc, NameError) and exc.name == "rearview":
            self.hint = "add `import rearview` at the top of the script, then run it again"
        elif isinstance(exc, ModuleNotFoundError) and exc.name:
            package = exc.name.partition(".")[0]
            self.hint = (
                f"{package} is not installed for {sys.executable}, which runs the script: install it there, "
                "or install Rearview where it is"
            )

    def store_is_gone(self) -> bool:
        """Return True if the store was removed during the run; the first such call prints a message.

        Recording then stops.
        """
        if self.joins or self.runs.is_stored(self.run):
            return False
        if not self.failed:
            self.failed = True
            store = printable(str(self.project.store))
            sys.stderr.write(
                f"rearview: {store} was removed while the program runs. The program continues, and this "
                "run is not recorded. The next `rearview run` starts a new store.\n"
            )
        return True

    def warn_of_save(self, message: str) -> None:
        """Show `message`, about a checkpoint that was not saved, as a warning, unless the store was removed."""
        if not self.store_is_gone():
            warnings.warn(printable(message), RuntimeWarning, stacklevel=2)

    def finish(self, code: int | None) -> None:
        """Complete pending writes, then store how the run ended; `code` is the exit code, None if it is in `self.code`."""
        if self.finished or self.pid != os.getpid():
            return
        self.finished = True
        final = self.code if code is None else code
        if self.store_is_gone():
            self._close_without_store()
            return
        try:
            if self.script_cells is not None:
                self.script_cells.end()
            self.writer.close()
            self.records.close()
            self._end_capture()
            if self.clock is not None:
                self.clock.flush()
            self.printing.close()
            if self.joins:
                return
            if self.energy is not None:
                self.energy.note()
            self.overhead.close()
            if self.outputs is not None:
                self.outputs.ended(well=not final)
            summary = self.summary(final or 0)
            self.runs.end(self.run, final or 0, summary)
        except Exception as exc:
            self.fail(exc)
        self._push_end()
        if self.prints_closing_lines and not self.failed and final != EXIT_PAUSED:
            self._print_closing_lines(summary, final or 0)

    def _close_without_store(self) -> None:
        """Stop the threads and restore the output streams; the store no longer exists."""
        for close in (
            self.writer.close,
            self.records.close,
            self.printing.close,
            self.overhead.close,
        ):
            with suppress(Exception):
                close()

    def _print_closing_lines(self, summary: RunEnd, code: int) -> None:
        """Print the lines about the run for the user, if the setting allows it; `code` is the exit code."""
        run = self.runs.get(self.run)
        lines = closing_lines(
            *(self.run, summary, self.logged, len(run.args), self.runs.folder(self.run)),
            code=code,
            hint=self.hint,
        )
        print_closing_lines(self.settings.closing_lines, lines)

    def _captured_facts(self) -> dict[str, Any]:
        """Return the names of captured values and the seconds that capturing took; empty if nothing was captured."""
        if self.captured is None:
            return {}
        facts = self.captured.facts()
        if self.assigned is not None:
            allowance = self.assigned.allowance
            facts |= {"seconds": allowance.spent, "left_out": allowance.left_out}
        return facts

    def _end_capture(self) -> None:
        """Write captured values that are still in memory, and close the files with captured values."""
        if self.assigned is not None:
            self.assigned.finish()
        if self.captured is not None:
            self.captured.close()

    def _push_end(self) -> None:
        """Push the rest of the run to its remote; print a message if the push fails."""
        if self.remote_copy is None or self.joins:
            return
        try:
            self.remote_copy.finish()
        except Exception as exc:
            if self.code == EXIT_PAUSED:
                self.code = 1  # not `EXIT_PAUSED`: the run cannot be resumed on another machine
            sys.stderr.write(
                f"rearview: saved, but not pushed to the remote: {printable(str(exc))}\n"
            )

    def _created_files(self) -> frozenset[str]:
        """Return the paths of the files that the run created, including files that C code wrote."""
        traces = self.outputs.traces if self.outputs is not None else None
        return frozenset(traces.created_paths() if traces is not None else ())

    def summary(self, code: int) -> RunEnd:
        """Return the measurements of the run, which has ended with exit code `code`, for plans and `rearview show`."""
        files = {
            str(file) for _, module in self.modules if (file := getattr(module, "__file__", None))
        }
        if self.script and self.belongs(self.script):
            files.add(self.script)  # at the end, `__main__` no longer has its file name
        return RunEnd(
            seconds=perf_counter() - self.began,
            cpu=process_time(),
            costs=self.overhead.report(self.writer.costs),
            main=self.timeline.facts(),
            imports=times.facts() if (times := self.compiler.import_times) is not None else {},
            surroundings=surroundings(),
            inputs=self.inputs.facts(self._created_files()) if self.inputs is not None else {},
            loops={
                k: h.facts() for k, h in self.histories.items() if h.entries and not h.unwatched
            },
            files=sorted({os.path.relpath(file, self.root) for file in files}),
            early=self.early_end(code),
            captured=self._captured_facts(),
        )


def _raised_by_handler(exc: BaseException) -> bool:
    """Return True if a signal handler of the program raised `exc`."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {
        getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers
    }
    trace = exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
