"""How to start recording, from the folder where the user stands.

How to start a process that runs the user's program with a session around it.

How to start recording, from the folder where the user stands.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rearview.config import Settings
from rearview.errors import StoreError, UsageError
from rearview.model import Run, Status
from rearview.model.plan import LAUNCHER, VARIABLE, Control
from rearview.model.secrets import filled, redact, redact_words
from rearview.remote.base import open_remote
from rearview.store.files import make_folder
from rearview.store.project import FOLDER, Project, publish, root_of
from rearview.store.recorded_inputs import environment_differences, environment_of
from rearview.store.runs import Runs
from rearview.store.sync import command_key, pull, waiting
from rearview.store.trust import check_trust
from rearview.store.versions.versions import Versions

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has the C library ask for huge pages: training is faster with them, and so is watching memory."""


@dataclass(frozen=True, slots=True)
class Start:
    """A command line, its environment and its folder; whoever has it may start it."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    kept: Path | None = None
    """Folder of the run, where it is known before the start."""
    notes: tuple[str, ...] = ()
    """What is to be known before it starts: variables that differ, which source runs."""


def arguments(run: Run, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the command line of a run, with the secrets that were not stored put in from `env`."""
    words, lacking = filled(run.argv, env)
    if lacking:
        raise _secret_needed(run, lacking)
    return words


def given_of(run: Run, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what was given with `--arg`, with the secrets that were not stored put in from `env`."""
    names = list(run.facts.get("given", {}))
    words, lacking = filled([f"{name}={run.facts['given'][name]}" for name in names], env)
    if lacking:
        raise _secret_needed(run, lacking)
    return dict(zip(names, (word.partition("=")[2] for word in words), strict=True))


def _secret_needed(run: Run, lacking: Sequence[str]) -> UsageError:
    return UsageError(
        f"Run {run.id} was started with a secret that is not stored: "
        f"{' '.join((run.script, *run.argv))}. Give it again in the environment, as "
        f"{', '.join(lacking)}.",
        slug="secret-needed",
    )


def start(
    control: Control, env: Mapping[str, str], folder: Path, *, hash_seed: str | None = None
) -> Start:
    """Return how to start what `control` says, in a given environment.

    Python's hashes must be the same when the run is replayed, so their seed is chosen here: one
    for each project, so that replays of its runs can share a start.
    """
    seed = hash_seed or env.get("PYTHONHASHSEED")
    if not seed or seed == "random":
        seed = str(zlib.crc32(os.fsencode(control.root)))
    command = (sys.executable, LAUNCHER)
    lent = _lent(control, env)
    told = msgspec.json.encode(msgspec.structs.replace(control, lent=lent)).decode()
    return Start(command, {**env, **lent, VARIABLE: told, "PYTHONHASHSEED": seed}, folder)


def _lent(control: Control, env: Mapping[str, str]) -> dict[str, str]:
    """Return what the process is started with and the program is not to see."""
    settings = Settings.read(Path(control.root) / FOLDER, env).changed(control.settings)
    # what the user has chosen for the C library stays
    return HUGE_PAGES if settings.huge_pages and not HUGE_PAGES.keys() & env.keys() else {}


@dataclass(frozen=True, slots=True)
class Preempt:
    """How a run may be stopped and gone on with."""

    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    remote: str | None = None
    retries: int = 1000
    exit_every: float | None = None
    """Seconds after which it stops without being asked."""
    waits: bool = False
    """It may be a while until it is started: the id of the run is reserved now."""


def begin(
    target: str,
    args: Sequence[str],
    *,
    module: bool = False,
    given: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    preempt: Preempt | None = None,
) -> Start:
    """Return how to start recording a script or module from the current folder.

    With `preempt`, a run of the same command that was stopped is gone on with instead.
    """
    here = Path.cwd()
    root = Path(os.environ["REARVIEW_ROOT"]) if "REARVIEW_ROOT" in os.environ else here
    if not module:
        script = Path(target)
        if not script.is_file():
            raise UsageError(
                f"There is no script {target} in {here}. Give the path of a Python file, or "
                "`-m module`.",
                slug="no-script",
            )
        root = root_of(script)
        if root.resolve() not in script.resolve().parents:
            raise UsageError(
                f"{target} lies outside the project {root}, of which only files below it are "
                "watched. Set REARVIEW_ROOT to a folder above the script, or unset it.",
                slug="outside-project",
            )
    control = Control(
        root=str(root.resolve()),
        target=target,
        module=module,
        args=tuple(args),
        given=dict(given or {}),
        settings=dict(settings or {}),
    )
    if preempt is None:
        return start(control, os.environ, here)
    return _continued(control, preempt, here)


def _continued(control: Control, preempt: Preempt, here: Path) -> Start:
    try:
        project = Project.create(Path(control.root))
    except StoreError:
        return start(control, os.environ, here)  # which says that nothing is recorded
    control = msgspec.structs.replace(
        control, signals=preempt.signals, remote=preempt.remote, exit_every=preempt.exit_every
    )
    pulled = None
    if preempt.remote is not None:
        pulled = pull(
            project, open_remote(preempt.remote), command_key(control.target, control.args)
        )
    runs = Runs(project)
    run = stopped(runs.all(), control)
    if run is None and preempt.waits:
        control = msgspec.structs.replace(control, run=_reserved(project, control))
        begun = start(control, os.environ, here)
        return replace(begun, kept=runs.folder(str(control.run)))
    if run is None:
        return start(control, os.environ, here)
    if int(run.facts.get("attempts", 0)) >= preempt.retries:
        raise UsageError(
            f"Run {run.id} was gone on with {preempt.retries} times and never ended. Look at its "
            "output; raise --retries to let it try again.",
            slug="too-many-attempts",
        )
    if run.id != pulled:  # who names a remote trusts those who can write to it
        check_trust(project.store, Settings.read(project.store).trust, "Going on with a run")
    control = msgspec.structs.replace(control, resume=run.id)
    env = environment_of(run, runs.folder(run.id), os.environ, resumes=True)
    begun = start(control, env, here, hash_seed=str(run.facts["hash_seed"]))
    folder = runs.folder(run.id)
    from rearview.backfill.prepare import source_of  # a run that is not resumed needs none of it

    notes = (*source_of(project, run), *differing_environment(folder))
    return replace(begun, kept=folder, notes=notes)


def differing_environment(folder: Path) -> tuple[str, ...]:
    """Return one sentence on the variables that differ for a run that is resumed here, or none."""
    found = environment_differences(folder, os.environ, resumes=True)
    return (f"environment variables differ: {'; '.join(found)}",) if found else ()


def fetch(remote: str, which: str = "latest") -> tuple[Run, tuple[str, ...]]:
    """Bring a run from a remote into the project around the current folder.

    Return it, and the source files that were missing here and are now written.
    """
    project = Project.create(_root())
    place = open_remote(remote)
    keys = waiting(place)
    fits = [
        run for run in keys if which == "latest" or run.startswith(which) or run.endswith(which)
    ]
    if not fits or (which != "latest" and len(fits) > 1):
        known = ", ".join(list(keys)[-5:]) or "none"
        raise UsageError(
            f"There is no single run {which!r} at {redact(remote)}. It holds: {known}.",
            slug="no-run",
        )
    pull(project, place, keys[fits[-1]])
    run = Runs(project).get(fits[-1])
    return run, _write_missing(project, run)


def _root() -> Path:
    if "REARVIEW_ROOT" in os.environ:
        return Path(os.environ["REARVIEW_ROOT"])
    found = Project.find(Path.cwd())
    return found.root if found is not None else Path.cwd()


def _write_missing(project: Project, run: Run) -> tuple[str, ...]:
    """Write the source files of a run that are not in the project's folder; return their names."""
    if not run.version:
        return ()
    written = []
    for name, data in Versions(project, Settings()).files(run.version).items():
        file = project.root / name
        if os.path.lexists(file) or ".." in Path(name).parts or ".git" in Path(name).parts:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        written.append(name)
    return tuple(written)


def _reserved(project: Project, control: Control) -> str:
    """Return the id of a run that was asked for before and has not begun, or a new one."""
    key = command_key(f"{int(control.module)}{control.target}", control.args)
    file = project.cache / "asked" / Path(key).name
    runs = Runs(project)
    if file.is_file():
        run = file.read_text("utf-8").strip()
        if runs.folder(run).is_dir() and run not in runs.ids():
            return run
    run = runs.reserve()
    make_folder(file.parent)
    publish(file, run.encode(), durable=False)
    return run


def usual(target: str, args: Sequence[str], *, module: bool = False) -> tuple[Run, Path] | None:
    """Return the newest run of a program that came to its end, and its folder.

    One with the same arguments is preferred.
    """
    root = Path(os.environ.get("REARVIEW_ROOT") or Path.cwd()) if module else root_of(Path(target))
    project = Project.find(root)
    if project is None:
        return None
    runs = Runs(project)
    found = [
        run
        for run in runs.all()
        if run.status is Status.FINISHED
        and run.facts.get("target") == target
        and bool(run.facts.get("module")) == module
    ]
    same = [run for run in found if run.argv == tuple(redact_words(args))]
    best = (same or found)[-1:]
    return (best[0], runs.folder(best[0].id)) if best else None


def stopped(runs: Sequence[Run], control: Control) -> Run | None:
    """Return the newest run of the same command if it was stopped before its end."""
    words = tuple(redact_words(control.args))
    for run in reversed(runs):
        same = run.facts.get("target") == control.target and run.argv == words
        if same and bool(run.facts.get("module")) == control.module:
            return run if run.status in {Status.PAUSED, Status.DEAD} else None
    return None
