"""What a run read: whether it is still there, and still the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rearview.model import Run
from rearview.store.fingerprint import fingerprint


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
