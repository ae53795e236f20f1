"""The imports that a program starts with: replays that start with the same ones can share them.

Importing a library such as torch takes seconds. One process imports the leading imports of several
replays once and is then forked for each of them. That is done only for imports that come before anything
else that the program does, and only for libraries that are known to tolerate it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from rearview.execute.replay_jobs import script_of
from rearview.model import Run
from rearview.model.run import is_notebook

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
    """Yield imports that libraries will do by themselves when they are used.

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
