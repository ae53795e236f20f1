"""Which parts of their set-up the segments of a backfill share, so that each part runs once.

Segments of different runs share the first statements of their scripts, up to the first that differs.
Segments of one run share everything up to the main loop. Some set-ups cannot be shared, or only in part, which
shows only when they run (`runtime/replay/setup_process.py`); the reasons are remembered here, for `--explain` and for
the next backfill.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from rearview.backfill.run_facts import RunRequest
from rearview.backfill.shared_imports import Lead
from rearview.execute.executor import SetupStage
from rearview.execute.replay_jobs import script_of
from rearview.model import Run, Segment
from rearview.model.messages import SetupStart
from rearview.model.wording import plural
from rearview.source.cells import code_hash, imported_modules, only_defines
from rearview.source.loops import MODULE, loop_ids
from rearview.store.files import make_folder, publish

WORTH_SHARING = 0.3
"""Seconds of set-up, without imports of libraries, from which on it is shared."""
_FILE = "shared-setup.json"
_MOST_OBSTACLES = 200
"""Most obstacles that are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class SetupText:
    """The statements of a script before its main loop, as hashes.

    `prefixes[k]` is a hash of the first k statements and of everything that they depend on and that is known
    before they run: arguments, working folder, the project's modules. Runs with equal hashes can share them.
    """

    prefixes: tuple[str, ...] = ()
    first_worth: int = 0
    """Number of leading statements that only import, define functions or assign constants."""


def setup_text(run: Run, files: Mapping[str, bytes], home: str) -> SetupText:
    """Return the set-up of a run whose replays execute `files`; `home` is the folder of the project."""
    facts = run.facts
    script = script_of(run, home)
    if facts.module or facts.cells or script not in files:
        return SetupText()
    modules = {
        path: data for path, data in files.items() if path.endswith(".py") and path != script
    }
    executed = {path: modules[path] for path in run.end.files or modules if path in modules}
    own = {PurePosixPath(path).parts[0].removesuffix(".py") for path in modules}
    started = (script, facts.target, run.argv, sorted(facts.given.items()), run.cwd, home)
    rules = (facts.clock, facts.autolog, facts.hash_seed, sorted(facts.threads.items()))
    digest = _digest(started, rules)
    statements = _statements(files[script], run.end.main.site or "", script)
    prefixes, first_worth = [digest], 0
    with_modules = False
    for number, text in enumerate(statements):
        if not with_modules and imported_modules(text) & own:
            with_modules = True
            digest = _digest(
                digest, sorted((path, _digest(data)) for path, data in executed.items())
            )
        digest = _digest(digest, code_hash(text))
        prefixes.append(digest)
        if first_worth == number and only_defines(text) and not imported_modules(text) & own:
            first_worth = number + 1
    return SetupText(tuple(prefixes), first_worth)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@lru_cache(maxsize=256)
def _statements(data: bytes, main: str, path: str) -> tuple[str, ...]:
    """Return the top-level statements of a script before the one with the loop `main`."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return ()
    lines = [
        line
        for line, loop in loop_ids(tree, path).items()
        if str(loop) == main and loop.function == MODULE
    ]
    statements = []
    for node in tree.body:
        if any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines):
            break
        statements.append(ast.unparse(node))
    return tuple(statements)


class RunSetup(Protocol):
    """The set-up of a run that is to be replayed."""

    @property
    def request(self) -> RunRequest:
        """The values that are requested of the run."""

    @property
    def lead(self) -> Lead | None:
        """How its replays start; None if they can share nothing."""

    @property
    def setup(self) -> SetupText:
        """Its statements before the main loop."""

    @property
    def setup_seconds(self) -> float:
        """Seconds of its set-up, without the imports of `lead`."""


@dataclass(frozen=True, slots=True)
class SharedStages:
    """The parts of set-ups that a plan shares, by run, and sentences about them."""

    stages: Mapping[str, tuple[SetupStage, ...]]
    sentences: tuple[str, ...] = ()


def shared_stages(
    prepared: Mapping[str, RunSetup],
    segments: Sequence[Segment],
    obstacles: Mapping[str, SharingObstacle],
) -> SharedStages:
    """Return which parts of their set-up the segments of a plan share.

    `obstacles` are those that earlier backfills met, by the key of the part.
    """
    counts = Counter(segment.run for segment in segments)
    worth = {
        run: prepared[run]
        for run in counts
        if prepared[run].lead is not None and prepared[run].setup_seconds >= WORTH_SHARING
    }
    depths = _common_depths({run: each.setup for run, each in worth.items()})
    stages: dict[str, tuple[SetupStage, ...]] = {}
    sentences: list[str] = []
    used: dict[str, list[str]] = {}
    for run, each in worth.items():
        loops = _loops_of(each)
        possible = [
            SetupStage(each.setup.prefixes[depth], SetupStart(depth, loops))
            for depth in depths[run]
        ]
        if counts[run] > 1 and _is_divided(each, segments):
            key = f"{run}:{each.request.version}"
            possible.append(SetupStage(key, SetupStart(None, (each.request.main_loop or "",))))
        usable = [
            stage for stage in possible if stage.key not in obstacles or obstacles[stage.key].usable
        ]
        for stage in possible:
            if stage.start.statements is not None or stage.key in obstacles:
                used.setdefault(stage.key, []).append(run)
        if usable:
            stages[run] = tuple(usable)
    whole = [run for run in stages if stages[run][-1].start.statements is None]
    for key, runs in used.items():
        obstacle = obstacles.get(key)
        depth = next(
            (s.start.statements for run in runs for s in stages.get(run, ()) if s.key == key), None
        )
        seconds = max(worth[run].setup_seconds for run in runs)
        if obstacle is not None and not obstacle.usable:
            sentences.append(f"the set-up of {_runs(runs)} is not shared: {obstacle.text}")
        elif depth is not None and len(runs) > 1:
            shorter = f"; it ended earlier last time: {obstacle.text}" if obstacle else ""
            sentences.append(
                f"{_runs(runs)} share the first {plural(depth, 'statement')} of their script: the set-up "
                f"({seconds:.1f} s each when recorded) runs once up to there{shorter}"
            )
    if whole:
        sentences.append(f"the segments of {_runs(whole)} share the set-up of their run")
    return SharedStages(stages, tuple(sentences))


def _runs(runs: Sequence[str]) -> str:
    return f"run {', '.join(runs)}" if len(runs) <= 3 else f"{len(runs)} runs"


def _common_depths(texts: Mapping[str, SetupText]) -> dict[str, list[int]]:
    """Return, by run, how many first statements it shares with other runs: a number for each group of runs."""
    holders = Counter(prefix for text in texts.values() for prefix in text.prefixes)
    depths: dict[str, list[int]] = {}
    for run, text in texts.items():
        own_depths = []
        for depth in range(text.first_worth + 1, len(text.prefixes)):
            shared = holders[text.prefixes[depth]]
            following = holders[text.prefixes[depth + 1]] if depth + 1 < len(text.prefixes) else 0
            if shared > 1 and following < shared:
                own_depths.append(depth)
        depths[run] = own_depths
    return depths


def _loops_of(prepared: RunSetup) -> tuple[str, ...]:
    """Return the loops before which a shared set-up ends: the main loop, and those with probes in them."""
    request = prepared.request
    chains = [chain for probe in request.requested for chain in (*probe.paths, *probe.fed_by)]
    loops = [request.main_loop or "", *(chain[0] for chain in chains if chain)]
    return tuple(dict.fromkeys(loop for loop in loops if loop))


def _is_divided(prepared: RunSetup, segments: Sequence[Segment]) -> bool:
    """Return True if all segments of a run are parts of its main loop."""
    request = prepared.request
    own = [segment for segment in segments if segment.run == request.run.id]
    return request.main_entered_once and all(
        segment.loop == request.main_loop and not segment.rerun for segment in own
    )


class SharingObstacle(msgspec.Struct, frozen=True):
    """Why a part of a set-up was not shared, or not to its end."""

    text: str
    usable: bool = True
    """Whether the statements before the obstacle were shared."""


def read_obstacles(cache: Path) -> dict[str, SharingObstacle]:
    """Return the obstacles that earlier backfills met, by the key of the part of a set-up."""
    try:
        data = (cache / _FILE).read_bytes()
        return msgspec.json.decode(data, type=dict[str, SharingObstacle])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def save_obstacles(cache: Path, reasons: Mapping[str, tuple[str, bool]]) -> None:
    """Remember why parts of set-ups were not shared; if the folder cannot be written, they are met again."""
    if not reasons:
        return
    obstacles = read_obstacles(cache)
    for key, (text, usable) in reasons.items():
        obstacles.pop(key, None)
        obstacles[key] = SharingObstacle(text, usable)
    latest = dict(list(obstacles.items())[-_MOST_OBSTACLES:])
    with contextlib.suppress(OSError):
        make_folder(cache)
        publish(cache / _FILE, msgspec.json.encode(latest), durable=False)
