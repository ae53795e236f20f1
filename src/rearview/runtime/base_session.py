"""Base class of sessions that record or replay: the stack of running loops, points, and the roots of the state.

The roots are the objects from which all other objects of the state are reached: the program's globals and local
variables, and a few objects of Rearview and of libraries. A loop is watched if its iterations are reported to the
session.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, takewhile
from time import perf_counter
from types import FrameType
from typing import Any

from rearview.config import Settings
from rearview.model import EarlyEnd, LoopStep, Point, Step
from rearview.model.run import CELL, NAMED
from rearview.runtime.loops import (
    SLICE,
    LoopEntry,
    LoopHistory,
    direct_iterator,
    is_watched_already,
    iterate,
    iterate_in_generator,
)
from rearview.runtime.program_frames import (
    Modules,
    clear_library_references,
    library_roots,
    position,
    project_frames,
    resolved,
    roots,
)
from rearview.runtime.sandbox.file_view import FileView, PathUse
from rearview.source.instrument import LoopSite
from rearview.source.library_loops import LOOPS
from rearview.state.codecs.suspended_generators import LoopIterator, sources_of
from rearview.state.object_numbers import Anchors
from rearview.store.project import FOLDER, Project
from rearview.store.records import encode_point, encode_source_line

SHORT_INSIDE = 0.0002
"""A loop inside one other loop that logs nothing is no longer watched after an execution of fewer seconds."""
SHORT_OUTSIDE = 0.005
"""An outermost loop that logs nothing is no longer watched after an execution of fewer seconds."""
SHORT_DEEP = 0.02
"""A loop inside two or more loops that logs nothing is no longer watched after an execution of fewer seconds. The
limit is high because checkpoints inside such a loop are at least ten seconds apart."""
SHORT_ITERATION = 20e-6
"""A loop that logs nothing and whose iterations take fewer seconds on average is no longer watched."""


_current: Session | None = None


def current_session() -> Session | None:
    """Return the session of this process, or None if none has started."""
    return _current


def use_session(session: Session | None) -> None:
    """Make `session` the session of this process, which `rearview.log` and the other public functions use."""
    global _current  # noqa: PLW0603 - one session per process is the point
    _current = session


class NamedLoop:
    """A loop that the user named: `for epoch in rearview.loop("epoch", range(10))`."""

    __slots__ = ("history", "iterable", "session")

    def __init__(self, session: Session, name: str, iterable: Iterable[Any]) -> None:
        self.session = session
        self.history = session.named_loop(name)
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.iterable)
        if not self.session.is_watching():
            return items
        numbers = self.iterable if type(self.iterable) is range else items
        return self.session.enter(self.history, numbers, sys._getframe(1))

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # raises if the iterable has no length


@dataclass(slots=True)
class LoopNest:
    """One execution of an outermost loop, with the loops inside it.

    Checkpoints inside the nest share its anchors: the objects that existed when the outermost loop was entered.
    """

    entry: LoopEntry
    anchors: Anchors | None = None
    iteration: int = 0
    """Iteration of the outermost loop before which the anchors were collected."""
    names: tuple[str, ...] = ()
    """Names of the roots from which the anchors were reached."""
    encoded: bytes = b""
    """Names and signature of the anchors as JSON, which every checkpoint of the nest contains."""
    feeds: list[Any] | None = None
    """Generators and data loader iterators from which the outermost loop draws; None if not determined yet."""
    seconds: float = 0.0
    """Seconds that it took to collect the anchors."""


@dataclass
class Session:
    """Observes the user's program in this process: base class of `Recorder` and `Replayer`."""

    project: Project
    run: str
    settings: Settings
    checkpointing: int = 0
    """Checkpoints are saved if this is above 0: always under `rearview run`, otherwise inside
    `rearview.checkpointing`."""
    declared: dict[str, Any] = field(default_factory=dict)
    """Name -> object that belongs to the state: passed to `rearview.checkpointing`, or added by Rearview."""
    histories: dict[str, LoopHistory] = field(default_factory=dict)
    stack: list[LoopEntry] = field(default_factory=list)
    nest: LoopNest | None = None
    ordinals: dict[str, int] = field(default_factory=dict)
    """Id of an outermost loop -> number of its executions so far."""
    arg_values: dict[str, str] = field(default_factory=dict)
    """Name -> text of the hyper-parameters that `rearview run --arg` sets, for `rearview.arg`."""
    compiler: Any = None
    view: FileView | None = None
    """Translates file paths in a replay; None when recording."""
    code: int | None = None
    """Exit code of the program; None until it has ended."""
    unwatched: set[str] = field(default_factory=set)
    """Ids of loops that are no longer watched."""
    watching: bool = True
    """Whether loops are watched; False in forked child processes."""
    loose: list[LoopEntry] = field(default_factory=list)
    """Running loops in generators and coroutines, which are suspended and resumed in any order."""
    loop_files: set[str] = field(default_factory=set)
    """Files of libraries whose training loops are watched."""
    stride: float = SLICE
    """Seconds that short iterations may run between two calls of the session."""
    shared: frozenset[str] = frozenset()
    """Files that other programs have written since the run stopped: a restore does not change them."""
    early: EarlyEnd | None = None
    """The exception that ended the program, and the loops that it left; None if no exception did."""
    left_early: tuple[tuple[int, tuple[str, int, int]], ...] = ()
    """(id of the frame, step) of the last loop that was left early and of the loops around it, outermost first."""
    cell: int = 0
    """Number of the cell being executed, from 1 on; 0 if no cell is executed."""
    cells_in_points: bool = True
    """Whether points of a script that is divided into cells begin with the number of the cell."""

    def __post_init__(self) -> None:
        self.thread = threading.get_ident()
        self.pid = os.getpid()
        self.root = (self.view.root if self.view else os.path.realpath(self.project.root)) + os.sep
        self.libraries = tuple(
            {os.path.realpath(p) + os.sep for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
        )
        self._belongs: dict[str, bool] = {}
        self._places: dict[tuple[str, int], bytes] = {}
        self.modules = Modules(self.belongs)

    def belongs(self, file: str) -> bool:
        """Return True if the path `file` belongs to the project.

        This is so if it is inside the project folder, and neither in an installed library nor in the store.
        """
        cached = self._belongs.get(file)
        if cached is None:
            path = resolved(file)
            inside = file[:1] == os.sep and path.startswith(self.root)  # excludes "<frozen runpy>"
            installed = "site-packages" in path or any(
                path.startswith(lib) and not self.root.startswith(lib) for lib in self.libraries
            )
            in_store = f"{os.sep}{FOLDER}{os.sep}" in path[len(self.root) - 1 :]
            cached = self._belongs[file] = inside and not installed and not in_store
        return cached

    def enter_cell(self, number: int) -> None:
        """Remember that the script begins its cell `number`, counted from 1."""
        if threading.get_ident() == self.thread:
            if self.cells_in_points:
                self.cell = number
            self.on_cell(number)

    def begin_cells(self, texts: Sequence[str]) -> None:
        """Record the cells of the script that is about to run, whose source is `texts`; a replay does nothing."""

    def on_cell(self, number: int) -> None:
        """Record the lineage of the cell before cell `number`, which begins; a replay does nothing."""

    def adopt(self, file: str) -> None:
        """Treat code with the file name `file` as part of the project, wherever the file is."""
        self._belongs[file] = True

    def real(self, path: str, use: PathUse = PathUse.READ) -> str:
        """Return the real path of the file that the program knows as `path`; in a replay, the two may differ."""
        return path if self.view is None else str(self.view.real(path, use))

    def hook(self, site: str, items: Any, frame: FrameType) -> Any:
        """Return an iterator over `items`, for the loop with id `site` in `frame` to run over.

        For a `while` loop, `items` is None, and the iterator yields None without end.
        """
        history = self._watched(site)
        if history is None:
            return repeat(None) if items is None else direct_iterator(items)
        if is_watched_already(items):  # `rearview.loop` has made this iterator
            return items
        return self.enter(history, items, frame)

    def parts(self, site: str, numbers: Any, frame: FrameType) -> Iterable[Any]:
        """Yield parts of `numbers`, the range of a `for … in range(…)` loop; instrumented code loops over each part.

        If the program has bound the name `range` to another object, `numbers` is any iterable, and the only part.
        """
        history = self._watched(site)
        if history is None:
            return (numbers,)
        if type(numbers) is not range:
            return (self.hook(site, iter(numbers), frame),)
        return self._slices(history, numbers, frame)

    def _watched(self, site: str) -> LoopHistory | None:
        history = self.histories.get(site)
        if history is None or history.unwatched or not self.is_watching():
            return None
        return history

    def is_watching(self) -> bool:
        """Return True if a loop that is entered now is watched: not in another thread or a forked child process."""
        return self.watching and threading.get_ident() == self.thread

    def log_scalar(self, name: str, value: Any) -> None:
        """Log `value`, which the program assigned to the variable `name` in a loop, if it is a number.

        A NumPy number and a tensor without dimensions count as numbers.
        """
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if type(value) in (int, float, bool) and threading.get_ident() == self.thread:
            self.log({name: value})

    def named_loop(self, name: str) -> LoopHistory:
        """Return the history of the loop that the user named `name`."""
        key = NAMED + name
        history = self.histories.get(key)
        if history is None:
            site = LoopSite(
                key, name, "", 0, may_log=True, loose=False, breaks=frozenset(), inner=False
            )
            history = self.histories[key] = LoopHistory(site, logs=True)
        return history

    def enter(self, history: LoopHistory, items: Any, frame: FrameType) -> Iterator[Any]:
        """Return an iterator over `items` (as in `iterate`) that calls this session between iterations of the loop."""
        if history.site.loose:
            entry = LoopEntry(history, 0, id(frame))
            history.entries += 1
            walk = items if type(items) is LoopIterator else LoopIterator(items)
            return chain.from_iterable(iterate_in_generator(self, entry, walk))
        return chain.from_iterable(self._slices(history, items, frame))

    def _slices(
        self, history: LoopHistory, items: Any, frame: FrameType
    ) -> Generator[Iterable[Any], None, None]:
        """Enter a loop and return a generator of its slices (see `iterate`)."""
        if self.loop_files:
            self._drop_interrupted()
        counts = self.stack[-1].inner_entries() if self.stack else self.ordinals
        ordinal = counts.get(history.site.id, 0)
        counts[history.site.id] = ordinal + 1
        entry = LoopEntry(history, ordinal, id(frame))
        history.entries += 1
        return iterate(self, entry, items)

    def _drop_interrupted(self) -> None:
        """Remove library loops from the stack whose frame has ended without a call of `leave`.

        This happens when Ignite's `interrupt` ends a loop.
        """
        while self.stack and self.stack[-1].frame not in set(_frame_ids()):
            last = self.stack.pop()
            if self.nest is not None and self.nest.entry is last:
                self.nest = None

    def push(self, entry: LoopEntry) -> None:
        """Put the loop `entry` on the stack: its first iteration is about to begin."""
        if entry.site.loose:
            self.loose.append(entry)
            return
        if not self.stack:
            self.nest = LoopNest(entry)
            entry.history.outermost = True
        self.stack.append(entry)

    def leave(self, entry: LoopEntry, frame: FrameType | None, *, ended: bool) -> None:
        """Take the loop `entry` off the stack; `ended` is False if it was left early, as by `break` or an exception."""
        if entry.site.loose:
            self.loose = [loop for loop in self.loose if loop is not entry]
            self.add_to_history(entry)
            return
        if not any(loop is entry for loop in self.stack):
            return
        if not ended and frame is not None and id(frame) == entry.frame:
            self.on_early_exit(entry, frame)
            if position(frame) not in entry.site.breaks:
                self._note_left_early(entry)
        while self.stack:
            last = self.stack.pop()
            if self.nest is not None and self.nest.entry is last:
                self.nest = None
            if last is entry:
                break
        self.add_to_history(entry)

    def _note_left_early(self, entry: LoopEntry) -> None:
        outer_loops = takewhile(lambda loop: loop is not entry, self.stack)
        path = tuple([(loop.frame, _step(loop)) for loop in (*outer_loops, entry)])
        if self.left_early[: len(path)] != path:  # if equal, it already names a loop inside `entry`
            self.left_early = path

    def add_to_history(self, entry: LoopEntry) -> None:
        """Add the execution `entry` of a loop to the loop's history; stop watching a short loop that logs nothing."""
        history = entry.history
        seconds = perf_counter() - entry.started
        count = max(entry.now + 1, 0)
        history.seconds += seconds
        history.iterations += count
        if not history.logs and not history.site.may_log:
            limit = (SHORT_OUTSIDE, SHORT_INSIDE, SHORT_DEEP)[min(len(self.stack), 2)]
            history.unwatched = is_short = seconds < limit or (
                count > 100 and seconds < SHORT_ITERATION * count
            )
            if is_short:
                self.unwatched.add(history.site.id)

    def slice(self, entry: LoopEntry, size: int) -> int:
        """Return how many iterations of the loop `entry` may run before the next boundary, at most `size`."""
        if entry.site.loose:
            return 1
        if (entry.history.logs or entry.site.may_log) and entry.sequence is None:
            return 1
        return size

    def point(self) -> Point:
        """Return the current point; in other threads than the program's first, the empty point (the whole run)."""
        if threading.get_ident() != self.thread:
            return Point()
        return Point((*self.cell_steps(), *(entry.step() for entry in self.running())))

    def cell_steps(self) -> tuple[Step, ...]:
        """Return the step of the cell that is running, with which points begin, or an empty tuple if there is none."""
        return (Step(CELL, self.cell - 1, self.cell),) if self.cell else ()

    def loops_and_indices(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the current point as (names of its loops, indices of their iterations), outermost first."""
        if self.loose or self.cell or threading.get_ident() != self.thread:
            point = self.point()
            return point.loops, point.indices
        stack = self.stack
        return tuple([loop.history.site.name for loop in stack]), tuple(
            [loop.now for loop in stack]
        )

    def running(self) -> list[LoopEntry]:
        """Return the loops around the current statement, outermost first."""
        if not self.loose:
            return self.stack
        frames = list(_frame_ids())
        depth = {frame: -k for k, frame in enumerate(frames)}
        loose = [entry for entry in self.loose if entry.frame in depth]
        if not loose:
            return self.stack
        # sort by depth of the frames: a generator may have been started outside the loops in which it runs now
        return sorted([*self.stack, *loose], key=lambda e: depth.get(e.frame, -len(frames)))

    def path(self, entry: LoopEntry, index: int) -> tuple[LoopStep, ...]:
        """Return the loop path of a checkpoint before iteration `index` of the loop `entry`.

        It has, for each loop from the outermost to `entry`: id, number of earlier executions in the same iteration of
        the loop around it, and iteration.
        """
        steps: list[LoopStep] = []
        for loop in self.stack:
            if loop is entry:
                break
            steps.append(LoopStep(loop.site.id, loop.ordinal, loop.now))
        return (*steps, LoopStep(entry.site.id, entry.ordinal, index))

    def roots(self, frame: FrameType) -> tuple[dict[str, Any], list[FrameType]]:
        """Return name -> root of the state, and the frames of the program's functions from the outermost to `frame`."""
        frames = project_frames(frame, self.belongs, self.loop_files)
        clear_library_references(frames, self.loop_files)
        named_roots = roots(frames, self.modules)
        if self.nest is not None:
            named_roots.update(self._sources(self.nest))
        named_roots.update(library_roots(loops=bool(self.loop_files)))
        named_roots.update((f"declared::{name}", obj) for name, obj in self.declared.items())
        return named_roots, frames

    def _sources(self, nest: LoopNest) -> dict[str, Any]:
        """Return name of the root -> generator or data loader iterator from which the outermost loop draws.

        These belong to the state.
        """
        if nest.feeds is None:
            nest.feeds = sources_of(nest.entry.source, self.is_project_module)
        return {f"loop:{n}:{nest.entry.site.id}": source for n, source in enumerate(nest.feeds)}

    def walk_anchors(
        self,
        nest: LoopNest,
        index: int,
        roots: Mapping[str, Any],
        signature: Sequence[str] | None = None,
    ) -> Anchors:
        """Collect the objects that `roots` reach now; return them as anchors, for later checkpoints of `nest`.

        `index` is the current iteration of the outermost loop; `signature`, in a replay, is that of the recorded
        anchors.
        """
        begun = perf_counter()
        nest.anchors = Anchors.walk(
            roots, project=self.is_project_module, loop_modules=LOOPS, signature=signature
        )
        nest.names, nest.encoded = tuple(roots), b""
        nest.iteration = index
        nest.seconds = perf_counter() - begun
        return nest.anchors

    def is_project_module(self, module: Any) -> bool:
        """Return True if `module`, a module or the name of a loaded one, belongs to the project."""
        if isinstance(module, str):
            module = sys.modules.get(module)
        if module is not None and module is self.modules.main:
            return True
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self.belongs(file)

    def mark_logging(self) -> None:
        """Remember that values are logged in the running loops."""
        for entry in self.running():
            entry.history.logs = True

    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:
        """Save or restore before iteration `index`; return the iteration to continue with, or None to end the loop."""
        raise AssertionError

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Bring a loop from iteration `index` to `target` without running the iterations in between.

        Return the iteration that was reached.
        """
        raise AssertionError

    def on_exhausted(self, entry: LoopEntry, index: int, frame: FrameType) -> bool:
        """React to an iterator that has no more items; return True if the loop has ended, else False."""
        raise AssertionError

    def on_early_exit(self, entry: LoopEntry, frame: FrameType) -> None:
        """React to the early exit from the loop `entry`, such as by `break`, `return` or an exception."""

    def log(self, items: Mapping[str, Any], place: bytes = b"") -> None:
        """Record `items` (name -> value) at the current point; `place` is the encoded source line of the call."""
        raise AssertionError

    def place(self, frame: FrameType) -> bytes:
        """Return the file and line that `frame` executes, encoded for records, or `b""` outside the project."""
        where = (frame.f_code.co_filename, frame.f_lineno)
        place = self._places.get(where)
        if place is None:
            file, line = where
            path = resolved(file) if self.belongs(file) else ""
            inside = path.startswith(self.root)
            place = encode_source_line(path[len(self.root) :], line) if inside else b""
            self._places[where] = place
        return place

    def record_arguments(self, values: Mapping[str, Any], origin: str = "") -> None:
        """Record hyper-parameters of the run; `origin` says where the program got them from."""
        raise AssertionError

    def note_failure(self, exc: BaseException) -> None:
        """Remember the exception that ends the program, and the loops in which it was raised."""
        frames = {id(frame) for frame, _ in traceback.walk_tb(exc.__traceback__)}
        path = takewhile(lambda frame_and_step: frame_and_step[0] in frames, self.left_early)
        self.early = EarlyEnd(exception=type(exc).__name__, path=[step for _, step in path])

    def early_end(self, code: int) -> EarlyEnd | None:
        """Return in which loops the program was when it ended with exit code `code`, or None if `code` is 0."""
        if not code:
            return None
        return self.early or EarlyEnd(path=[_step(entry) for entry in self.stack])

    def finish(self, code: int | None) -> None:
        """End the session: when this returns, everything is written. `code` is the exit code; None: `self.code`."""
        raise AssertionError


class PointEncoder:
    """Encodes the current point for records, in most cases without making a `Point`."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, ...], bytes] = {(): encode_point(Point())}

    def of(self, session: Session) -> bytes:
        """Return the current point of `session`, encoded for a record."""
        stack = session.stack
        if session.loose or session.cell or threading.get_ident() != session.thread:
            return encode_point(session.point())
        indices = [entry.now for entry in stack]
        for entry, index in zip(stack, indices, strict=True):
            if entry.label(index) is not None:
                return encode_point(session.point())
        names = tuple([entry.history.site.name for entry in stack])
        head = self._heads.get(names)
        if head is None:
            zeros = encode_point(Point(tuple(Step(name, 0) for name in names)))
            head = self._heads[names] = zeros[: zeros.rfind(b"[") + 1]
        if not indices:
            return head
        return b"%b%b]," % (head, ",".join(map(str, indices)).encode())


def _step(entry: LoopEntry) -> tuple[str, int, int]:
    return (entry.site.id, entry.ordinal, entry.now)


def _frame_ids() -> Iterator[int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield id(frame)
        frame = frame.f_back
