"""Whether the work tree has another source than a run that is resumed."""

from __future__ import annotations

from rearview.config import Settings
from rearview.errors import RearviewError
from rearview.model import Run
from rearview.model.run import NOTEBOOK
from rearview.past.probing import WORKTREE
from rearview.store.project import Project
from rearview.store.versions import Versions


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
