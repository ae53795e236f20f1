"""The files that a run wrote: which they are, and their contents if they are still stored.

Each checkpoint holds the files that the run had written by then, if they are not too large. The files
themselves are in the project, as the run left them or changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rearview.errors import UsageError
from rearview.model import Checkpoint, Run
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.files import read_lines
from rearview.store.runs import ABSENT, TRACES, TRACES_FORMAT, Runs

PREFIX = "file:"
"""Prefix of the part of a checkpoint that holds a file; its path follows."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that a run wrote."""

    path: str
    """Relative to the root of the project; absolute outside of it."""
    made: bool
    """Whether the run created the file."""
    nbytes: int | None
    """Its size in the project now; None if it does not exist."""
    in_place: bool
    """Whether it has not changed since the run."""
    kept_at: str | None
    """Point of the last checkpoint, if that holds the file."""


def files_of(run: Run, root: Path, runs: Runs, checkpoints: Checkpoints) -> list[RunFile]:
    """Return the files that a run wrote, in the order it first wrote them."""
    written: dict[str, bool] = {}
    for line in read_lines(runs.folder(run.id) / TRACES, TRACES_FORMAT):
        if "path" in line:
            written.setdefault(str(line["path"]), line.get("was") == ABSENT)
    last = checkpoints.of(run.id)[-1:]
    out = []
    for path, is_new in written.items():
        size, in_place = _in_project(run, root / path)
        kept = next(
            (_place(checkpoint) for checkpoint in last if PREFIX + path in checkpoint.parts), None
        )
        out.append(RunFile(path, is_new, size, in_place, kept))
    return out


def content_of(
    run: Run, path: str, root: Path, checkpoints: Checkpoints, at: str | None = None
) -> tuple[bytes, str]:
    """Return the content of a file that a run wrote, and a phrase that says where it comes from.

    It comes from the project, if the file has not changed since the run; else from the last checkpoint
    that holds it, or with `at` from the checkpoint at that point.
    """
    if at is None and _in_project(run, root / path)[1]:
        return (root / path).read_bytes(), "as the run left it"
    holding = [
        checkpoint for checkpoint in checkpoints.of(run.id) if PREFIX + path in checkpoint.parts
    ]
    matching = [checkpoint for checkpoint in holding if at is None or _place(checkpoint) == at]
    if not matching:
        raise UsageError(f"{_missing_message(run, path, at)} {_remedy(holding)}", slug="no-file")
    data = bytes(checkpoints.load(matching[-1])[PREFIX + path])
    return data, f"as it was at {_place(matching[-1])}"


def _missing_message(run: Run, path: str, at: str | None) -> str:
    if at is not None:
        return f"No checkpoint of run {run.id} holds {path} at {at}."
    return (
        f"What run {run.id} wrote to {path} is not stored: the file was removed or changed since, and no "
        "checkpoint holds it."
    )


def _remedy(holding: Sequence[Checkpoint]) -> str:
    points = list(dict.fromkeys(map(_place, holding)))
    if points:
        return f"Checkpoints hold it at {', '.join(points[-6:])}."
    return "Run the program again to create it: `rearview run`."


def _place(checkpoint: Checkpoint) -> str:
    return str(checkpoint.point) or "the end"


def _in_project(run: Run, file: Path) -> tuple[int | None, bool]:
    """Return the size of a file, and whether it was last written during the run."""
    try:
        facts = file.stat()
    except OSError:
        return None, False
    ended = run.ended if run.ended is not None else float("inf")
    own = run.started - 1 <= facts.st_mtime <= ended  # file times lag behind the clock a little
    return facts.st_size, own and file.is_file()
