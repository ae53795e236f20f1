"""Which runs begin alike, so that their replays can share a start, and what that spares.

The imports that a program begins with: what segments of many versions have in common.

Which runs begin alike, so that their replays can share a start, and what that spares.
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
"""Installed libraries that a process may have imported from which another is forked."""
_LAZY = {
    "torch": (
        b"optim",
        (b"environ", b"putenv", b"_dynamo", b"_inductor", b"set_default"),
        "import torch._dynamo",
    )
}
"""By library: the word that stands for using it so that it imports more, words that speak against
having that imported earlier, and the import."""
_ALWAYS = "rearview"
_MOST = 8
"""Files of the project that are followed into one another."""


def leading(
    files: Mapping[str, bytes],
    entry: str,
    *,
    module: bool = False,
    ran: Collection[str] | None = None,
) -> tuple[str, ...]:
    r"""Return the imports of installed libraries that come before all else a program does.

    `entry` is the path of its script among `files`, or the name of its module; `ran` are those of
    them that the run executed, if that is known. Nothing of the program has been executed when these are, so whoever executes them first changes nothing.
    They end where something else stands: a library that is not known to be harmless, or any
    statement that could make an import mean something else.

    >>> text = b"'''Train.'''\nimport os, torch\nfrom torch import nn\nRATE = 0.1\nimport jax, numpy"
    >>> leading({"train.py": text}, "train.py")
    ('import torch', 'from torch import nn')
    >>> leading({"train.py": b"import os\nos.nice(1)\nimport torch"}, "train.py")
    ()
    """
    search = "" if module else str(PurePosixPath(entry).parent)
    reader = _ImportReader(files, "" if search == "." else search)
    taken = []
    for path in reader.packages(entry) if module else [entry]:
        found, whole = reader.read(path)
        taken += found
        if not whole:
            break
    texts = [files[path] for path in ran if path in files] if ran else list(files.values())
    return (*dict.fromkeys(taken), *_later(taken, texts))


def _later(taken: Collection[str], texts: Collection[bytes]) -> Iterator[str]:
    """Yield what libraries import by themselves as soon as they are used.

    The program may have done something by then that such an import heeds: there it is left out.
    """
    libraries = {text.split()[1].partition(".")[0] for text in taken}
    for library, (word, others, statement) in _LAZY.items():
        heeded = any(other in text for text in texts for other in others)
        if library in libraries and any(word in text for text in texts) and not heeded:
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
        """Return the leading imports of a file, and whether it consists of nothing else."""
        if path in self._seen or len(self._seen) >= _MOST or path not in self._files:
            return [], False
        self._seen.add(path)
        taken: list[str] = []
        for text in _beginning(self._files[path]):
            if text is None:
                return taken, False
            name = text.split()[1]
            top = name.partition(".")[0]
            if self._is_own(top):
                return taken + self._follow(name), False
            if top in LIBRARIES:
                taken.append(text)
            elif top not in sys.stdlib_module_names and top != _ALWAYS:
                return taken, False
        return taken, True

    def _follow(self, name: str) -> list[str]:
        """Return the leading imports of a module of the project, which is executed next."""
        taken: list[str] = []
        for path in self.packages(name):
            found, whole = self.read(path)
            taken += found
            if not whole:
                break
        return taken

    def _is_own(self, name: str) -> bool:
        """Say whether the project has a module of that name where it is looked for first."""
        folder = self._path(name) + "/"
        return self._path(f"{name}.py") in self._files or any(
            path.startswith(folder) for path in self._files
        )

    def _path(self, *parts: str) -> str:
        return str(PurePosixPath(self._search, *parts))


@lru_cache(maxsize=1024)
def _beginning(text: bytes) -> tuple[str | None, ...]:
    """Return the import statements that a file begins with, and None last if it then goes on.

    What only gives names to constants in between is passed by.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return (None,)
    found: list[str | None] = []
    for node in body:
        if isinstance(node, ast.Import):
            found += [ast.unparse(ast.Import([alias])) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(ast.unparse(node))
        elif not _does_nothing(node):
            return (*found, None)
    return tuple(found)


def _does_nothing(node: ast.stmt) -> bool:
    """Say whether a statement changes nothing but the program's own names."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and all(isinstance(one, ast.Name) and not one.id.startswith("__") for one in node.targets)
    )


@dataclass(frozen=True, slots=True)
class Lead:
    """How the replays of a run begin. Those of two runs with the same lead can share it."""

    imports: tuple[str, ...] = ()
    hash_seed: str = ""
    threads: tuple[tuple[str, str], ...] = ()


def lead_of(run: Run, files: Mapping[str, bytes], home: str) -> Lead | None:
    """Return how replays of a run begin that execute `files`; None if they can share nothing.

    `home` is where the project was when it ran.
    """
    facts = run.facts
    if not facts.get("watched", True) or is_notebook(str(facts.get("target", ""))):
        return None
    module = bool(facts.get("module"))
    entry = str(facts.get("target", "")) if module else script_of(run, home)
    found = leading(files, entry, module=module, ran=facts.get("end", {}).get("files"))
    threads = tuple(sorted(facts.get("threads", {}).items()))
    return Lead(found, str(facts.get("hash_seed")), threads)


def waited(run: Run, lead: Lead) -> float:
    """Return how many seconds a run waited for the imports that its replays can share."""
    modules = [f"{statement.split()[1]}." for statement in lead.imports]
    took: Mapping[str, float] = run.facts.get("end", {}).get("imports", {})
    return sum(
        each for name, each in took.items() if any(one.startswith(f"{name}.") for one in modules)
    )


def following(leads: Mapping[str, Lead | None]) -> set[str]:
    """Return the runs that begin like one before them.

    >>> same = Lead(("import torch",))
    >>> following({"a": same, "b": None, "c": same, "d": Lead(("import numpy",))})
    {'c'}
    """
    seen: set[Lead] = set()
    found: set[str] = set()
    for run, lead in leads.items():
        if lead in seen:
            found.add(run)
        elif lead is not None:
            seen.add(lead)
    return found
