"""Go on with a run that stopped: set up again, jump to its last checkpoint, record from there.

Begin the process anew when a checkpoint turns out not to be one to go on from.

A gradient that flows through the boundary is only seen when it flows, in the middle of the program's
own work, and a state that cannot be read back leaves the program neither here nor there. Nothing but
a fresh process helps then; it goes on from a checkpoint less deep in the loops, or from the start.

Go on with a mended source: refuse as soon as a changed line is about to run too early.

Until the checkpoint is reached, the program only sets up what the run had set up. A line that was changed
and runs before that is part of what the run did before the checkpoint.

Go on with a run that stopped: set up again, jump to its last checkpoint, record from there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NoReturn

import msgspec

from rearview.checkpointer.signals import end_children
from rearview.errors import RearviewError, StateError
from rearview.model import Checkpoint, Control
from rearview.model.plan import AGAIN, LAUNCHER, VARIABLE
from rearview.runtime.checkpoint_index import END, Jumps
from rearview.runtime.frames import unobserved
from rearview.runtime.loops import LoopEntry
from rearview.runtime.recorder import Recorder
from rearview.source.mended_source import Mend

_OPEN = Path("/proc/self/fd")


def _files() -> set[int]:
    return {int(one.name) for one in _OPEN.iterdir()} if _OPEN.is_dir() else set()


@dataclass(frozen=True)
class Retreat:
    """How this process was started, so that it can be once more."""

    control: Control
    environment: dict[str, str] = field(default_factory=os.environ.copy)
    folder: str = field(default_factory=os.getcwd)
    files: set[int] = field(default_factory=_files)

    def __call__(self, checkpoint: Checkpoint, why: RearviewError) -> None:
        """Go on from a checkpoint less deep in the loops than this one; does not return."""
        depth = len(checkpoint.meta["path"]) - 1
        way = "going on from an earlier one" if depth else "starting over"
        sys.stderr.write(
            f"rearview: the checkpoint at {checkpoint.point} is not one to go on from; {way} ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, depth=depth))

    def afresh(self, why: RearviewError) -> None:
        """Set up once more without the files that the run has made; does not return.

        A program that fetches its data only where it is absent has taken another way now.
        """
        sys.stderr.write(
            "rearview: the set-up came out differently, now that files are there which the run made "
            f"itself; setting up again without them ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, afresh=True))

    def _begin(self, control: Control) -> None:
        """Replace this process by one that is told `control`."""
        end_children()
        if control.kernel is not None:
            # the front end waits for an answer of this very process: it has to begin anew too
            Path(control.kernel).with_name(AGAIN).write_bytes(msgspec.json.encode(control))
            os.kill(os.getpid(), signal.SIGKILL)
        for number in _files() - self.files:
            try:
                os.set_inheritable(number, False)
            except OSError:
                continue  # it was that of the folder we looked into
        signal.pthread_sigmask(signal.SIG_BLOCK, self.control.signals)
        told = msgspec.json.encode(control).decode()
        os.chdir(self.folder)
        command = (sys.executable, LAUNCHER)
        env = {**self.environment, **self.control.lent, VARIABLE: told}
        os.execve(command[0], command, env)  # noqa: S606 - no shell


@dataclass
class Mending:
    """Watches the way to the checkpoint that a run goes on from with a mended source."""

    mend: Mend
    root: str
    point: str
    """Where the checkpoint lies."""
    leave: Callable[[str], NoReturn]
    """Ends the process, saying why."""
    _files: dict[str, str] = field(default_factory=dict)
    _stopped: bool = False

    def start(self) -> None:
        """Watch the lines that the program runs, until `stop`."""
        sys.settrace(self._call)

    def stop(self) -> None:
        """Stop watching: the checkpoint is reached, and all that runs from now on is after it."""
        self._stopped = True  # a boundary puts the tracer back that it found when it began
        sys.settrace(None)

    def skipped(self, loop: str) -> None:
        """Refuse if a loop that ended before the checkpoint would have run a changed line."""
        for path, line in self.mend.run_in(loop):
            self._refuse(path, line)

    def failed(self, exc: RearviewError) -> NoReturn:
        """Refuse: the state does not fit the program as it is now."""
        self.leave(f"the state saved at {self.point} does not fit the mended source: {exc}")

    def _call(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self._stopped:
            sys.settrace(None)
            return None
        name = frame.f_code.co_filename
        path = self._files.get(name)
        if path is None:
            path = self._files[name] = os.path.relpath(os.path.realpath(name), self.root)
        return self._line if event == "call" and self.mend.lines.get(path) else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self._stopped:
            return None
        path = self._files[frame.f_code.co_filename]
        if event == "line" and frame.f_lineno in self.mend.lines[path]:
            self._refuse(path, frame.f_lineno)
        return self._line

    def _refuse(self, path: str, line: int) -> NoReturn:
        done = self.mend.lines[path][line]
        self.leave(
            f"line {line} of {path} {done} and runs before the checkpoint at {self.point}, so the "
            "state saved there was computed without it"
        )


def last_usable(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the newest complete checkpoint among these.

    Any can be reached: loops around it are entered at the nearest checkpoint of their own, and
    what lies between runs again, skipping inner loops whose end was saved.
    """
    complete = [one for one in checkpoints if one.complete]
    return max(complete, key=lambda each: each.seq, default=None)


@dataclass
class Resumer(Recorder):
    """A recorder that first finds its way to where the run stopped."""

    target: Checkpoint | None = None
    jumps: Jumps = field(init=False)
    retreat: Callable[[Checkpoint, RearviewError], None] | None = None
    """Begins anew from an earlier checkpoint than the one that turned out to be of no use."""
    mending: Mending | None = None
    """Set while a run goes on with another source than it had, until the checkpoint is reached."""
    continues: str = ""
    """The version that it goes on with then."""
    afresh: Callable[[RearviewError], None] | None = None
    """Sets up again without the files that the run has made; None if that was done, or there are none."""
    origin: Checkpoint | None = None
    """Where the run went on from."""

    @property
    def pending(self) -> bool:
        """Whether the program is still on its way: what it logs now was recorded before."""
        return self.target is not None

    @unobserved
    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:  # type: ignore[override]
        """Jump towards the target; record once it is reached."""
        if self.target is None:
            return super().boundary(entry, index, frame)
        if entry.site.loose or self.nest is None:
            return index
        self._anchor(entry, index, frame)
        path = self.path(entry, index)
        wanted = self.target.meta["path"]
        depth = len(path)
        on_the_way = depth <= len(wanted) and all(
            list(mine[:2]) == list(other[:2]) and (level == depth - 1 or mine[2] == other[2])
            for level, (mine, other) in enumerate(zip(path, wanted, strict=False))
        )
        if not on_the_way:
            return None if index == 0 and self._skip(path, frame) else index
        if depth == len(wanted) and self.target.edge == END:
            self._bring_files()
            self._skip(path, frame)
            self._arrived()
            return None
        goal: int = wanted[depth - 1][2]
        if goal > index:
            self.jumps.pending = self.jumps.nearest(path, goal)
            if self.jumps.pending is not None:
                target: int = self.jumps.pending.meta["path"][-1][2]
                return target
        return index

    def _anchor(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        try:
            self.jumps.anchor(entry, index, frame)
        except RearviewError as exc:
            if self.mending is not None:
                self.mending.failed(exc)
            if self.afresh is not None and os.getpid() == self.pid:
                self.afresh(exc)
            raise

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Go to the pending checkpoint; if it is the target, the run goes on from here."""
        assert self.target is not None
        arrives = self.jumps.pending is self.target
        if arrives:
            self._bring_files()
        checkpoint = self.jumps.pending
        try:
            self.jumps.advance(source, target - index, frame)
        except StateError as exc:
            self._retreat(checkpoint, exc)
            raise
        if arrives:
            self._arrived()
        return target

    def _skip(self, path: list[list[Any]], frame: FrameType) -> bool:
        checkpoint = self.jumps.at(END, path)
        if checkpoint is None:
            return False
        if self.mending is not None:
            self.mending.skipped(path[-1][0])
        try:
            self.jumps.restore(checkpoint, frame)
        except StateError as exc:
            self._retreat(checkpoint, exc)
            raise
        return True

    def refusing(self, exc: StateError) -> None:
        """Begin anew: a gradient flows through the boundary that the run went on from."""
        self._retreat(self.origin or self.target, exc)

    def _retreat(self, checkpoint: Checkpoint | None, exc: StateError) -> None:
        if self.mending is not None:
            self.mending.failed(exc)
        if self.retreat is not None and checkpoint is not None and os.getpid() == self.pid:
            self.retreat(checkpoint, exc)

    def _bring_files(self) -> None:
        """Bring files back that are too large for a checkpoint, before it cuts them to size."""
        assert self.target is not None
        if self.outputs is not None:
            self.outputs.bring_back(self.target.meta.get("outputs", {}).get("large", ()))

    def _arrived(self) -> None:
        self.origin, self.target = self.target, None
        if self.mending is not None:
            self.mending.stop()
            self.mending = None
            told = {"version": self.continues, "point": str(self.origin and self.origin.point)}
            self.runs.note(self.run, "continued", told)
        if self.origin is not None:
            path = self.origin.meta["path"]
            whole = len(path) == 1 and self.origin.edge != END
            self.timeline.skipped(path[0][2] + (not whole))
        if self.clock is not None:
            self.clock.go_on()
        self.pulse.now = self.last = perf_counter()

    def ended(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Record loop ends only once the target is reached."""
        if self.target is None:
            super().ended(entry, index, frame)

    def log(self, items: Mapping[str, Any]) -> None:
        """Record values only once the target is reached; those before are recorded already."""
        if self.target is None:
            super().log(items)
