"""Whether the work tree has another source than a run that is resumed.

What a run read: whether it is still there, and still the same.

What the source of a run imports: whether it is still installed here.

Say why no probe logs a name: its file lies outside the project, or does not parse.

Make a run ready to be asked: its probes, its facts, and what it lacks of what is asked for.

Whether the work tree has another source than a run that is resumed.
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from rearview.backfill.calibration import Machines
from rearview.backfill.coverage import Asked, Chosen, narrowed, uncompared, within
from rearview.backfill.propagation import WORKTREE, Probing
from rearview.backfill.segments import Prepared, as_run, run_facts
from rearview.backfill.shared_imports import lead_of
from rearview.config import Settings
from rearview.errors import RearviewError, UsageError
from rearview.model import Run, Status
from rearview.model.run import NOTEBOOK, is_notebook, name_of
from rearview.plan.facts import At, LoopFacts, parse_at
from rearview.source.log_calls import names_logged
from rearview.source.notebooks import as_programs, in_cells_of, with_text
from rearview.source.probes.probe import Probes, sameness
from rearview.source.text import try_parse
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.files import fingerprint
from rearview.store.project import Project, repository_top
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions


def _recorded(run: Run, root: Path, kept: Collection[str]) -> Iterator[tuple[Path, list[object]]]:
    for then, about in run.facts.get("end", {}).get("inputs", {}).items():
        path = Path(run.now(then, str(root)))
        if not path.is_relative_to(root) or str(path.relative_to(root)) not in kept:
            yield path, list(about)


def gone(run: Run, root: Path, kept: Collection[str] = ()) -> str:
    """Return why a run cannot be replayed for want of an input; empty if all are there.

    Files below `root` that were `kept` with the source are there in any case, as they were.
    """
    lost = [path for path, _ in _recorded(run, root, kept) if not path.exists()]
    if not lost:
        return ""
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"its input {lost[0]}{more} is gone; bring it back"


def changed(run: Run, root: Path, kept: Collection[str] = ()) -> list[str]:
    """Return the inputs of a run that are no longer what it read, one sentence each."""
    found = []
    for path, about in _recorded(run, root, kept):
        try:
            now = fingerprint(path)
        except OSError:
            continue  # `gone` says so
        if list(now) != about and now[2] != about[2]:
            found.append(f"{path} is not what run {run.id} read")
    return found


def lost(source: Mapping[str, bytes], ran: Collection[str]) -> str:
    """Return why a run cannot be replayed for want of a package; empty if nothing is missing.

    `source` are the files of its version, `ran` those of them that the run executed. Only what is
    imported in any case counts: not in a function, not under `try`. A program that changes where
    modules are looked for is left to find them itself.
    """
    files = [source[path] for path in ran if path in source]
    if any(b"sys.path" in text or b"addsitedir" in text for text in files):
        return ""
    own = {part.removesuffix(".py") for path in source for part in PurePosixPath(path).parts}
    wanted = {name for text in files for name in _imported(text)} - own
    gone = sorted(name for name in wanted if not _there(name))
    if not gone:
        return ""
    them = "which is" if len(gone) == 1 else "which are"
    return (
        f"it imports {', '.join(gone)}, {them} not installed here any more; install what it had "
        "(`pip install …`), or replay it in the environment it ran in"
    )


@lru_cache(maxsize=512)
def _imported(text: bytes) -> frozenset[str]:
    """Return the packages that a file imports as soon as it is executed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


@lru_cache(maxsize=512)
def _there(name: str) -> bool:
    if name in sys.builtin_module_names or name in sys.stdlib_module_names or name in sys.modules:
        return True
    with contextlib.suppress(ImportError, ValueError):
        # the second knows of editable installations; neither imports anything
        return PathFinder.find_spec(name) is not None or find_spec(name) is not None
    return False


_MOST = 5_000
"""Python files of the repository that are looked into."""
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def unwatched(name: str, root: Path) -> str:
    """Return a sentence on a file above the project that logs `name`; empty if there is none.

    Looked at is the git repository that the project lies in.
    """
    top = repository_top(root.resolve())
    if top is None or top == root.resolve():
        return ""
    for path in _files(top, root.resolve()):
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError):
            continue
        if name in text and name in names_logged({path.name: text}):
            return (
                f" {path} logs it, but lies outside the project {root}, of which only files below "
                f"it are recorded: set REARVIEW_ROOT={top} and record a run anew."
            )
    return ""


def unparsed(name: str, files: Mapping[str, str]) -> str:
    """Return a sentence on a file that mentions `name` and does not parse; empty if there is none."""
    for path, text in files.items():
        if name in text:
            reason = try_parse(text)
            if isinstance(reason, str):
                return f" {path} mentions it, but {reason}: correct that first."
    return ""


def _files(top: Path, root: Path) -> Iterator[Path]:
    count = 0
    for folder, folders, names in os.walk(top):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and here / name != root
            and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > _MOST:
                    return
                yield here / name


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the past."""

    names: tuple[str, ...]
    runs: tuple[Run, ...]
    where: str | None = None
    at: str | None = None
    workers: int | None = None
    budget: float | None = None
    on: str = "local"
    gpus: float | None = None
    ordered: bool = False
    """The runs are named in the order in which they are wanted."""
    again: bool = False
    """What is there and could not be proved is to run again."""


@dataclass
class Preparing:
    """Makes runs of one project ready."""

    project: Project
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints
    machines: Machines
    _sameness: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(
        self,
        probing: Probing,
        run: Run,
        names: tuple[str, ...],
        asked: Question,
        only: Chosen | None = None,
    ) -> Prepared:
        """Return a run with what it lacks of `names`, in the iterations that are chosen."""
        continued = run.facts.get("continued")
        if continued:
            raise UsageError(
                f"Run {run.id} went on with another source at {continued[0]['point'] or 'its end'}: "
                "no one source repeats it, so it is not replayed. What it recorded is in the table.",
                slug="two-sources",
            )
        probes = probing.of(run, names)
        unknown = [name for name in names if not probes.of(name)]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)}: nothing in the work tree logs this beyond what run "
                f"{run.id} logged. Add a statement such as rearview.log({unknown[0]!r}, value)."
                + unparsed(unknown[0], probing.edited)
                + unwatched(unknown[0], self.project.root),
                slug="no-probe",
            )
        probes = as_run(probes, run)
        meant = tuple(probe for probe in probes.probes if probe.names)
        old = self.versions.files(run.version)
        version, files = self._derived(run, dict(probes.source), old)
        facts = run_facts(
            run,
            version,
            self.checkpoints.of(run.id),
            blocked=gone(*self.kept(run)) or self._lost(run, old),
            machine=self.machines.of(run),
        )
        limits = tuple(parse_at(asked.at)) if asked.at else ()
        alone = run.facts.get("end", {}).get("main", {}).get("alone", True)
        loop = facts.loops[0] if facts.loops else None
        main = loop.name if loop is not None and alone else None
        about = Asked(
            version,
            main=main,
            count=len(loop.seconds) if loop is not None else 0,
            at=limits,
            settled=math.inf if asked.again else self._settled(run),
            within=within(only, probes, names, facts.loops) if only and main else None,
        )
        same = partial(self._same, version, probes)
        replays = self.runs.replays(run.id)
        picked = _picked(limits, loop, only)
        unproved: tuple[str, ...] = ()
        if any(map(uncompared, replays)) and about.settled < math.inf:
            strictly = replace(about, settled=math.inf)
            unproved = tuple(
                name
                for name in names
                if narrowed(about, replays, probes, (name,), same, picked)
                != narrowed(strictly, replays, probes, (name,), same, picked)
            )
        names, missing = narrowed(about, replays, probes, names, same, picked)
        if names:
            meant = tuple(dict.fromkeys(probe for name in names for probe in probes.of(name)))
        if only is not None:
            missing = frozenset(only if missing is None else only.keys() & missing)
        told = {"limits": about.limits, "same": {name: same(name) for name in names}}
        return Prepared(
            *(run, version, probes, meant, names, facts, about, missing, limits, told),
            known=frozenset(replay.id for replay in replays if replay.ended is not None),
            unproved=unproved,
            lead=lead_of(run, files, run.home(os.path.realpath(self.project.root))),
        )

    def _settled(self, run: Run) -> float:
        """Return when a run recorded its last, as far as it is not going on."""
        if run.status is Status.RUNNING or run.ended is not None:
            return math.inf if run.ended is None else run.ended
        try:
            return (self.runs.folder(run.id) / "heartbeat").stat().st_mtime
        except OSError:
            return math.inf

    def _same(self, version: str, probes: Probes, name: str) -> str:
        """Return what tells one way of logging a name from another, once per source."""
        known = self._sameness.get((version, name))
        if known is None:
            known = self._sameness[version, name] = sameness(probes, name)
        return known

    def _lost(self, run: Run, files: Mapping[str, bytes]) -> str:
        return lost(as_programs(files), run.facts.get("end", {}).get("files") or [run.script])

    def _derived(
        self, run: Run, source: dict[str, str], old: Mapping[str, bytes]
    ) -> tuple[str, Mapping[str, bytes]]:
        """Return the version in which a run's probes stand, and its files."""
        recorded = as_programs(old)
        changes = {}
        for path, text in source.items():
            if recorded.get(path) == text.encode():
                continue
            home = path.removesuffix(".py")
            if is_notebook(home) and home in old:
                divided = in_cells_of(recorded[path].decode(), text, home)
                changes[home] = with_text(old[home], divided, home)
            else:
                changes[path] = text.encode()
        if not changes:
            return run.version, old
        return self.versions.derive(run.version, changes), {**old, **changes}

    def kept(self, run: Run) -> tuple[Run, Path, set[str]]:
        """Return a run with the project's folder, and the files kept with the run's source."""
        kept = set(self.versions.hashes(run.version)) if run.version else set()
        return run, self.project.root.resolve(), kept


def _picked(
    limits: Sequence[At], loop: LoopFacts | None, only: Chosen | None
) -> frozenset[int] | None:
    """Return the iterations of the main loop that are asked for; None: all."""
    picked = None if only is None else frozenset(only)
    for at in limits:
        if loop is not None and at.loop == name_of(loop.name):
            meant = frozenset(at.indices(len(loop.seconds), loop.values))
            # of a number that it does not have, the planner says so
            picked = meant if picked is None else picked & meant
            return picked if meant else None
    return picked


def source_of(project: Project, run: Run) -> tuple[str, ...]:
    """Like `differing_source`, for a project."""
    return differing_source(Versions(project, Settings.read(project.store)), run)


def edited_source(versions: Versions, run: Run) -> dict[str, bytes]:
    """Return the Python files of the work tree that are not as a run has them."""
    if not run.source:
        return {}
    old, new = versions.files(run.source), versions.files(versions.save(WORKTREE))
    return {
        path: text
        for path, text in new.items()
        if path.endswith((".py", NOTEBOOK)) and old.get(path) != text
    }


def differing_source(versions: Versions, run: Run) -> tuple[str, ...]:
    """Return one sentence if a run that is resumed has another source than the work tree."""
    try:
        edited = sorted(edited_source(versions, run))
    except RearviewError:  # the work tree cannot be kept; the run goes on all the same
        return ()
    if not edited:
        return ()
    more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
    text = (
        f"the run goes on with the source that it ran; {edited[0]}{more} differs in the work tree"
    )
    return (f"{text} (`rearview resume --source worktree` goes on with that)",)
