"""Which parts of their set-up the segments of a backfill share, so that each part runs once.

Segments of different runs share the first statements of their scripts, up to the first that differs.
Segments of one run share everything up to the main loop. Some set-ups cannot be shared, or only in part, which
shows only when they run (`runtime/replay/setup_process.py`); the reasons are remembered here, for `--explain` and for
the next backfill.

Imports come first: importing a library such as torch takes seconds. One process imports the leading imports of
several replays once and is then forked for each of them (`leading_imports`). That is done only for imports that
come before anything else that the program does, and only for libraries that are known to tolerate it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from rearview.backfill.run_facts import RunRequest
from rearview.execute.executor import SetupStage
from rearview.execute.replay_jobs import script_of
from rearview.model import Run, Segment
from rearview.model.messages import SetupStart
from rearview.model.run import is_notebook
from rearview.model.wording import plural
from rearview.source.cells import code_hash, imported_modules, only_defines
from rearview.source.loops import MODULE, loop_ids
from rearview.store.files import make_folder, publish

WORTH_SHARING = 0.3
"""Seconds of set-up, without imports of libraries, from which on it is shared."""
_FILE = "shared-setup.json"
_MOST_OBSTACLES = 200
"""Most obstacles that are remembered; the oldest are forgotten."""

LIBRARIES = frozenset(
    {
        *("numpy", "scipy", "sklearn", "pandas", "matplotlib", "seaborn", "PIL", "joblib"),
        *("torch", "torchvision", "torchaudio", "torchmetrics", "safetensors", "einops", "timm"),
        *("transformers", "tokenizers", "tqdm", "yaml"),
    }
)
"""Installed libraries that a process may import before it is forked."""
_LAZY = {
    "torch": (
        b"optim",
        (b"environ", b"putenv", b"_dynamo", b"_inductor", b"set_default"),
        "import torch._dynamo",
    )
}
"""By library: a word in the source which shows that the library will import more when it is used, words
after which that import must not come earlier, and the import."""
_IMPORTED_BY_US = "rearview"
_MAX_FILES = 8
"""Files of the project that are followed from import to import."""


def leading_imports(
    files: Mapping[str, bytes],
    entry: str,
    *,
    module: bool = False,
    ran: Collection[str] | None = None,
) -> tuple[str, ...]:
    r"""Return the imports of installed libraries that come before anything else a program does.

    `entry` is the path of its script among `files`, or the name of its module; `ran` are the files
    that the run executed, if that is known. The program has executed nothing before these imports, so
    executing them earlier changes nothing. They end at the first import of a library that is not known
    to tolerate this, and at any statement that could change the meaning of an import.

    >>> text = b"'''Train.'''\nimport os, torch\nfrom torch import nn\nRATE = 0.1\nimport jax, numpy"
    >>> leading_imports({"train.py": text}, "train.py")
    ('import torch', 'from torch import nn')
    >>> leading_imports({"train.py": b"import os\nos.nice(1)\nimport torch"}, "train.py")
    ()
    """
    search = "" if module else str(PurePosixPath(entry).parent)
    reader = _ImportReader(files, "" if search == "." else search)
    statements = []
    for path in reader.packages(entry) if module else [entry]:
        imports, only_imports = reader.read(path)
        statements += imports
        if not only_imports:
            break
    texts = [files[path] for path in ran if path in files] if ran else list(files.values())
    return (*dict.fromkeys(statements), *_lazy_imports(statements, texts))


def _lazy_imports(statements: Collection[str], texts: Collection[bytes]) -> Iterator[str]:
    """Yield imports that libraries do when they are first used.

    An import is left out if the program may do something first that changes its effect.
    """
    libraries = {statement.split()[1].partition(".")[0] for statement in statements}
    for library, (sign, obstacles, statement) in _LAZY.items():
        changed = any(obstacle in text for text in texts for obstacle in obstacles)
        if library in libraries and any(sign in text for text in texts) and not changed:
            yield statement


class _ImportReader:
    """Reads the files of one version."""

    def __init__(self, files: Mapping[str, bytes], search: str) -> None:
        self._files = files
        self._search = search
        """Folder in which the program looks for modules of its own."""
        self._seen: set[str] = set()

    def packages(self, name: str) -> Iterator[str]:
        """Yield the files that are executed for a module of the program, in order."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            init = self._path(*parts[:count], "__init__.py")
            if init in self._files:
                yield init
        for last in (f"{parts[-1]}.py", f"{parts[-1]}/__init__.py"):
            path = self._path(*parts[:-1], last)
            if path in self._files:
                yield path
                return

    def read(self, path: str) -> tuple[list[str], bool]:
        """Return the leading imports of a file, and True if it contains nothing else."""
        if path in self._seen or len(self._seen) >= _MAX_FILES or path not in self._files:
            return [], False
        self._seen.add(path)
        statements: list[str] = []
        for statement in _first_imports(self._files[path]):
            if statement is None:
                return statements, False
            name = statement.split()[1]
            top = name.partition(".")[0]
            if self._is_own(top):
                return statements + self._follow(name), False
            if top in LIBRARIES:
                statements.append(statement)
            elif top not in sys.stdlib_module_names and top != _IMPORTED_BY_US:
                return statements, False
        return statements, True

    def _follow(self, name: str) -> list[str]:
        """Return the leading imports of a module of the project, which is executed next."""
        statements: list[str] = []
        for path in self.packages(name):
            imports, only_imports = self.read(path)
            statements += imports
            if not only_imports:
                break
        return statements

    def _is_own(self, name: str) -> bool:
        """Return True if the project has a module of that name, which Python would find first."""
        folder = self._path(name) + "/"
        return self._path(f"{name}.py") in self._files or any(
            path.startswith(folder) for path in self._files
        )

    def _path(self, *parts: str) -> str:
        return str(PurePosixPath(self._search, *parts))


@lru_cache(maxsize=1024)
def _first_imports(text: bytes) -> tuple[str | None, ...]:
    """Return the import statements that a file starts with; None at the end if other code follows.

    Assignments of constants in between are skipped.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return (None,)
    statements: list[str | None] = []
    for node in body:
        if isinstance(node, ast.Import):
            statements += [ast.unparse(ast.Import([alias])) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            statements.append(ast.unparse(node))
        elif not _does_nothing(node):
            return (*statements, None)
    return tuple(statements)


def _does_nothing(node: ast.stmt) -> bool:
    """Return True if a statement is a docstring or binds names of the program to constants."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and all(
            isinstance(each, ast.Name) and not each.id.startswith("__") for each in node.targets
        )
    )


@dataclass(frozen=True, slots=True)
class Lead:
    """How the replays of a run start; replays of two runs with equal leads can share their start."""

    imports: tuple[str, ...] = ()
    hash_seed: str = ""
    threads: tuple[tuple[str, str], ...] = ()


def lead_of(run: Run, files: Mapping[str, bytes], home: str) -> Lead | None:
    """Return how replays of a run that execute `files` start; None if they can share nothing.

    `home` is the folder of the project when the run was recorded.
    """
    facts = run.facts
    if not facts.watched or is_notebook(facts.target or ""):
        return None
    entry = (facts.target or "") if facts.module else script_of(run, home)
    imports = leading_imports(files, entry, module=facts.module, ran=run.end.files)
    threads = tuple(sorted(facts.threads.items()))
    return Lead(imports, facts.hash_seed, threads)


def import_seconds(run: Run, lead: Lead) -> float:
    """Return how many seconds the run spent on the imports that its replays can share."""
    modules = [f"{statement.split()[1]}." for statement in lead.imports]
    seconds = run.end.imports
    return sum(
        spent
        for name, spent in seconds.items()
        if any(module.startswith(f"{name}.") for module in modules)
    )


def runs_with_earlier_lead(leads: Mapping[str, Lead | None]) -> set[str]:
    """Return the runs whose lead an earlier run has too.

    >>> same = Lead(("import torch",))
    >>> runs_with_earlier_lead({"a": same, "b": None, "c": same, "d": Lead(("import numpy",))})
    {'c'}
    """
    earlier_leads: set[Lead] = set()
    followers: set[str] = set()
    for run, lead in leads.items():
        if lead in earlier_leads:
            followers.add(run)
        elif lead is not None:
            earlier_leads.add(lead)
    return followers


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
    chains = [
        chain for probe in request.requested for chain in (*probe.paths, *probe.feeding_paths)
    ]
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
