"""Why a run cannot be replayed here, or why no statement logs a name: reasons for the user.

A replay needs the files that the run read and the packages that it imported. A name needs a statement in
a file of the project that parses.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from rearview.model import Run
from rearview.source.log_calls import names_logged
from rearview.source.text import try_parse
from rearview.store.project import repository_top
from rearview.store.recorded_inputs import fingerprint

_MAX_FILES = 5_000
"""Python files of the repository that are searched for a log statement."""
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def missing_input(run: Run, root: Path, stored: Collection[str] = ()) -> str:
    """Return why a run cannot be replayed for lack of an input file; empty if all exist.

    Files below `root` that are `stored` with the source need not exist.
    """
    missing = [path for path, _ in _recorded_inputs(run, root, stored) if not path.exists()]
    if not missing:
        return ""
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"its input {missing[0]}{others} is gone; bring it back"


def changed_inputs(run: Run, root: Path, stored: Collection[str] = ()) -> list[Path]:
    """Return the input files that changed since the run read them."""
    changed = []
    for path, recorded in _recorded_inputs(run, root, stored):
        try:
            now = fingerprint(path)
        except OSError:
            continue  # `missing_input` reports it
        if list(now) != recorded and now[2] != recorded[2]:
            changed.append(path)
    return changed


def _recorded_inputs(
    run: Run, root: Path, stored: Collection[str]
) -> Iterator[tuple[Path, list[object]]]:
    """Yield the path now and the recorded fingerprint of each input that is not in the store.

    A file that was changed after the start of the run is no input: the run wrote it itself. Today's runs
    do not record such files, older ones did.
    """
    for recorded_path, recorded in run.end.inputs.items():
        if recorded[1] > run.started * 1e9:
            continue
        path = Path(run.now(recorded_path, str(root)))
        if not path.is_relative_to(root) or str(path.relative_to(root)) not in stored:
            yield path, list(recorded)


def missing_packages(source: Mapping[str, bytes], executed: Collection[str]) -> str:
    """Return why a run cannot be replayed for lack of a package; empty if all are installed.

    `source` are the files of its version, `executed` those that the run executed. Only imports that
    always run count: not those in a function or under `try`. A program that changes where Python looks
    for modules is not checked.
    """
    files = [source[path] for path in executed if path in source]
    if any(b"sys.path" in text or b"addsitedir" in text for text in files):
        return ""
    own = {part.removesuffix(".py") for path in source for part in PurePosixPath(path).parts}
    imported = {name for text in files for name in _imported(text)} - own
    missing = sorted(name for name in imported if not _is_installed(name))
    if not missing:
        return ""
    verb = "which is" if len(missing) == 1 else "which are"
    return (
        f"it imports {', '.join(missing)}, {verb} not installed here any more; install what it had "
        "(`pip install …`), or replay it in the environment it ran in"
    )


@lru_cache(maxsize=512)
def _imported(text: bytes) -> frozenset[str]:
    """Return the packages that a file imports as soon as it is executed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    packages: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return frozenset(packages)


@lru_cache(maxsize=512)
def _is_installed(name: str) -> bool:
    if name in sys.builtin_module_names or name in sys.stdlib_module_names or name in sys.modules:
        return True
    with contextlib.suppress(ImportError, ValueError):
        # only `find_spec` sees editable installations; neither imports anything
        return PathFinder.find_spec(name) is not None or find_spec(name) is not None
    return False


def logged_outside_project(name: str, root: Path) -> str:
    """Return a sentence on a file of the git repository, above the project, that logs `name`.

    Empty if there is no such file.
    """
    top = repository_top(root.resolve())
    if top is None or top == root.resolve():
        return ""
    for path in _python_files(top, root.resolve()):
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError):
            continue
        if name in text and name in names_logged({path.name: text}):
            return (
                f" {path} logs it, but is outside the project {root}; only files inside it are "
                f"recorded: set REARVIEW_ROOT={top} and record a new run."
            )
    return ""


def script_is_gone(run: Run, root: Path) -> str:
    """Return a sentence if the run's script is no longer at its path; empty if it is."""
    target = run.facts.target or run.script
    if run.facts.module or not target.endswith(".py"):
        return ""
    script = Path(run.now(os.path.join(run.cwd or str(root), target), str(root)))  # noqa: PTH118
    if script.exists():
        return ""
    return f" The run's script {script} is not there any more: put the statement where its code is now."


def logged_in_unparsable_file(name: str, files: Mapping[str, str]) -> str:
    """Return a sentence on a file that does not parse; empty if all parse.

    A file that mentions `name` comes first. Statements of a file that does not parse are not seen at all.
    """
    reasons = {path: try_parse(text) for path, text in files.items()}
    broken = {path: reason for path, reason in reasons.items() if isinstance(reason, str)}
    for path, reason in broken.items():
        if name in files[path]:
            return f" {path} mentions it, but {reason}: correct that first."
    for path, reason in broken.items():
        return f" The log statements of {path} are not seen, because {reason}: correct that first."
    return ""


def _python_files(top: Path, root: Path) -> Iterator[Path]:
    """Yield the Python files below `top` that are not below the project's folder `root`."""
    count = 0
    for folder, folders, names in os.walk(top):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and here / name != root
            and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > _MAX_FILES:
                    return
                yield here / name
