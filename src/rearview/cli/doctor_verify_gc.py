"""Commands that check this machine, and check, clean and trust the store: doctor, verify, gc, trust.

`doctor` prints the results of the check functions, such as `python` and `disk`, which yield `Check` objects. If a
check function raises, `examine` adds a warning to the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rearview._history import repair_format
from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    nbytes,
    open_history,
    project_folder,
    without_prefix,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import plain, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.errors import StoreError

if TYPE_CHECKING:
    from rearview._history import History, Problem


import contextlib
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import rearview
from rearview._history import FOLDER, Project, cores, history
from rearview.errors import RearviewError

if TYPE_CHECKING:
    from rearview._history import Machine


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check by `rearview doctor`."""

    level: str
    """`"ok"`, `"warn"` or `"fail"`."""
    name: str
    what: str
    remedy: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine and this project, and say what to do.

    Every line is ok, warn (works, but slower or less certain) or fail (does not work). Exit code 1 if
    anything fails.
    """
    checks = examine(project_folder())
    if as_json:
        output.json_document(checks)
    else:
        for check in checks:
            output.check_result(check.level, check.name, check.what, check.remedy)
    return 1 if any(check.level == "fail" for check in checks) else 0


CORE = ("blake3", "click", "cloudpickle", "duckdb", "msgspec", "rich", "xxhash")
OBSERVED = ("torch", "numpy", "scikit-learn", "pandas", "polars", "pyarrow", "ray", "lightning",
            "keras", "transformers", "tensorboard", "mlflow", "wandb")  # fmt: skip
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "afs", "ceph", "9p"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LITTLE_SPACE = 5_000_000_000
"""If fewer bytes than this are free on the disk, doctor warns that a training run may fill it."""


def examine(folder: Path) -> list[Check]:
    """Return the results of all checks of the machine, and of the project that contains `folder`."""
    checks: list[Callable[[], Iterator[Check]]] = [
        python,
        packages,
        git,
        lambda: disk(folder),
        lambda: store(folder),
        threads,
    ]
    results: list[Check] = []
    for check in checks:
        try:
            results += check()
        except Exception as exc:
            results.append(Check("warn", "doctor", f"a check itself failed: {exc!r}"))
    return results


def python() -> Iterator[Check]:
    """Report the Python interpreter; warn if the operating system is not Linux."""
    version = platform.python_version()
    yield Check("ok", "python", f"{version} at {sys.executable}, rearview {rearview.__version__}")
    if sys.platform != "linux":
        yield Check("warn", "system", platform.platform(), "Only Linux is tested.")


def packages() -> Iterator[Check]:
    """Check that the required libraries are installed, and list the ones that Rearview can observe."""
    missing = [name for name in CORE if _version(name) is None]
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        yield Check("fail", "packages", f"missing: {', '.join(missing)}", remedy)
    else:
        yield Check("ok", "packages", ", ".join(f"{name} {_version(name)}" for name in CORE))
    installed = [f"{name} {_version(name)}" for name in OBSERVED if _version(name)]
    yield Check("ok", "observes", ", ".join(installed) or "no training library is installed here")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git() -> Iterator[Check]:
    """Check git, which stores the versions."""
    try:
        version = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        yield Check(
            "warn",
            "git",
            "not found: sources of runs are kept as plain files",
            "Install git for smaller and faster versions.",
        )
        return
    yield Check("ok", "git", version.stdout.strip().removeprefix("git version "))


def disk(folder: Path) -> Iterator[Check]:
    """Check the disk on which the store is or will be."""
    disk_folder = _store_or_folder(folder)
    free = shutil.disk_usage(disk_folder).free
    level, remedy = "ok", ""
    if free < LITTLE_SPACE:
        level, remedy = "warn", "Free some: `rearview gc --budget 1GB`, or set a budget."
    yield Check(level, "disk", f"{size(free)} free at {disk_folder}", remedy)
    kind = file_system(disk_folder, _read(Path("/proc/mounts")))
    if kind in NETWORK:
        yield Check(
            "warn",
            "file system",
            f"{kind}, over the network: checkpoints cost more and heartbeats may lag",
            "Make .rearview a link to a folder on a local disk.",
        )
    yield writable(disk_folder)
    yield direct_io(disk_folder)


def _store_or_folder(folder: Path) -> Path:
    with contextlib.suppress(RearviewError):
        project = Project.find(folder)
        if project is not None:
            return project.store
    return folder


def writable(disk_folder: Path) -> Check:
    """Return the result of creating a file in `disk_folder`: "ok" or "fail"."""
    try:
        with tempfile.NamedTemporaryFile(dir=disk_folder, prefix=".rearview-doctor-"):
            return Check("ok", "writable", str(disk_folder))
    except OSError as exc:
        return Check(
            "fail",
            "writable",
            f"{disk_folder}: {exc.strerror or exc}",
            "Make the folder writable, or copy the project to one that is.",
        )


def direct_io(disk_folder: Path) -> Check:
    """Check whether files in `disk_folder` can be written past the page cache, as for big objects of checkpoints."""
    flag = getattr(os, "O_DIRECT", 0)
    file = disk_folder / f".rearview-doctor-{os.getpid()}"
    page = mmap.mmap(-1, 4096)
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
        try:
            os.write(fd, page)
        finally:
            os.close(fd)
            file.unlink()
    except OSError as exc:
        return Check(
            "warn",
            "O_DIRECT",
            f"refused here ({exc.strerror}): checkpoints go through the page cache",
            "Recording works and costs a little more. A local ext4 or xfs disk allows it.",
        )
    finally:
        page.close()
    return (
        Check("ok", "O_DIRECT", "works here")
        if flag
        else Check(
            "warn", "O_DIRECT", "not offered by this system: checkpoints go through the page cache"
        )
    )


def store(folder: Path) -> Iterator[Check]:
    """Check the store of the project that contains `folder`, if there is one, and the speed of this machine."""
    try:
        project = Project.find(folder)
    except RearviewError as exc:
        yield Check("fail", "store", str(exc), f"See docs/errors.md#{exc.slug}.")
        return
    if project is None:
        yield Check("ok", "store", f"no {FOLDER} here yet; `rearview run` makes it")
        return
    project_history = history(folder)
    runs = project_history.runs()
    dead = [run.id for run in runs if run.status.value == "dead"]
    yield Check(
        "ok", "store", f"{project.store}, format {project.check()}, {plural(len(runs), 'run')}"
    )
    yield speed(project_history.machine(measure=True))
    if dead:
        last_dead = ", ".join(dead[-3:])
        yield Check(
            "warn",
            "runs",
            f"{plural(len(dead), 'run')} did not record an end: {last_dead}",
            f"Its process was killed. `rearview resume {dead[-1]}` continues it.",
        )


def speed(machine: Machine) -> Check:
    """Report the measured speed of this machine, from which costs of runs of other machines are predicted."""
    if not machine.kernels:
        measured = "could not be measured: predictions for runs of other machines are doubtful"
        return Check("warn", "speed", measured, "Make the store writable.")
    kernels = ", ".join(f"{name} {took * 1e3:.2f} ms" for name, took in machine.kernels.items())
    disk = f"disk reads {machine.read:.0f} MB/s and writes {machine.write:.0f} MB/s"
    return Check("ok", "speed", f"{disk}; {kernels}")


def threads() -> Iterator[Check]:
    """Check the settings of the number of threads, because results may depend on this number."""
    count = cores()
    fixed = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    text = ", ".join(fixed) or "thread counts follow the number of cores"
    quota = cpu_quota(_read(Path("/sys/fs/cgroup/cpu.max")))
    if quota is not None and count and quota < count and not fixed:
        yield Check(
            "warn",
            "threads",
            f"{count} cores are seen but only {quota:g} may be used",
            f"Set OMP_NUM_THREADS={max(1, int(quota))}: training gets faster and repeats elsewhere.",
        )
        return
    yield Check("ok", "threads", f"{count} cores; {text}")


def cpu_quota(text: str) -> float | None:
    """Return the number of cores that a control group allows, or None if there is no limit; `text` is its cpu.max.

    >>> cpu_quota("200000 100000"), cpu_quota("max 100000"), cpu_quota("")
    (2.0, None, None)
    """
    words = text.split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def file_system(folder: Path, mounts: str) -> str:
    r"""Return the type of the file system of `folder`, according to the text of /proc/mounts.

    >>> file_system(Path("/data/x"), "d / ext4 rw 0 0\nserver:/data /data nfs4 rw 0 0")
    'nfs4'
    """
    folder = folder.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].replace("\\040", " "))
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), words[2]
    return kind


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


@click.command()
@click.option(
    "--repair", is_flag=True, help="Rebuild what can be rebuilt, move other damaged files away."
)
@json_option
def verify(repair: bool, as_json: bool) -> int:
    """Check everything in the store; repair what can be rebuilt.

    Reads every byte and compares it with its checksum. Nothing is ever deleted: with --repair,
    damaged files move to `.rearview/damaged/`. Exit code 0: all is well (again); 1: damage.
    """
    history = _open_or_repair(repair=repair)
    with waiting("checking the store", quiet=as_json):
        report = history.verify(repair=repair)
    if as_json:
        output.json_document({"ok": report.ok, **plain(report)})
        return 0 if report.ok else 1
    for problem in report.problems:
        _problem(problem)
    checked = ", ".join(
        (
            plural(report.runs, "run"),
            plural(report.checkpoints, "checkpoint"),
            plural(report.objects, "object"),
            plural(report.packs, "pack"),
            f"{size(report.nbytes)} read",
        )
    )
    if report.unchecked:
        output.note(
            f"{plural(report.unchecked, 'file')} of older runs were written before there were "
            "checksums: they can be read, but changed bytes would not be noticed."
        )
    if report.ok:
        output.out(f"{output.paint('ok', output.GREEN)}: {checked}")
        return 0
    output.out(f"{output.paint('damaged', output.RED)}: {checked}")
    if not repair:
        output.note(
            "`rearview verify --repair` rebuilds what can be rebuilt and sets the rest aside."
        )
    return 1


def _open_or_repair(*, repair: bool) -> History:
    """Return the history of the project; with `repair`, first rewrite the store's format file if it is unreadable."""
    try:
        return open_history()
    except StoreError as exc:
        if exc.slug != "store-unreadable" or not repair:
            raise
        output.note(f"{repair_format(project_folder())} was rewritten.")
        return open_history()


def _problem(problem: Problem) -> None:
    verdict = (
        output.paint("repaired", output.GREEN)
        if problem.done
        else output.paint("damaged", output.RED)
    )
    repair = f"; {problem.done}" if problem.done else ""
    output.out(f"{verdict}: {problem.path}: {problem.what}{repair}")
    if problem.lost:
        output.out(f"  cannot be loaded: {', '.join(problem.lost)}")


@click.command()
def trust() -> None:
    """Trust a store that was not made here: let replays run its source.

    A replay, a backfill and a resumed run execute source and unpickle objects of the store, so they
    refuse a store that was copied, unpacked, or made by another user or on another machine. Use this
    command once, if you know where the store comes from. Stores that you record yourself are trusted.
    """
    history = open_history(trusting=True)
    before = history.trusted
    file = history.trust()
    hosts = sorted({run.host for run in history.runs() if run.host})
    by = f" ({plural(len(history.runs()), 'run')}{', of ' + ', '.join(hosts) if hosts else ''})"
    status = "was trusted before" if before else "is trusted from now on"
    output.out(f"{history.project.store} {status}{by}")
    output.note(f"Remembered in {file}; remove that file to take it back.")


@click.command(cls=TakesRuns)
@click.option(
    "--budget", type=nbytes, metavar="SIZE", help="Drop checkpoints until they fit: 10GB."
)
@click.option(
    "--keep", type=click.IntRange(0), metavar="N", help="The newest N runs stay whole, in any case."
)
@click.option(
    "--keep-run",
    "kept",
    metavar="RUN",
    type=without_prefix,
    multiple=True,
    shell_complete=complete_run,
    help="This run stays whole, too; may be repeated.",
)
@click.option("--dry-run", "--dry", "dry_run", is_flag=True, help="Only show what would be freed.")
@json_option
def gc(
    *, budget: int | None, keep: int | None, kept: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Free space by dropping checkpoints.

    Without --budget, only unreferenced objects are deleted. With it (or with the setting `budget`),
    checkpoints are thinned evenly over each run, so that every run can still be replayed. Records
    and sources always stay, and so do the checkpoints of running runs.
    """
    history = open_history()
    whole = [history.run(which).id for which in kept]
    if keep:
        whole += [run.id for run in history.runs()[-keep:]]
    whole += [run.id for run in history.runs() if run.status.value == "running"]
    with waiting("looking for unneeded objects", quiet=as_json):
        freed = history.gc(budget=budget, keep=sorted(set(whole)), dry=dry_run)
    if as_json:
        output.json_document({"dry_run": dry_run, **plain(freed)})
        return
    would = "would free" if dry_run else "freed"
    dropped = (
        f", {plural(len(freed.checkpoints), 'checkpoint')} dropped" if freed.checkpoints else ""
    )
    output.out(f"{would} {size(freed.nbytes)}{dropped}; {size(freed.left)} are left")
    if freed.spared:
        output.note(f"{size(freed.spared)} may belong to a running run, and stay for now.")
    if budget is not None and freed.left > budget:
        output.note(
            f"{size(freed.left - budget)} more than the budget: the runs to keep do not fit."
        )
