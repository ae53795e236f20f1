"""Commands for many versions as one tree: tree, pack, and the replay of packages and programs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    nbytes,
    open_history,
    span,
    without_prefix,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, plural, size
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview.multiversion.execution_tree import ExecutionTree
    from rearview.multiversion.package import PackageReader
    from rearview.multiversion.replay_tree import ReplayEvent
    from rearview.multiversion.study import Study
    from rearview.multiversion.study_sources import OpenedStudy

PLANNERS = ("auto", "prp1", "prp2", "pc", "lfu", "none")
PLAIN_EVERY = 10.0
"""Seconds between printed lines of progress if stderr is not a terminal."""


def _open(words: Sequence[str]) -> OpenedStudy:
    """Return the study of the programs, the RO-Crate folder or the runs that `words` name; of all runs if empty."""
    from rearview.multiversion.study_sources import names_programs, open_programs, open_runs

    if names_programs(words):
        return open_programs(words)
    history = open_history()
    runs = [history.run(word) for word in words] if words else history.runs()
    return open_runs(history.project, runs)


@click.command(cls=TakesRuns)
@click.argument(
    "words",
    metavar="[RUNS or FILES]...",
    nargs=-1,
    type=without_prefix,
    shell_complete=complete_run,
)
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Write a picture.")
@json_option
def tree(words: Sequence[str], svg: Path | None, as_json: bool) -> int:
    """Show many versions as one execution tree: the cells that they share, and where they differ.

    RUNS are recorded runs (all of them by default); FILES are scripts and notebooks, a version each.
    Cells are shared as long as code and inputs are the same; formatting and comments do not count.
    """
    from rearview.multiversion.execution_tree import build_tree, tree_to_json
    from rearview.multiversion.render import tree_lines, tree_svg

    opened = _open(words)
    built = build_tree(opened.study, opened.measurements)
    if svg is not None:
        svg.write_text(tree_svg(built), "utf-8", "replace")
        output.prefixed_note(f"{svg} written.")
    if as_json:
        from rearview.cli.terminal.output import json_text

        output.data(json_text(tree_to_json(built)))
        return 0
    if svg is None:
        for line in tree_lines(built):
            output.out(line)
    _said_tree(built)
    return 0


def _said_tree(built: ExecutionTree) -> None:
    shared = built.cells_in_all - len(built.tree)
    output.prefixed_note(
        f"{plural(len(built.paths), 'version')}, {plural(built.cells_in_all, 'cell')}, "
        f"{shared} of them shared."
    )
    for name, why in built.unavailable.items():
        output.prefixed_note(f"{name} cannot be replayed: {why}.")
    for text in built.unshared:
        output.prefixed_note(f"{text}.")


@click.command(cls=TakesRuns)
@click.argument("package", metavar="PACKAGE", type=click.Path(path_type=Path, dir_okay=False))
@click.argument(
    "words",
    metavar="[RUNS or FILES]...",
    nargs=-1,
    type=without_prefix,
    shell_complete=complete_run,
)
@click.option(
    "--embed",
    type=nbytes,
    default="200MB",
    show_default=True,
    metavar="SIZE",
    help="Put files up to this size into the package; of larger files, only name and hash.",
)
@click.option("--title", default="", metavar="TEXT", help="What the study is called.")
@json_option
def pack(package: Path, words: Sequence[str], embed: int, title: str, as_json: bool) -> int:
    """Write versions with their data into one PACKAGE that others can replay.

    RUNS are recorded runs (all of them by default); FILES are scripts and notebooks, a version each.
    The package holds code, data, outputs, the execution tree and the versions of packages, but no
    checkpoints: a replay of the package computes everything.
    """
    from rearview.multiversion.package import pack as write_package

    if package.suffix != ".rvz":
        raise UsageError(
            f"A package ends in .rvz, and {package.name} does not.", slug="package-name"
        )
    opened = _open(words)
    packed = write_package(
        package,
        opened.study,
        programs=opened.programs,
        measurements=opened.measurements,
        embed=embed,
        title=title or opened.title,
    )
    if as_json:
        output.json_document(
            {
                "file": str(packed.file),
                "bytes": packed.size,
                "versions": packed.versions,
                "contents": packed.files,
                "referenced": list(packed.referenced),
            }
        )
        return 0
    output.out(
        f"{packed.file}: {plural(packed.versions, 'version')}, {plural(packed.files, 'content')}, "
        f"{size(packed.size)}."
    )
    for name in packed.referenced:
        output.prefixed_note(f"{name} is not in the package, only its hash: send it along.")
    return 0


def study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give the command `replay` the options that apply only to packages and programs, not to recorded runs."""
    options = [
        click.option("--cache", type=nbytes, metavar="SIZE", help="Memory for states: 2GB."),
        click.option("--disk", type=nbytes, metavar="SIZE", help="Disk for states: none."),
        click.option("--workers", type=click.IntRange(1), metavar="N", help="Cells at once."),
        click.option(
            "--planner", type=click.Choice(PLANNERS), help="Planner of the order of versions: auto."
        ),
        click.option("--only", multiple=True, metavar="VERSION", help="Only this version."),
        click.option("--dry-run", is_flag=True, help="Show the plan; run nothing."),
        click.option(
            "--offline", is_flag=True, help="Install nothing: use this environment for a package."
        ),
        click.option("-y", "--yes", is_flag=True, help="Do not ask before a package is run."),
        click.option(
            "--states",
            type=click.Choice(["auto", "stored"]),
            help="Keep states as parked processes where possible, or always store them.",
        ),
        click.option(
            "--keep-states", is_flag=True, help="Leave stored states for the next replay."
        ),
        click.option("--cell-limit", type=span, metavar="TIME", help="Stop a cell after this."),
        click.option(
            "--tolerance",
            type=click.FloatRange(0),
            metavar="SHARE",
            help="Numbers this close are the same: 1e-6.",
        ),
        click.option("--perceptual", is_flag=True, help="Compare small grey versions of images."),
        click.option(
            "--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write a page."
        ),
        click.option(
            "--data",
            multiple=True,
            type=click.Path(path_type=Path, file_okay=False),
            metavar="FOLDER",
            help="Folder of files that are not in the package.",
        ),
        click.option(
            "--max-size", type=nbytes, metavar="SIZE", help="Refuse larger packages: 50GB."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def replay_programs(words: Sequence[str], *, as_json: bool, quiet: bool, **choices: Any) -> int:
    """Replay a package, or scripts and notebooks, named by `words`; return the exit code of the command.

    `choices` has the options of `study_options`.
    """
    from rearview.multiversion.compare_outputs import Tolerance
    from rearview.multiversion.render import plan_lines
    from rearview.multiversion.replay_study import ReplayOptions, plan_study

    options = ReplayOptions(
        cache=float(choices["cache"] if choices["cache"] is not None else 2e9),
        disk=float(choices["disk"] or 0),
        workers=choices["workers"] or 1,
        planner=choices["planner"] or "auto",
        cell_limit=choices["cell_limit"],
        backend=choices["states"] or "auto",
        tolerance=Tolerance(choices["tolerance"] or 0.0, 0.0, choices["perceptual"]),
        keep_states=choices["keep_states"],
    )
    packages = [word for word in words if word.endswith(".rvz")]
    if packages and len(words) > 1:
        raise UsageError("A package is replayed alone: give one.", slug="one-package")
    with ExitStack() as stack:
        reader: PackageReader | None = None
        if packages:
            scratch = stack.enter_context(TemporaryDirectory(prefix="rearview-package-"))
            reader, opened = _open_package(Path(packages[0]), Path(scratch), choices)
        else:
            opened = _open(words)
        study = opened.study.select_versions(choices["only"]) if choices["only"] else opened.study
        plan = plan_study(study, options, opened.measurements, opened.store)
        if not (as_json or quiet) or choices["dry_run"]:
            for line in plan_lines(plan, cache=options.cache, workers=options.workers):
                (output.prefixed_note if as_json else output.out)(line)
        if choices["dry_run"]:
            _show_dry(plan, as_json=as_json)
            return 0
        if reader is not None and not _confirm_package(reader, opened, yes=choices["yes"]):
            output.note("Nothing was run.")
            return 1
        python = _interpreter(reader, study, offline=choices["offline"], quiet=quiet or as_json)
        return _run(plan, options, opened, python, as_json, quiet, choices["page"])


def _show_dry(plan: Any, *, as_json: bool) -> None:
    from rearview.multiversion.render import tree_lines

    if as_json:
        output.json_document(
            {
                "versions": list(plan.tree.paths),
                "cells": len(plan.tree.tree),
                "seconds": plan.order.seconds,
                "bound": plan.order.bound,
                "gap": plan.order.gap,
                "planner": plan.order.by,
                "tried": dict(plan.order.tried),
                "one_by_one": plan.tree.tree.one_by_one,
                "steps": [str(step) for step in plan.order.steps],
            }
        )
        return
    for line in tree_lines(plan.tree):
        output.out(line)
    for name, seconds in plan.order.tried.items():
        output.out(f"  {name:16} {duration(seconds)}")


def _open_package(
    file: Path, scratch: Path, choices: Mapping[str, Any]
) -> tuple[PackageReader, OpenedStudy]:
    from rearview.multiversion.execution_tree import Measurements
    from rearview.multiversion.package import MOST_BYTES, open_package
    from rearview.multiversion.study_sources import OpenedStudy

    reader = open_package(file, most_bytes=choices["max_size"] or MOST_BYTES)
    study, programs = reader.extract(
        scratch / "contents", data=choices["data"], only=list(choices["only"])
    )
    title = reader.manifest.title
    return reader, OpenedStudy(study, programs, Measurements(), None, title, contents=scratch)


def _confirm_package(reader: PackageReader, opened: OpenedStudy, *, yes: bool) -> bool:
    """Print what a package contains and would run; return True if the user agrees, now or by `yes` (--yes)."""
    from rearview.multiversion.package_metadata import requirements

    manifest = reader.manifest
    output.prefixed_note(f"{reader.file.name}: {output.printable(opened.title, line=True)}")
    for version in opened.study.versions[:40]:
        arguments = " ".join(version.argv)
        output.prefixed_note(
            output.printable(
                f"  {version.name}: {version.program} {arguments} "
                f"({plural(len(version.cells), 'cell')}, {plural(len(version.files), 'file')})",
                line=True,
            )
        )
    variables = sorted(
        {
            name
            for version in opened.study.versions
            for name, value in version.environment.items()
            if value is not None
        }
    )
    if variables:
        output.prefixed_note(output.printable(f"  It sets {', '.join(variables)}.", line=True))
    needs = requirements(manifest.environment)
    output.prefixed_note(
        f"  It ran with Python {manifest.environment.python} and {', '.join(needs) or 'no packages'}."
    )
    output.prefixed_note("  Its code will run as you, with access to your files and network.")
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"{reader.file.name} is code from elsewhere, and there is no terminal to ask on. "
            "Look at it with --dry-run, and run it with --yes.",
            slug="not-agreed",
        )
    return click.confirm("Run it?", default=False, err=True)


def _interpreter(reader: PackageReader | None, study: Study, *, offline: bool, quiet: bool) -> str:
    """Return the path of the Python interpreter that replays a study.

    For a package, it is that of an environment made for the package, else that of this process. With `offline`,
    nothing is installed: it is that of this process, and differences in packages are printed as warnings.
    """
    if reader is None:
        return sys.executable
    import hashlib

    from rearview.multiversion.package_metadata import (
        NOTEBOOK_TOOLS,
        TOOLS,
        differences,
        fresh_environment,
        own_requirements,
        requirements,
    )
    from rearview.multiversion.study import imports_module

    environment = reader.manifest.environment
    if offline:
        for text in differences(environment):
            output.prefixed_note(f"warning: {text}")
        return sys.executable
    tools = [*TOOLS]
    if any(version.notebook for version in study.versions):
        tools += NOTEBOOK_TOOLS
    if imports_module(study, "rearview"):
        tools += own_requirements()
    key = hashlib.sha256(repr([environment.python, requirements(environment), tools]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rearview" / "environments" / key.hexdigest()[:24]
    if not (folder / "complete").exists():
        from rearview.cli.terminal.progress import waiting

        folder.parent.mkdir(parents=True, exist_ok=True)
        with waiting(f"Making an environment in {folder}", quiet=quiet):
            log = folder.with_suffix(".log")
            python = fresh_environment(folder, environment, tools=tools, log=log)
        (folder / "complete").touch()
        return python
    return str(folder / "bin" / "python")


def _run(
    plan: Any,
    options: Any,
    opened: OpenedStudy,
    python: str,
    as_json: bool,
    quiet: bool,
    page: Path | None,
) -> int:
    from rearview.multiversion.render import report_html, report_json, report_lines
    from rearview.multiversion.replay_study import replay_study

    live = TreeView(plan.tree, plan.order.seconds)
    view: AbstractContextManager[Any] = nullcontext() if quiet or as_json else live
    with view:
        report = replay_study(
            plan,
            options,
            opened.measurements,
            programs=opened.programs,
            environment=os.environ,
            python=python,
            store=opened.store,
            author_folder=opened.author_folder,
            contents=opened.contents,
            on_event=live if not (quiet or as_json) else (lambda _: None),
        )
    if page is not None:
        page.write_text(report_html(report, opened.title or "Replay"), "utf-8", "replace")
        output.prefixed_note(f"{page} written.")
    if as_json:
        output.json_document(report_json(report))
    else:
        for line in report_lines(report):
            output.out(output.printable(line))
    return 0 if report.exact else 1


class TreeView:
    """Shows the execution tree during its replay: which cells have run, which run now, which states are kept."""

    def __init__(self, tree: ExecutionTree, seconds: float) -> None:
        from rearview.multiversion.render import depth_first, tree_lines

        self._lines = tree_lines(tree)
        self._rows = {node: row for row, node in enumerate(depth_first(tree))}
        self._marks = [" "] * len(self._lines)
        self._kept: set[int] = set()
        self._seconds = seconds
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()
        self._live: Any = None
        self._done = 0.0

    def __call__(self, event: ReplayEvent) -> None:
        """Update the tree on the terminal after `event`; without a terminal, print a line of progress at intervals."""
        with self._lock:
            row = self._rows.get(event.node)
            if row is not None:
                if event.action == "compute":
                    self._marks[row] = ">"
                elif event.action == "computed":
                    self._marks[row] = "+" if event.text == "done" else "!"
                elif event.action == "keep":
                    self._kept.add(row)
                elif event.action == "evict":
                    self._kept.discard(row)
            self._done = max(self._done, event.done_seconds)
            now = time.monotonic()
            if self._live is not None:
                self._live.update(self._text())
            elif now - self._last >= PLAIN_EVERY:
                self._last = now
                output.prefixed_note(self._progress())

    def _progress(self) -> str:
        spent = time.monotonic() - self._start
        ran = sum(mark in "+!" for mark in self._marks)
        time_left = ""
        if self._done > 0 and self._seconds > self._done:
            time_left = f", about {duration(spent * (self._seconds / self._done - 1))} left"
        return f"{ran} of {len(self._marks)} cells after {duration(spent)}{time_left}"

    def _text(self) -> Any:
        from rich.text import Text

        max_rows = 30
        first = next((i for i, mark in enumerate(self._marks) if mark == ">"), 0)
        begin = max(0, min(first - max_rows // 2, len(self._lines) - max_rows))
        rows = [
            f"{self._marks[i]}{'*' if i in self._kept else ' '} {self._lines[i]}"
            for i in range(begin, min(len(self._lines), begin + max_rows))
        ]
        return Text(output.printable("\n".join([*rows, self._progress()])), no_wrap=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and output.colored(sys.stderr):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
