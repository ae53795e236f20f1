"""Begin a session that replays a segment. What only recording needs is not loaded for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rearview.config import Settings
from rearview.model import Control, Wanted
from rearview.model.segment import TEXTS
from rearview.runtime import api, children, clocks, environment, imports, shield, trackers
from rearview.runtime.foreign import foreign, libraries, temporary
from rearview.runtime.hooks import Hooks, Shared
from rearview.runtime.jumps import Jumps
from rearview.runtime.replayer import Replayer, recorded_values
from rearview.runtime.traces import Traces
from rearview.runtime.view import View, resolved
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.records import RecordFile
from rearview.store.runs import Runs


def replay(control: Control, shared: Shared | None = None) -> Replayer:
    """Return the session that replays what the segment file of `control` asks for."""
    assert control.segment is not None
    wanted = msgspec.json.decode(Path(control.segment).read_bytes(), type=Wanted)
    project = Project.open(Path(control.root))
    settings = Settings.read(project.store).changed(control.settings)
    runs = Runs(project)
    run = runs.get(wanted.run)
    checkpoints = Checkpoints(project)
    folder = runs.folder(run.id)
    home = run.home(os.path.realpath(project.root))
    made = Traces.of(folder, home + os.sep, lambda: False).absent()
    view = _view(project, wanted, home, made)
    session = Replayer(
        project,
        run.id,
        settings,
        checkpointing=1,
        given=dict(control.given),
        view=view,
        wanted=wanted,
        records=RecordFile(folder, run.id, origin=wanted.replay, put=checkpoints.objects.put),
        recorded=recorded_values(folder),
        surroundings=run.facts.get("end", {}).get("surroundings", {}),
        inputs=run.facts.get("end", {}).get("inputs", {}),
        made=made,
        put=checkpoints.objects.put,
    )
    session.jumps = Jumps.of(session, checkpoints, run.id)
    session.compiler = imports.Compiler(
        session,
        autolog=bool(run.facts.get("autolog")),
        watched=bool(run.facts.get("watched", True)),
        ids=wanted.ids,
        probes={
            path: {(line, column): tuple(drawn) for line, column, drawn in places}
            for path, places in wanted.probes.items()
        },
        view=view,
    )
    api.use(session)
    os.register_at_fork(after_in_child=session.forked)
    hooks = shared.hooks if shared else Hooks.install(watched=session.compiler.watched)
    session.report.spared = shared.seconds if shared else 0.0
    key = bytes.fromhex(run.facts.get("entropy", ""))
    session.declared |= hooks.point(view, key, folder / clocks.FILE, int(run.facts.get("clock", 1)))
    if hooks.clock is not None:
        hooks.clock.in_loop = lambda: bool(session.stack)
    view = session.view = session.compiler.view = hooks.view
    imports.install(session.compiler)
    belonging = children.Replaying(str(project.root), run.id, wanted.replay, wanted.names)
    children.install(belonging, view)
    environment.look_like(folder)
    shield.install(session)
    trackers.silence(Path(wanted.tree).parent)
    return session


def _view(project: Project, wanted: Wanted, root: str, made: Sequence[str]) -> View:
    """Return the view of a program that takes the project to be where it was, at `root`.

    `made` are the files that the run made.
    """
    spared = (os.path.realpath(project.store) + os.sep, *foreign())
    named = (f"{resolved(str(Path(one).parent))}{os.sep}{Path(one).name}" for one in made)
    places = {one for one in named if not one.startswith((root + os.sep, *spared))}
    tree = os.path.realpath(wanted.tree)
    texts = Path(tree).parent / TEXTS
    return View(
        root,
        tree,
        texts={f"{tree}{os.sep}{one.relative_to(texts)}": str(one) for one in texts.rglob("*.*")},
        elsewhere=os.path.realpath(Path(wanted.report).parent / "elsewhere"),
        spared=spared,
        installed=tuple(
            one for one in libraries() if one.startswith(root + os.sep) and one != root + os.sep
        ),
        temporary=temporary(),
        gone={one for one in places if os.path.lexists(one)},
        drafts=frozenset(places),
    )
