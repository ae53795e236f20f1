"""Find the statements before the main loop that several segments of a backfill can share, so that they run only once.

The *set-up* of a run are all statements before its main loop. Segments of different runs share the first statements of
their scripts, up to the first statement that differs; segments of one run share the whole set-up. A process runs the
shared statements and is then forked for each segment. Sometimes this process finds out that it cannot share a
statement (`runtime/replay/setup_process.py`). The reason, an *obstacle*, is stored for `--explain` and for the next
backfill.

The *leading imports* of a program are shared first, because importing a library such as torch takes seconds. They are
the imports with which the program begins, and only of libraries that are known to work after a fork.
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

from rearview.backfill.facts_and_segments import RunRequest
from rearview.execute.executor import SetupStage
from rearview.execute.replay_jobs import script_of
from rearview.model import Run, Segment
from rearview.model.process_messages import SetupStart
from rearview.model.run import is_notebook
from rearview.model.wording import plural
from rearview.source.cells import code_hash, imported_modules, only_defines
from rearview.source.loops import MODULE, loop_ids
from rearview.store.create_files import make_folder, publish

WORTH_SHARING = 0.3
"""Least seconds of the statements before the main loop, without the leading imports, for which they are shared."""
_FILE = "shared-setup.json"
_MOST_OBSTACLES = 200
"""Most obstacles that are stored; if there are more, the oldest are removed."""

LIBRARIES = frozenset(
    {
        *("numpy", "scipy", "sklearn", "pandas", "matplotlib", "seaborn", "PIL", "joblib"),
        *("torch", "torchvision", "torchaudio", "torchmetrics", "safetensors", "einops", "timm"),
        *("transformers", "tokenizers", "tqdm", "yaml"),
    }
)
"""Libraries that still work in a forked process if they were imported before the fork."""
_LAZY = {
    "torch": (
        b"optim",
        (b"environ", b"putenv", b"_dynamo", b"_inductor", b"set_default"),
        "import torch._dynamo",
    )
}
"""Library -> (word, changes, import statement). If the program's source contains `word`, the library will execute the
import statement when it is first used. If the source contains one of `changes`, the program may change what it does.
"""
_IMPORTED_BY_US = "rearview"
"""The library that every replay has imported before the program begins."""
_MAX_FILES = 8
"""Most files of the project that are read to find leading imports in modules that the script imports."""


def leading_imports(
    files: Mapping[str, bytes],
    entry: str,
    *,
    module: bool = False,
    ran: Collection[str] | None = None,
) -> tuple[str, ...]:
    r"""Return the import statements of `LIBRARIES` with which a program begins.

    `files` is path -> content. `entry` is the path of the script in `files`, or the name of the module if `module`;
    `ran` are the paths of the files that the run executed, or None if that is unknown. The imports end before the
    first import of a library that may not work after a fork, and before the first statement that has an effect. So the
    program has done nothing before these imports, and executing them earlier changes nothing.

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
    """Yield the import statements that libraries will execute when they are first used (`_LAZY`).

    `statements` are the imports of the program, `texts` its files. An import is left out if the program may change
    what the import does.
    """
    libraries = {statement.split()[1].partition(".")[0] for statement in statements}
    for library, (use, changes, statement) in _LAZY.items():
        changed = any(change in text for text in texts for change in changes)
        if library in libraries and any(use in text for text in texts) and not changed:
            yield statement


class _ImportReader:
    """Reads the imports with which files of a version begin, and follows imports of the project's own modules."""

    def __init__(self, files: Mapping[str, bytes], search: str) -> None:
        self._files = files
        self._search = search
        """Folder in which the program looks for modules of the project, relative to the project."""
        self._read_paths: set[str] = set()

    def packages(self, name: str) -> Iterator[str]:
        """Yield the paths of the files that Python executes to import the module `name` of the project, in order."""
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
        """Return (leading imports of the file `path`, whether the file contains nothing else).

        If the file has been read before, return no imports and False.
        """
        if (
            path in self._read_paths
            or len(self._read_paths) >= _MAX_FILES
            or path not in self._files
        ):
            return [], False
        self._read_paths.add(path)
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
        """Return the leading imports of the files that Python executes to import the module `name` of the project."""
        statements: list[str] = []
        for path in self.packages(name):
            imports, only_imports = self.read(path)
            statements += imports
            if not only_imports:
                break
        return statements

    def _is_own(self, name: str) -> bool:
        """Return True if the project has a module or package `name`; Python imports it and not a library `name`."""
        folder = self._path(name) + "/"
        return self._path(f"{name}.py") in self._files or any(
            path.startswith(folder) for path in self._files
        )

    def _path(self, *parts: str) -> str:
        return str(PurePosixPath(self._search, *parts))


@lru_cache(maxsize=1024)
def _first_imports(text: bytes) -> tuple[str | None, ...]:
    """Return the import statements with which a file begins, and None as the last item if other code follows.

    Docstrings and assignments of constants between the imports are skipped. Each imported module has its own
    statement.
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
    """Return True if a statement is a docstring or binds variables to constants."""
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
class LeadingImports:
    """The imports with which the program of a run begins, and the settings under which they are executed.

    The replays of all runs in which these are equal can be forked from one process.
    """

    imports: tuple[str, ...] = ()
    hash_seed: str = ""
    """Value of PYTHONHASHSEED."""
    threads: tuple[tuple[str, str], ...] = ()
    """(name, value) of each environment variable that sets the number of threads."""


def leading_imports_of(
    run: Run, files: Mapping[str, bytes], recorded_root: str
) -> LeadingImports | None:
    """Return the leading imports of replays of `run`, or None if the replays cannot share them.

    `files` (path -> content) is the version that the replays execute; `recorded_root` is the folder that the project
    had when the run was recorded.
    """
    facts = run.facts
    if not facts.watched or is_notebook(facts.target or ""):
        return None
    entry = (facts.target or "") if facts.module else script_of(run, recorded_root)
    imports = leading_imports(files, entry, module=facts.module, ran=run.end.files)
    threads = tuple(sorted(facts.threads.items()))
    return LeadingImports(imports, facts.hash_seed, threads)


def import_seconds(run: Run, leading: LeadingImports) -> float:
    """Return how many seconds the recorded run spent on the imports in `leading`."""
    modules = [f"{statement.split()[1]}." for statement in leading.imports]
    seconds = run.end.imports
    return sum(
        spent
        for name, spent in seconds.items()
        if any(module.startswith(f"{name}.") for module in modules)
    )


def runs_with_earlier_imports(leading_by_run: Mapping[str, LeadingImports | None]) -> set[str]:
    """Return the ids of the runs whose leading imports are equal to those of an earlier run in `leading_by_run`.

    >>> torch, numpy = LeadingImports(("import torch",)), LeadingImports(("import numpy",))
    >>> runs_with_earlier_imports({"a": torch, "b": None, "c": torch, "d": numpy})
    {'c'}
    """
    earlier_imports: set[LeadingImports] = set()
    sharing_runs: set[str] = set()
    for run, leading in leading_by_run.items():
        if leading in earlier_imports:
            sharing_runs.add(run)
        elif leading is not None:
            earlier_imports.add(leading)
    return sharing_runs


@dataclass(frozen=True, slots=True)
class SetupText:
    """Hashes of the statements of a script before its main loop."""

    prefixes: tuple[str, ...] = ()
    """Item k is a hash of the first k statements, and of inputs that are known before they run: arguments, working
    folder, modules of the project. Runs in which item k is equal can share the first k statements.
    """
    cheap_statements: int = 0
    """Number of first statements that only import libraries, define functions or assign constants."""


def setup_text(run: Run, files: Mapping[str, bytes], recorded_root: str) -> SetupText:
    """Return the hashes of the set-up of `run`; empty if the run did not execute a script in `files`.

    `files` (path -> content) is the version that replays execute; `recorded_root` is the folder that the project had
    when the run was recorded.
    """
    facts = run.facts
    script = script_of(run, recorded_root)
    if facts.module or facts.cells or script not in files:
        return SetupText()
    modules = {
        path: data for path, data in files.items() if path.endswith(".py") and path != script
    }
    executed = {path: modules[path] for path in run.end.files or modules if path in modules}
    own_modules = {PurePosixPath(path).parts[0].removesuffix(".py") for path in modules}
    started = (script, facts.target, run.argv, sorted(facts.given.items()), run.cwd, recorded_root)
    rules = (facts.clock, facts.autolog, facts.hash_seed, sorted(facts.threads.items()))
    digest = _digest(started, rules)
    statements = _statements(files[script], run.end.main.site or "", script)
    prefixes, cheap_statements = [digest], 0
    with_modules = False
    for number, text in enumerate(statements):
        if not with_modules and imported_modules(text) & own_modules:
            with_modules = True
            digest = _digest(
                digest, sorted((path, _digest(data)) for path, data in executed.items())
            )
        digest = _digest(digest, code_hash(text))
        prefixes.append(digest)
        if (
            cheap_statements == number
            and only_defines(text)
            and not imported_modules(text) & own_modules
        ):
            cheap_statements = number + 1
    return SetupText(tuple(prefixes), cheap_statements)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@lru_cache(maxsize=256)
def _statements(data: bytes, main: str, path: str) -> tuple[str, ...]:
    """Return the text of each top-level statement of a script before the statement that contains the loop `main`.

    If that loop is in a function or in another file, return all top-level statements.
    """
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
    """Protocol of a run to be replayed, with the facts about its set-up; `prepare_run.PreparedRun` implements it."""

    @property
    def request(self) -> RunRequest:
        """The values that are requested of the run."""

    @property
    def leading_imports(self) -> LeadingImports | None:
        """The imports with which the program begins; None if other replays cannot share them."""

    @property
    def setup(self) -> SetupText:
        """Hashes of the statements before the main loop."""

    @property
    def setup_seconds(self) -> float:
        """Seconds of the statements before the main loop, without the leading imports."""


@dataclass(frozen=True, slots=True)
class SharedStages:
    """The stages that the segments of a plan share: consecutive statements before the main loop (`SetupStage`)."""

    stages: Mapping[str, tuple[SetupStage, ...]]
    """Id of a run -> the shared stages of its set-up, in the order of execution."""
    sentences: tuple[str, ...] = ()
    """Sentences for the user: which set-ups are shared, and why others are not."""


def shared_stages(
    prepared: Mapping[str, RunSetup],
    segments: Sequence[Segment],
    obstacles: Mapping[str, SharingObstacle],
) -> SharedStages:
    """Return the stages of the set-up that the `segments` of a plan share.

    `obstacles` is key of a stage -> obstacle that stopped its sharing in an earlier backfill.
    """
    counts = Counter(segment.run for segment in segments)
    worth = {
        run: prepared[run]
        for run in counts
        if prepared[run].leading_imports is not None
        and prepared[run].setup_seconds >= WORTH_SHARING
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
    """Return id of a run -> numbers k: it shares its first k statements with more runs than its first k + 1.

    The numbers rise. Numbers that only count `cheap_statements` are left out.
    """
    holders = Counter(prefix for text in texts.values() for prefix in text.prefixes)
    depths: dict[str, list[int]] = {}
    for run, text in texts.items():
        own_depths = []
        for depth in range(text.cheap_statements + 1, len(text.prefixes)):
            shared = holders[text.prefixes[depth]]
            following = holders[text.prefixes[depth + 1]] if depth + 1 < len(text.prefixes) else 0
            if shared > 1 and following < shared:
                own_depths.append(depth)
        depths[run] = own_depths
    return depths


def _loops_of(prepared: RunSetup) -> tuple[str, ...]:
    """Return the ids of loops before which a shared set-up ends: the main loop, and outermost loops around probes."""
    request = prepared.request
    chains = [
        chain for probe in request.requested for chain in (*probe.paths, *probe.feeding_paths)
    ]
    loops = [request.main_loop or "", *(chain[0] for chain in chains if chain)]
    return tuple(dict.fromkeys(loop for loop in loops if loop))


def _is_divided(prepared: RunSetup, segments: Sequence[Segment]) -> bool:
    """Return True if each of the `segments` of the run runs a part of its main loop, and none is a rerun."""
    request = prepared.request
    run_segments = [segment for segment in segments if segment.run == request.run.id]
    return request.main_entered_once and all(
        segment.loop == request.main_loop and not segment.rerun for segment in run_segments
    )


class SharingObstacle(msgspec.Struct, frozen=True):
    """The reason why a stage (statements before the main loop) was not shared, or not to its end."""

    text: str
    usable: bool = True
    """Whether the statements of the stage before the obstacle can be shared."""


def read_obstacles(cache: Path) -> dict[str, SharingObstacle]:
    """Return key of a stage of a set-up -> obstacle that stopped its sharing in an earlier backfill.

    Return an empty dictionary if none are stored in the folder `cache`.
    """
    try:
        data = (cache / _FILE).read_bytes()
        return msgspec.json.decode(data, type=dict[str, SharingObstacle])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def save_obstacles(cache: Path, reasons: Mapping[str, tuple[str, bool]]) -> None:
    """Store why stages of set-ups were not shared; `reasons` is key of a stage -> (text, usable) of `SharingObstacle`.

    If the folder `cache` cannot be written, nothing is stored, and the next backfill meets these obstacles again.
    """
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
