"""Read a script and the project files that it imports, and inspect their loops and logged names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rearview.errors import UsageError
from rearview.source.inspection import Inspection, inspect
from rearview.source.text import decode

MAX_FILES = 500
"""At most this many files are read."""


def inspect_script(script: Path, root: Path | None = None) -> Inspection:
    """Inspect `script` and the files below `root` that it imports; see `source.inspection`."""
    if not script.is_file():
        raise UsageError(
            f"There is no file {script}. Name the script as you would for `python`.",
            slug="no-script",
        )
    script = script.resolve()
    root = (root or script.parent).resolve()
    if not script.is_relative_to(root):
        root = script.parent
    folders = (script.parent, root)
    files: dict[str, str] = {}
    remaining = [script]
    while remaining and len(files) < MAX_FILES:
        file = remaining.pop()
        name = file.relative_to(root).as_posix()
        if name in files:
            continue
        files[name] = decode(file.read_bytes())
        remaining.extend(
            imported for imported in _imported(files[name], file, folders) if _below(imported, root)
        )
    return inspect(script.relative_to(root).as_posix(), files)


def _below(file: Path, root: Path) -> bool:
    return file.resolve().is_relative_to(root)


def _imported(text: str, file: Path, folders: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files that a module imports from `folders` or from its own folder."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, bases = [alias.name for alias in node.names], folders
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            bases = folders
            if node.level:
                bases = tuple(file.parents[node.level - 1 : node.level])
        else:
            continue
        for parts in (name.split(".") for name in names if name):
            for base in bases:
                for depth in range(1, len(parts) + 1):  # a package is imported before its modules
                    target = base.joinpath(*parts[:depth])
                    candidates = (target.with_name(f"{target.name}.py"), target / "__init__.py")
                    yield from (candidate for candidate in candidates if candidate.is_file())
