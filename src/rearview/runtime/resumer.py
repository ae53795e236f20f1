"""Resume a run that stopped: run the code before its loops again, jump to its last checkpoint, record from there.

If a checkpoint turns out to be unusable, the process is started again (`Restart`) and resumes from
a checkpoint inside fewer loops, or from the start. An unusable checkpoint may be noticed only later, while the
program runs: for example, when a gradient flows through the boundary of the checkpoint.

A run can be resumed with an edited source (`SourceChange`) if no changed line runs before the
checkpoint is reached: the state in the checkpoint was computed without the change.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NoReturn

import msgspec

from rearview.checkpointer.signals import end_children
from rearview.errors import RearviewError, StateError
from rearview.model import Checkpoint, Control, Edge, LoopStep
from rearview.model.process_messages import AGAIN, LAUNCHER, VARIABLE
from rearview.runtime.loops import LoopEntry
from rearview.runtime.program_frames import unobserved
from rearview.runtime.recorder import Recorder
from rearview.runtime.restore_checkpoints import CheckpointIndex
from rearview.source.probes.edit_before_resume import EditBeforeResume

_OPEN = Path("/proc/self/fd")


def _open_files() -> set[int]:
    return {int(entry.name) for entry in _OPEN.iterdir()} if _OPEN.is_dir() else set()


@dataclass(frozen=True)
class Restart:
    """Starts this process again, with the command, environment and folder with which it was started."""

    control: Control
    environment: dict[str, str] = field(default_factory=os.environ.copy)
    folder: str = field(default_factory=os.getcwd)
    files: set[int] = field(default_factory=_open_files)

    def __call__(self, checkpoint: Checkpoint, why: RearviewError) -> None:
        """Start the process again, to resume from a checkpoint inside fewer loops than `checkpoint`; does not return."""
        depth = len(checkpoint.meta.path) - 1
        next_step = "resuming from an earlier one" if depth else "starting over"
        sys.stderr.write(
            f"rearview: the run cannot be resumed from the checkpoint at {checkpoint.point}; {next_step} ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, depth=depth))

    def afresh(self, why: RearviewError) -> None:
        """Start the process again without the files that the run created; does not return.

        With these files, a program that downloads its data only if files are absent would run different code.
        """
        sys.stderr.write(
            "rearview: the set-up differs because files exist that the run created; "
            f"setting up again without them ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, afresh=True))

    def repeat_loops(self, why: RearviewError) -> None:
        """Start the process again, and let it run the loops before the checkpoint instead of skipping them.

        Does not return.
        """
        sys.stderr.write(
            "rearview: the state that was saved after an earlier loop does not lead to the checkpoint; "
            f"running the earlier loops again ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, repeat_loops=True))

    def _begin(self, control: Control) -> None:
        """Replace this process by a new one that is started with `control`."""
        end_children()
        if control.kernel is not None:
            # the notebook client waits for this process: after its death, it reads `AGAIN` and starts the new one
            Path(control.kernel).with_name(AGAIN).write_bytes(msgspec.json.encode(control))
            os.kill(os.getpid(), signal.SIGKILL)
        for number in _open_files() - self.files:
            try:
                os.set_inheritable(number, False)
            except OSError:
                continue  # `_open_files` itself had this descriptor open, to list the folder
        signal.pthread_sigmask(signal.SIG_BLOCK, self.control.signals)
        encoded = msgspec.json.encode(control).decode()
        os.chdir(self.folder)
        command = (sys.executable, LAUNCHER)
        env = {**self.environment, **self.control.lent, VARIABLE: encoded}
        os.execve(command[0], command, env)  # noqa: S606 - no shell


@dataclass
class SourceChange:
    """Ends the process if a changed line of an edited source runs before the program reaches the checkpoint."""

    edit: EditBeforeResume
    root: str
    point: str
    """Point of the checkpoint, as text."""
    leave: Callable[[str], NoReturn]
    """Function that prints the reason, its argument, and ends the process."""
    _files: dict[str, str] = field(default_factory=dict)
    _stopped: bool = False

    def start(self) -> None:
        """Watch which lines the program runs, until `stop` is called."""
        sys.settrace(self._call)

    def stop(self) -> None:
        """Stop watching which lines run: the checkpoint is reached."""
        self._stopped = True  # `unobserved` sets the trace function again after the boundary
        sys.settrace(None)

    def skipped(self, loop: str) -> None:
        """End the process if a changed line is in the loop with the id `loop`, which is skipped before the checkpoint."""
        for path, line in self.edit.changed_lines_in(loop):
            self._refuse(path, line)

    def failed(self, exc: RearviewError) -> NoReturn:
        """End the process: `exc` says that the saved state does not fit the edited program."""
        self.leave(f"the state saved at {self.point} does not fit the edited source: {exc}")

    def _call(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self._stopped:
            sys.settrace(None)
            return None
        name = frame.f_code.co_filename
        path = self._files.get(name)
        if path is None:
            path = self._files[name] = os.path.relpath(os.path.realpath(name), self.root)
        return self._line if event == "call" and self.edit.lines.get(path) else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self._stopped:
            return None
        path = self._files[frame.f_code.co_filename]
        if event == "line" and frame.f_lineno in self.edit.lines[path]:
            self._refuse(path, frame.f_lineno)
        return self._line

    def _refuse(self, path: str, line: int) -> NoReturn:
        change = self.edit.lines[path][line]
        self.leave(
            f"line {line} of {path} {change} and runs before the checkpoint at {self.point}, so the "
            "state saved there was computed without it"
        )


def last_usable(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the newest complete one of `checkpoints`, or None if there is none.

    Any checkpoint can be reached: each loop around it is entered at the nearest checkpoint of that loop, and
    the iterations in between run again, except inner loops whose end was saved.
    """
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.complete]
    return max(complete, key=lambda each: each.seq, default=None)


@dataclass
class Resumer(Recorder):
    """A recorder that first brings the program to the checkpoint where the run stopped, and records from there."""

    target: Checkpoint | None = None
    """The checkpoint from which to resume; None if there is none, or once it is reached."""
    checkpoint_index: CheckpointIndex = field(init=False)
    restart: Callable[[Checkpoint, RearviewError], None] | None = None
    """Function that starts the process again, to resume from an earlier checkpoint; None with an edited source."""
    source_change: SourceChange | None = None
    """Watches for changed lines until the checkpoint is reached; None if the source is not edited."""
    continues: str = ""
    """The version of the edited source; empty if the source is not edited."""
    afresh: Callable[[RearviewError], None] | None = None
    """Function that starts the process again without the files that the run created.

    None if this was done before, or if the run created no files.
    """
    repeat_loops: Callable[[RearviewError], None] | None = None
    """Function that starts the process again, to run all loops before the checkpoint; None if this was done before."""
    origin: Checkpoint | None = None
    """The checkpoint from which the run was resumed, once it is reached; until then None."""

    def begin_cells(self, texts: Sequence[str]) -> None:
        """Do not record the lineage of cells: loops before the checkpoint are skipped, so the cost of cells is unknown."""

    @property
    def pending(self) -> bool:
        """Whether the checkpoint `target` is not reached yet: values logged until then are recorded already."""
        return self.target is not None

    @unobserved
    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:  # type: ignore[override]
        """Return the iteration with which the loop `entry` continues, or None to skip the rest of the loop.

        Until the checkpoint `target` is reached, skip iterations and loops before it; then record like `Recorder`.
        """
        if self.target is None:
            return super().boundary(entry, index, frame)
        if entry.site.loose or self.nest is None:
            return index
        self._anchor(entry, index, frame)
        path = self.path(entry, index)
        target_path = self.target.meta.path
        depth = len(path)
        on_the_way = depth <= len(target_path) and all(
            list(step[:2]) == list(target_step[:2])
            and (level == depth - 1 or step[2] == target_step[2])
            for level, (step, target_step) in enumerate(zip(path, target_path, strict=False))
        )
        if not on_the_way:
            same_nest = path[0][:2] == target_path[0][:2]
            passes_by = index == 0 and (same_nest or self.repeat_loops is not None)
            return None if passes_by and self._skip(path, frame) else index
        if depth == len(target_path) and self.target.edge is Edge.END:
            self._restore_large_files()
            self._skip(path, frame)
            self._begin_recording()
            return None
        goal: int = target_path[depth - 1][2]
        if goal > index:
            self.checkpoint_index.pending = self.checkpoint_index.nearest(path, goal)
            if self.checkpoint_index.pending is not None:
                target: int = self.checkpoint_index.pending.meta.path[-1].iteration
                return target
        return index

    def _anchor(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        try:
            self.checkpoint_index.walk_recorded_anchors(entry, index, frame)
        except RearviewError as exc:
            if self.source_change is not None:
                self.source_change.failed(exc)
            passed_by = self.checkpoint_index.restored > 0
            if passed_by and self.repeat_loops is not None and os.getpid() == self.pid:
                self.repeat_loops(exc)
            if self.afresh is not None and os.getpid() == self.pid:
                self.afresh(exc)
            raise

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Bring the loop `entry` to the checkpoint that `boundary` chose, and return its iteration, `target`.

        If this is the checkpoint from which to resume, recording begins here.
        """
        assert self.target is not None
        is_target = self.checkpoint_index.pending is self.target
        if is_target:
            self._restore_large_files()
        checkpoint = self.checkpoint_index.pending
        try:
            self.checkpoint_index.advance(source, target - index, frame)
        except StateError as exc:
            self._restart(checkpoint, exc)
            raise
        if is_target:
            self._begin_recording()
        return target

    def _skip(self, path: tuple[LoopStep, ...], frame: FrameType) -> bool:
        checkpoint = self.checkpoint_index.at(Edge.END, path)
        if checkpoint is None:
            return False
        if self.source_change is not None:
            self.source_change.skipped(path[-1][0])
        try:
            self.checkpoint_index.restore(checkpoint, frame)
        except StateError as exc:
            self._restart(checkpoint, exc)
            raise
        return True

    def on_refusal(self, exc: StateError) -> None:
        """Start the process again: a gradient flows through the boundary from which the run was resumed."""
        self._restart(self.origin or self.target, exc)

    def _restart(self, checkpoint: Checkpoint | None, exc: StateError) -> None:
        if self.source_change is not None:
            self.source_change.failed(exc)
        if self.restart is not None and checkpoint is not None and os.getpid() == self.pid:
            self.restart(checkpoint, exc)

    def _restore_large_files(self) -> None:
        """Restore output files that are too large for a checkpoint; call this before the state is restored."""
        assert self.target is not None
        if self.outputs is not None:
            self.outputs.restore_large_files(self.target.meta.outputs.get("large", ()))

    def _begin_recording(self) -> None:
        self.origin, self.target = self.target, None
        if self.source_change is not None:
            self.source_change.stop()
            self.source_change = None
            facts = {"version": self.continues, "point": str(self.origin and self.origin.point)}
            self.runs.append_event(self.run, "continued", facts)
        if self.origin is not None:
            path = self.origin.meta.path
            full_iteration = len(path) == 1 and self.origin.edge is not Edge.END
            self.timeline.skipped(path[0][2] + (not full_iteration))
        if self.clock is not None:
            self.clock.start_recording()
        self.overhead.counted_until = self.last_saved = perf_counter()

    def after_loop(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Save a checkpoint after the loop `entry` if the policy decides to, but not before `target` is reached."""
        if self.target is None:
            super().after_loop(entry, index, frame)

    def log(self, items: Mapping[str, Any], place: bytes = b"") -> None:
        """Record `items`, but only once the checkpoint `target` is reached: earlier values are recorded already."""
        if self.target is None:
            super().log(items, place)
