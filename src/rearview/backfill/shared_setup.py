"""Which parts of their set-up the segments of a backfill share, so that each part runs once.

Segments of different runs share the statements with which their scripts begin, up to the first that
differs. Segments of one run share everything up to the main loop. What the set-up does when it runs decides
how much of that is really shared (`runtime/replay/setup_process.py`); what was found out is remembered here, for
`--explain` and for the next backfill.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from rearview.backfill.segments import RunRequest
from rearview.backfill.shared_imports import Lead
from rearview.execute.executor import SetupStage
from rearview.execute.replay_jobs import script_of
from rearview.model import Run, Segment
from rearview.model.plan import SetupStart
from rearview.model.wording import plural
from rearview.source.cells import code_hash, imported_modules, only_defines
from rearview.source.loops import MODULE, loop_ids
from rearview.store.files import publish

WORTH_SHARING = 0.3
"""Seconds of set-up, without imports of libraries, from which on it is shared."""
_FILE = "shared-setup.json"
_MOST_REASONS = 200
"""Reasons that are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class SetupText:
    """The statements of a script before its main loop, as hashes.

    `prefixes[k]` stands for the first k statements with everything that they take in and that is known
    before they run: arguments, working folder, the project's modules. Equal hashes: they can be shared.
    """

    prefixes: tuple[str, ...] = ()
    first_worth: int = 0
    """So many statements only import, define functions and assign constants."""


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
    """What is known of the set-up of a run that is to be replayed."""

    @property
    def request(self) -> RunRequest:
        """What is asked of the run."""

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
    known: Mapping[str, KnownReason],
) -> SharedStages:
    """Return which parts of their set-up the segments of a plan share.

    `known` says what earlier backfills found out about parts.
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
        found = [
            SetupStage(each.setup.prefixes[depth], SetupStart(depth, loops))
            for depth in depths[run]
        ]
        if counts[run] > 1 and _is_divided(each, segments):
            key = f"{run}:{each.request.version}"
            found.append(SetupStage(key, SetupStart(None, (each.request.main_loop or "",))))
        kept = [one for one in found if one.key not in known or known[one.key].usable]
        for one in found:
            if one.start.statements is not None or one.key in known:
                used.setdefault(one.key, []).append(run)
        if kept:
            stages[run] = tuple(kept)
    whole = [run for run in stages if stages[run][-1].start.statements is None]
    for key, runs in used.items():
        reason = known.get(key)
        depth = next(
            (s.start.statements for run in runs for s in stages.get(run, ()) if s.key == key), None
        )
        seconds = max(worth[run].setup_seconds for run in runs)
        if reason is not None and not reason.usable:
            sentences.append(f"the set-up of {_runs(runs)} is not shared: {reason.text}")
        elif depth is not None and len(runs) > 1:
            shorter = f"; it ended early before: {reason.text}" if reason else ""
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
    """Return, by run, how many statements it has in common with others: once for each place of parting."""
    holders = Counter(prefix for text in texts.values() for prefix in text.prefixes)
    depths: dict[str, list[int]] = {}
    for run, text in texts.items():
        found = []
        for depth in range(text.first_worth + 1, len(text.prefixes)):
            shared = holders[text.prefixes[depth]]
            following = holders[text.prefixes[depth + 1]] if depth + 1 < len(text.prefixes) else 0
            if shared > 1 and following < shared:
                found.append(depth)
        depths[run] = found
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


class KnownReason(msgspec.Struct, frozen=True):
    """Why a part of a set-up was not shared, or not to its end."""

    text: str
    usable: bool = True
    """Whether the statements before the obstacle were shared."""


def read_reasons(cache: Path) -> dict[str, KnownReason]:
    """Return what earlier backfills found out about parts of set-ups, by key."""
    try:
        data = (cache / _FILE).read_bytes()
        return msgspec.json.decode(data, type=dict[str, KnownReason])
    except (OSError, msgspec.DecodeError):
        return {}


def save_reasons(cache: Path, reasons: Mapping[str, tuple[str, bool]]) -> None:
    """Remember why parts of set-ups were not shared."""
    if not reasons:
        return
    known = read_reasons(cache)
    for key, (text, usable) in reasons.items():
        known.pop(key, None)
        known[key] = KnownReason(text, usable)
    latest = dict(list(known.items())[-_MOST_REASONS:])
    publish(cache / _FILE, msgspec.json.encode(latest), durable=False)
