"""Inspect a script or notebook on disk without running it: find the loops and logged names in its source.

The project files that the script imports are inspected too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rearview.errors import UsageError
from rearview.model.run import is_notebook
from rearview.source import notebooks
from rearview.source.inspection.inspection import Inspection, inspect
from rearview.source.text import decode, try_parse
from rearview.store.project import root_of

MAX_FILES = 500
"""Maximum number of files that are read for one script."""


def inspect_script(script: Path, root: Path | None = None) -> Inspection:
    """Return the loops, logged names etc. in a script or notebook and in the project files that it imports.

    `root` is the folder of the project; the default is the one that `rearview run` would take.
    """
    _check_is_file(script)
    root = (root or root_of(script)).resolve()
    script = script.resolve()
    if not script.is_relative_to(root):
        root = script.parent
    folders = tuple(dict.fromkeys((script.parent, root, root / "src")))
    files: dict[str, str] = {}
    name = script.relative_to(root).as_posix()
    if is_notebook(name):
        return _inspect_notebook(script, name, root, folders)
    _read(script, root, folders, files)
    return inspect(name, files)


def script_of_module(module: str, folder: Path) -> Path:
    """Return the file in `folder` that `python -m module` would run from there; raise if there is none."""
    target = folder.joinpath(*module.split("."))
    for file in (target / "__main__.py", target.with_name(f"{target.name}.py")):
        if file.is_file():
            return file
    raise UsageError(
        f"There is no module {module} of this project in {folder}. Name it as you would for "
        "`python -m`, in the folder from which you start it.",
        slug="no-script",
    )


def _check_is_file(script: Path) -> None:
    if script.is_dir():
        raise UsageError(
            f"{script} is a folder. Name the script in it, or `-m {script.name}` for its "
            "`__main__.py`.",
            slug="no-script",
        )
    if not script.is_file():
        raise UsageError(
            f"There is no file {script}. Name the script as you would for `python`.",
            slug="no-script",
        )


def _inspect_notebook(script: Path, name: str, root: Path, folders: tuple[Path, ...]) -> Inspection:
    notebook = notebooks.parse(script.read_bytes(), name)
    if notebook.language != "python":
        raise UsageError(
            f"{name} is a notebook in {notebook.language}; Rearview records Python.",
            slug="no-script",
        )
    program = f"{name}.py"
    files = {program: notebook.text}
    for imported in _imported(notebook.text, script, folders):
        if _below(imported, root):
            _read(imported, root, folders, files)
    return inspect(program, files, {program: notebook})


def _read(script: Path, root: Path, folders: tuple[Path, ...], files: dict[str, str]) -> None:
    """Add `script` and the project files that it imports, directly or not, to `files` (path below `root` -> text)."""
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


def _below(file: Path, root: Path) -> bool:
    return file.resolve().is_relative_to(root) and file.is_relative_to(root)


def _imported(text: str, file: Path, folders: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files in `folders` that the source `text` of `file` imports; for relative imports, near `file`."""
    parsed = try_parse(text)
    if isinstance(parsed, str):
        return
    for node in ast.walk(parsed.tree):
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
                for depth in range(1, len(parts) + 1):  # import a.b.c runs a, a.b and a.b.c
                    target = base.joinpath(*parts[:depth])
                    candidates = (target.with_name(f"{target.name}.py"), target / "__init__.py")
                    yield from (candidate for candidate in candidates if candidate.is_file())
