"""What the source of a run imports: whether it is still installed here."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import PurePosixPath


def lost(source: Mapping[str, bytes], ran: Collection[str]) -> str:
    """Return why a run cannot be replayed for want of a package; empty if nothing is missing.

    `source` are the files of its version, `ran` those of them that the run executed. Only what is
    imported in any case counts: not in a function, not under `try`. A program that changes where
    modules are looked for is left to find them itself.
    """
    files = [source[path] for path in ran if path in source]
    if any(b"sys.path" in text or b"addsitedir" in text for text in files):
        return ""
    own = {part.removesuffix(".py") for path in source for part in PurePosixPath(path).parts}
    wanted = {name for text in files for name in _imported(text)} - own
    gone = sorted(name for name in wanted if not _there(name))
    if not gone:
        return ""
    them = "which is" if len(gone) == 1 else "which are"
    return (
        f"it imports {', '.join(gone)}, {them} not installed here any more; install what it had "
        "(`pip install …`), or replay it in the environment it ran in"
    )


@lru_cache(maxsize=512)
def _imported(text: bytes) -> frozenset[str]:
    """Return the packages that a file imports as soon as it is executed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


@lru_cache(maxsize=512)
def _there(name: str) -> bool:
    if name in sys.builtin_module_names or name in sys.stdlib_module_names or name in sys.modules:
        return True
    with contextlib.suppress(ImportError, ValueError):
        # the second knows of editable installations; neither imports anything
        return PathFinder.find_spec(name) is not None or find_spec(name) is not None
    return False
