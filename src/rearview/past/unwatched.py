"""Say why no probe logs a name: its file lies outside the project, or does not parse."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rearview.source.logged import names_logged
from rearview.source.text import parse
from rearview.store.project import repository_top

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
            reason = parse(text)
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
