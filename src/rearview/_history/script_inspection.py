"""Inspect a script or notebook on disk: read its text and the project files that it imports, and find loops and logged names."""

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
"""Most files that are read."""


def inspect_script(script: Path, root: Path | None = None) -> Inspection:
    """Return what `source.inspection` finds in a script or notebook and the project files that it imports.

    The project is that of `rearview run`, unless `root` gives another folder.
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
    """Return the file that `python -m module` would run from a folder."""
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
    """Add a file of the project, and the project files that it imports, to `files`."""
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
    """Yield the files that a module imports from `folders` or from its own folder."""
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
                for depth in range(1, len(parts) + 1):  # a package is imported before its modules
                    target = base.joinpath(*parts[:depth])
                    candidates = (target.with_name(f"{target.name}.py"), target / "__init__.py")
                    yield from (candidate for candidate in candidates if candidate.is_file())
