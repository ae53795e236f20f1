"""Replay an execution tree by the steps of a planned order: compute cells; keep, restore and evict states.

The steps of the order are divided into `ReplayPath`s: each begins with the restore of a state and ends before the
next restore. A worker takes one path at a time and executes its steps in one cell process. States are kept and
evicted in the planned order, also by several workers, so a path may have to wait for earlier paths.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.multiversion.cell_process_control import CellHandle, CellProcesses, ProcessDied
from rearview.multiversion.execution_tree import CellFacts, ExecutionTree, Measurements
from rearview.multiversion.kept_states import (
    ForkedStates,
    KeptState,
    StateStore,
    StoredStates,
    WorkPlace,
)
from rearview.multiversion.study import StudyVersion
from rearview.multiversion.work_folder import WorkFolders, can_mount, environment_for, remove_folder
from rearview.plan.versions.best_order import Order, ReplayPath, paths_of
from rearview.plan.versions.tree import EXISTING, START, CacheLevel, Do, ReplayStep

UNMEASURED_LIMIT = 3600.0
"""Time limit in seconds for a cell that was never measured."""
LEAST_LIMIT, LIMIT_FACTOR = 120.0, 20.0
"""The time limit of a measured cell is LIMIT_FACTOR times its measured seconds, at least LEAST_LIMIT seconds."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of running the cell of one node of the execution tree."""

    ended: str
    """`done`, `exit` (the program ended itself), `failed`, or `stopped` (the process died, or hit the time limit)."""
    outputs: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    why: str = ""
    version: str = ""
    """Name of the version for which the cell was computed."""
    reads: tuple[str, ...] = ()
    """Paths of the project's files that the cell read."""
    expected: bool = False
    """Whether the cell raised the same exception as in the author's run, in which later cells still ran."""

    @property
    def continues(self) -> bool:
        """Whether the cells after this one can run."""
        return self.ended == "done" or self.expected


@dataclass(frozen=True, slots=True)
class ReplayEvent:
    """One action of the replay, reported at once to a live view."""

    action: str
    """`compute` (a cell starts), `computed` (a cell has ended), `keep`, `restore`, `evict` or `note`."""
    node: int = START
    text: str = ""
    done_seconds: float = 0.0
    """Planned seconds of the cells computed so far."""
    total_seconds: float = 0.0
    """Planned seconds of the whole replay."""


@dataclass(slots=True)
class ReplayResult:
    """The results of all cells of an execution tree, and the costs of the replay."""

    results: dict[int, CellResult] = field(default_factory=dict)
    seconds: float = 0.0
    computed: int = 0
    """Number of times that a cell was run; a cell that was run twice counts twice."""
    checkpoints: int = 0
    restores: int = 0
    peak: int = 0
    """Largest size in bytes of all kept states together, as measured during the replay."""
    notes: list[str] = field(default_factory=list)

    def add(self, result: ReplayResult) -> None:
        """Add the costs and notes of another replay of the same study."""
        self.seconds += result.seconds
        self.computed += result.computed
        self.checkpoints += result.checkpoints
        self.restores += result.restores
        self.peak = max(self.peak, result.peak)
        self.notes += [note for note in result.notes if note not in self.notes]


class TreeReplay:
    """A replay of one execution tree: executes the steps of a planned order with one or more workers."""

    def __init__(
        self,
        tree: ExecutionTree,
        order: Order,
        levels: tuple[CacheLevel, ...],
        *,
        programs: Mapping[str, bytes],
        measurements: Measurements,
        workers: int = 1,
        python: str = sys.executable,
        environment: Mapping[str, str],
        store: Path | None = None,
        author_folder: Path | None = None,
        contents: Path | None = None,
        cell_limit: float | None = None,
        backend: str = "auto",
        names: Mapping[int, str] | None = None,
        keep_stored: bool = False,
        on_event: Callable[[ReplayEvent], None] = lambda _: None,
    ) -> None:
        self.tree = tree
        self.order = order
        self.levels = levels
        self.programs = programs
        self.measurements = measurements
        self.python = python
        self.environment = environment
        self.store = store
        self.author_folder = author_folder
        """The author's folder, in which no cell may change files; None for a study package, which comes without one."""
        self.contents = contents
        """Temporary folder with the contents of a study package; removed if this process is killed."""
        self.cell_limit = cell_limit
        self.backend = backend
        self.names = names or {}
        """Node -> name of the stored state after the cell of the node."""
        self.keep_stored = keep_stored
        self.result = ReplayResult()
        self._versions = {version.name: version for version in tree.study.versions}
        self._on_event = on_event
        self._lock = threading.Condition()
        self._kept_states: dict[tuple[int, int], StateStore] = {}
        """(node, index in `levels`) of each kept state -> the store that keeps this state."""
        self._cache_changes = 0
        """Number of steps executed so far that keep or evict a state ("cache changes"), always in the planned order."""
        self._done_seconds = 0.0
        self._failure: BaseException | None = None
        self._mounts = workers > 1 and can_mount()
        if workers > 1 and not self._mounts:
            self._note(
                "one worker is used: on this system a process cannot mount folders that only it sees"
            )
        self.workers = workers if self._mounts else 1

    # -- the whole replay --

    def run(self) -> ReplayResult:
        """Execute all steps of the order; return the results of the cells and the costs of the replay."""
        if not self.order.steps:
            return self.result
        begin = time.monotonic()
        notebook = any(version.notebook for version in self.tree.study.versions)
        scratch = Path(tempfile.mkdtemp(prefix="rearview-replay-"))
        self._folders = WorkFolders(scratch, self.tree.study)
        try:
            environment = environment_for(self.environment, self._folders, notebook=notebook)
            with CellProcesses(
                scratch,
                environment,
                python=self.python,
                notebook=notebook,
                author_folder=self.author_folder,
                folders=[scratch, *([self.contents] if self.contents else [])],
            ) as self._processes:
                self._forked = ForkedStates(self._processes, self._folders)
                self._stored = StoredStates(
                    self._processes, self._folders, self.store or scratch / "stored"
                )
                for node, cell in enumerate(self.tree.tree.cells):
                    self._stored.set_name(node, self.names.get(node, cell.lineage))
                    if cell.has_checkpoint:
                        self._kept_states[node, EXISTING] = self._stored
                self._base_memory = self._processes.first.memory()[1]
                self._run_paths()
        finally:
            self._folders.close()
            remove_folder(scratch)
        self.result.seconds = time.monotonic() - begin
        return self.result

    def _run_paths(self) -> None:
        paths = paths_of(self.order.steps)
        self._waiting = list(range(len(paths)))
        self._taken_paths: set[int] = set()
        """Indices of paths that a worker has taken without having restored the first state of the path yet."""
        self._paths = paths
        self._changes_before: dict[int, int] = {}
        """Index of a path -> number of cache changes that earlier paths make."""
        self._available: dict[int, int] = {}
        """Index of a path -> number of cache changes after which the state that the path restores is available."""
        checkpoint_numbers: dict[tuple[int, int], int] = {}
        changes = 0
        for i, path in enumerate(paths):
            self._changes_before[i] = changes
            self._available[i] = checkpoint_numbers.get(path.base, 0)
            for step in path.steps:
                if step.do in {Do.CHECKPOINT, Do.EVICT}:
                    changes += 1
                    if step.do is Do.CHECKPOINT:
                        checkpoint_numbers[step.node, step.level] = changes
        threads = [
            threading.Thread(target=self._worker, args=(number,), name=f"rearview-worker-{number}")
            for number in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException as exc:  # Ctrl-C: end the cell processes, and so the worker threads
            self._fail(exc)
            self._processes.close()
            for thread in threads:
                thread.join()
            raise
        if self._failure is not None:
            raise self._failure

    def _fail(self, exc: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or exc
            self._lock.notify_all()

    def _worker(self, number: int) -> None:
        try:
            while (index := self._next_path()) is not None:
                self._run_path(index, number)
        except BaseException as exc:
            self._fail(exc)

    def _next_path(self) -> int | None:
        """Wait until a path can start and return its index; return None if no path is left or a worker has failed."""
        with self._lock:
            while self._waiting and self._failure is None:
                blocked = False
                bases: set[tuple[int, int]] = set()
                for index in self._waiting:
                    path = self._paths[index]
                    changes = path.changes_cache
                    # a path may evict a state only after all earlier paths have restored this state
                    evicted_bases = bases.intersection(_evicted_states(path))
                    if not ((blocked or evicted_bases) and changes) and (
                        self._cache_changes >= self._available[index]
                    ):
                        self._waiting.remove(index)
                        self._taken_paths.add(index)
                        return index
                    blocked = blocked or changes
                    bases.add(path.base)
                self._lock.wait()
            return None

    # -- one path --

    def _work_place(self, number: int) -> WorkPlace:
        if not self._mounts:
            return WorkPlace(self._folders.work, None)
        return WorkPlace(self._folders.scratch / f"work-{number}", self._folders.work)

    def _run_path(self, index: int, number: int) -> None:
        path = self._paths[index]
        place = self._work_place(number)
        version = self._version_of(path)
        change = self._changes_before[index]
        process: CellHandle | None = None
        can_continue = self._can_run(path.steps[0].child)
        try:
            for position, step in enumerate(path.steps):
                if step.do is Do.RESTORE and position == 0:
                    if can_continue:
                        process, can_continue = self._restored_or_stopped(step, version, place)
                    self._mark_started(index)
                elif step.do is Do.COMPUTE:
                    if can_continue and process is not None:
                        can_continue = self._compute(step.node, version, process)
                elif step.do in {Do.CHECKPOINT, Do.EVICT}:
                    self._await_cache_changes(change)
                    if step.do is Do.EVICT:
                        self._await_restores(index, (step.node, step.level))
                        self._evict(step.node, step.level)
                    elif can_continue and process is not None:
                        process = self._keep(step.node, step.level, process, place)
                    change += 1
                    self._record_cache_change(change)
        finally:
            self._mark_started(index)
            if process is not None:
                process.kill()
            self._evict_excess()

    def _mark_started(self, index: int) -> None:
        with self._lock:
            self._taken_paths.discard(index)
            self._lock.notify_all()

    def _await_restores(self, index: int, base: tuple[int, int]) -> None:
        """Wait until each earlier path than `index` that begins with the state `base` has restored this state."""
        with self._lock:
            while self._failure is None and any(
                earlier < index and self._paths[earlier].base == base
                for earlier in self._taken_paths
            ):
                self._lock.wait()

    def _version_of(self, path: ReplayPath) -> StudyVersion:
        end = [step.node for step in path.steps if step.do is Do.COMPUTE][-1]
        return self._versions[self.tree.nodes[end].versions[0]]

    def _can_run(self, node: int) -> bool:
        """Return True if no cell before `node` on the path from the root of the tree has ended the program."""
        ancestor = self.tree.tree.parent[node]
        while ancestor != START:
            result = self.result.results.get(ancestor)
            if result is not None and not result.continues:
                return False
            ancestor = self.tree.tree.parent[ancestor]
        return True

    def _await_cache_changes(self, change: int) -> None:
        with self._lock:
            while self._cache_changes < change and self._failure is None:
                self._lock.wait()
            if self._failure is not None:
                raise self._failure

    def _record_cache_change(self, change: int) -> None:
        with self._lock:
            self._cache_changes = max(self._cache_changes, change)
            self._lock.notify_all()

    def _restored_or_stopped(
        self, step: ReplayStep, version: StudyVersion, place: WorkPlace
    ) -> tuple[CellHandle | None, bool]:
        """Like `_restored`, but if the process dies, record the first cell after the state as stopped."""
        try:
            return self._restored(step, version, place)
        except ProcessDied as exc:
            with self._lock:
                self.result.results.setdefault(step.child, CellResult("stopped", why=str(exc)))
            return None, False

    def _restored(
        self, step: ReplayStep, version: StudyVersion, place: WorkPlace
    ) -> tuple[CellHandle | None, bool]:
        """Return (process with the state that `step` restores, whether the next cells can run).

        If the state cannot be restored, restore the nearest earlier state and compute the cells after it again.
        """
        node = step.node
        while node != START:
            for level in (step.level, EXISTING, *range(len(self.levels))):
                states = self._kept_states.get((node, level))
                if states is None:
                    continue
                self._report("restore", node)
                process = states.restore(node, version, place)
                if isinstance(process, CellHandle):
                    self.result.restores += 1
                    return self._computed_up_to(process, node, step.node, version, place)
                self._note(f"cell {self._label(node)} could not be restored: {process}")
                self._kept_states.pop((node, level), None)
            node = self.tree.tree.parent[node]
        process = self._process_at_start(version, place)
        return self._computed_up_to(process, START, step.node, version, place, switch=False)

    def _process_at_start(self, version: StudyVersion, place: WorkPlace) -> CellHandle:
        remove_folder(place.folder)
        self._folders.fill(version, place.folder, self.programs.get(version.name))
        process = self._processes.start(version, place.folder, place.mount)
        self._switch(process, version)
        return process

    def _computed_up_to(
        self,
        process: CellHandle,
        node: int,
        target: int,
        version: StudyVersion,
        place: WorkPlace,
        *,
        switch: bool = True,
    ) -> tuple[CellHandle | None, bool]:
        """Compute in `process`, which has the state after `node`, the cells up to and including `target`.

        With `switch`, set up the process and its work folder for `version` first. Return (process, whether the next
        cells can run).
        """
        if switch:
            previous_version = self._versions[self.tree.nodes[node].versions[0]]
            self._folders.switch(previous_version, version, place.folder)
            program = self.programs.get(version.name)
            if program is not None:
                self._folders.exchange_program(previous_version, version, program, place.folder)
            self._switch(process, version)
        for next_node in self.tree.tree.path(node, target) if target != START else ():
            if not self._compute(next_node, version, process):
                return process, False
        return process, True

    def _switch(self, process: CellHandle, version: StudyVersion) -> None:
        process.ask(
            {
                "do": "switch",
                "program": version.program,
                "argv": list(version.argv),
                "environment": dict(version.environment),
            }
        )

    def _compute(self, node: int, version: StudyVersion, process: CellHandle) -> bool:
        """Run the cell of `node` in `process` and record its result; return True if the next cells can run."""
        cell = version.cells[self.tree.nodes[node].number - 1]
        self._report("compute", node)
        planned = self.tree.tree.cells[node].seconds
        limit = self.cell_limit
        if limit is None:
            measured = self.tree.nodes[node].measured
            limit = max(LEAST_LIMIT, LIMIT_FACTOR * planned) if measured else UNMEASURED_LIMIT
        try:
            answer = process.ask(
                {"do": "cell", "text": cell.text, "line": _first_line(version, node, self.tree)},
                seconds=limit,
            )
            ended, outputs = str(answer.get("ended", "stopped")), tuple(answer.get("outputs", ()))
            result = CellResult(
                ended,
                outputs,
                float(answer.get("seconds", 0.0)),
                str(answer.get("refused", "")),
                version.name,
                tuple(sorted(answer.get("reads", ()))),
                expected=ended == "failed" and self._fails_with(node, outputs),
            )
        except ProcessDied as exc:
            result, answer = CellResult("stopped", why=str(exc)), {}
        with self._lock:
            self.result.computed += 1
            self._done_seconds += planned
            self.result.results.setdefault(node, result)
        if result.continues:
            size = max(1 << 20, process.memory()[1] - self._base_memory)
            complete = bool(answer.get("complete"))
            facts = CellFacts(result.seconds, size, result.reads, complete)
            with self._lock:
                self.measurements.add(self.tree.nodes[node].chain, facts)
        self._report("computed", node, result.why or result.ended)
        return result.continues

    def _fails_with(self, node: int, outputs: tuple[dict[str, Any], ...]) -> bool:
        """Return True if the author's notebook shows the error in `outputs` at this cell, or allows errors in it."""
        name = next((str(o.get("ename")) for o in outputs if o.get("output_type") == "error"), "")
        tree_node = self.tree.nodes[node]
        versions = [self._versions[version] for version in tree_node.versions]
        return any(v.notebook and v.cells[tree_node.number - 1].fails_with(name) for v in versions)

    # -- kept states --

    def _keep(self, node: int, level: int, process: CellHandle, place: WorkPlace) -> CellHandle:
        """Keep the state after `node` in the cache `levels[level]`; return the process in which the next cells run.

        In memory, a state is kept as a forked process if possible, else as a file; on disk, always as a file.
        """
        room = self.levels[level].room
        memory = self.levels[level].name == "memory"
        stores: list[StateStore] = [self._forked, self._stored] if memory else [self._stored]
        if self.backend == "stored":
            stores = [self._stored]
        for states in stores:
            kept_state = states.keep(node, process, place)
            if not isinstance(kept_state, KeptState):
                self._note(
                    f"cell {self._label(node)} cannot be {_participle(states)}: {kept_state}"
                )
                continue
            process = kept_state.process
            with self._lock:
                self._kept_states[node, level] = states
                self.result.checkpoints += 1
                used = states.used()
                self.result.peak = max(self.result.peak, used)
            self._report("keep", node, f"{used} bytes kept")
            if used > room:
                self._note(
                    f"cell {self._label(node)} was not kept: the kept states would take "
                    f"{used / 1e6:.0f} MB of {room / 1e6:.0f} MB"
                )
                self._evict(node, level)
            break
        return process

    def _evict(self, node: int, level: int) -> None:
        with self._lock:
            states = self._kept_states.pop((node, level), None)
        if states is not None:
            self._report("evict", node)
            if not (self.keep_stored and states is self._stored):
                states.evict(node)

    def _evict_excess(self) -> None:
        """Evict states that are kept as forked processes until these processes take no more memory than allowed.

        A waiting process grows: a memory page that it shares is copied when another process writes to it.
        """
        memory = [i for i, level in enumerate(self.levels) if level.name == "memory"]
        if not memory:
            return
        while True:
            with self._lock:
                forked = [
                    key
                    for key, states in self._kept_states.items()
                    if key[1] in memory and states is self._forked
                ]
                used = self._forked.used() if forked else 0
                self.result.peak = max(self.result.peak, used)
                if used <= self.levels[memory[0]].room or not forked:
                    return
                # evict the state whose recomputation is cheapest
                cheapest = min(forked, key=lambda key: self.tree.tree.reach[key[0]])
            self._note(f"cell {self._label(cheapest[0])} was evicted: its process has grown")
            self._evict(*cheapest)

    # -- notes and events --

    def _label(self, node: int) -> str:
        tree_node = self.tree.nodes[node]
        return f"{tree_node.number} of {tree_node.versions[0]}"

    def _note(self, text: str) -> None:
        with self._lock:
            if text not in self.result.notes:
                self.result.notes.append(text)
        self._on_event(ReplayEvent("note", text=text))

    def _report(self, event: str, node: int, text: str = "") -> None:
        self._on_event(ReplayEvent(event, node, text, self._done_seconds, self.order.seconds))


def _evicted_states(path: ReplayPath) -> list[tuple[int, int]]:
    return [(step.node, step.level) for step in path.steps if step.do is Do.EVICT]


def _participle(states: StateStore) -> str:
    return "parked" if isinstance(states, ForkedStates) else "stored"


def _first_line(version: StudyVersion, node: int, tree: ExecutionTree) -> int:
    """Return the line of the script, from 1, on which the cell of `node` starts in `version`."""
    number = tree.nodes[node].number
    return 1 + sum(cell.text.count("\n") for cell in version.cells[: number - 1])
