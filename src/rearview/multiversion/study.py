"""A study: versions of one program that are replayed together, each a list of cells with their measurements.

Versions come from notebooks and scripts on disk, from recorded runs, or from a study package (`.rvz` file).
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rearview.errors import SourceError, UsageError
from rearview.model.cell_lineage import CellLineage
from rearview.source.cells import UNPARSED, code_hash, imported_modules, split_into_cells

SKIPPED_FOLDERS = frozenset(
    {".git", ".rearview", ".venv", "venv", "__pycache__", "node_modules", ".ipynb_checkpoints"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache", ".tox"}
)
MOST_FILES = 20_000
"""Largest number of files that a study made from programs on disk may have."""


@dataclass(frozen=True, slots=True)
class StudyCell:
    """One cell of one version: the code of a notebook cell, or of some top-level statements of a script."""

    text: str
    title: str
    code: str
    """Hash of the cell's code."""
    outputs: tuple[dict[str, Any], ...] | None = None
    """The outputs that the author saw below the cell, each as in a notebook file; None if not recorded."""
    seconds: float | None = None
    size: int | None = None
    """Measured size in bytes of the state after the cell; None if not measured."""
    reads: tuple[str, ...] | None = None
    """Files of the project that the cell read, relative to the project; None if not recorded."""
    lineage: CellLineage | None = None
    """Inputs, costs and resulting variables of the cell in the recorded run; None if not recorded."""
    parts: int = 1
    """In the last of the cells into which the author's cell (a loop) was split: number of these cells; else 1."""
    may_fail: bool = False
    """Whether the author tagged the notebook cell with `raises-exception`."""

    def fails_with(self, name: str) -> bool:
        """Return True if the author's cell raised an exception named `name`, or is tagged with `raises-exception`."""
        return self.may_fail or any(
            output.get("output_type") == "error" and output.get("ename") == name
            for output in self.outputs or ()
        )


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that versions may read: hash and size of its content, and the path of a file with this content."""

    digest: str
    size: int
    file: Path | None = None
    """Path of a file with this content; None if only the hash is known."""


@dataclass(frozen=True, slots=True)
class StudyVersion:
    """One version of the program, with everything that a replay of this version needs."""

    name: str
    program: str
    """File path of the script or notebook, relative to the project."""
    cells: tuple[StudyCell, ...]
    notebook: bool = False
    cwd: str = ""
    """Folder in which the program runs, relative to the project."""
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variable that the recorded run read -> its value; None if the variable was not set."""
    files: Mapping[str, FileRef] = field(default_factory=dict)
    """File path in the project -> file, for all files of the project, including programs of other versions."""
    inputs: frozenset[str] | None = None
    """Paths of files that the recorded run read or may have read; None if it may have read any file."""
    printed: str | None = None
    """All text that the recorded run printed; None if not recorded."""
    run: str = ""
    """Id of the recorded run; empty if the version does not come from a recorded run."""


@dataclass(frozen=True, slots=True)
class Study:
    """A set of versions that are replayed together."""

    versions: tuple[StudyVersion, ...]

    def select_versions(self, names: Sequence[str]) -> Study:
        """Return a study of the versions `names` only, in this order; raise if one of them does not exist."""
        by_name = {version.name: version for version in self.versions}
        unknown_names = [name for name in names if name not in by_name]
        if unknown_names:
            raise UsageError(
                f"There is no version {unknown_names[0]!r}. The versions are {', '.join(by_name)}.",
                slug="no-version",
            )
        return Study(tuple(by_name[name] for name in dict.fromkeys(names)))


def imports_module(study: Study, module: str) -> bool:
    """Return True if a program or a Python file of `study` imports `module`."""
    if any(module in imported_modules(c.text) for v in study.versions for c in v.cells):
        return True
    places = {
        ref.file for v in study.versions for name, ref in v.files.items() if name.endswith(".py")
    }
    return any(module in imported_modules(p.read_text("utf-8", "replace")) for p in places if p)


def digest_of(file: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def notebook_cells(data: str, path: str) -> tuple[StudyCell, ...]:
    """Return the code cells of the notebook with the JSON text `data`; raise if it is no Python notebook.

    Empty cells and cells tagged with `skip-execution` are left out. `path` is for error messages.
    """
    try:
        import nbformat
    except ImportError as exc:
        raise UsageError(
            f"Reading {path} needs nbformat. Install it: pip install 'rearview[notebook]'.",
            slug="needs-nbformat",
        ) from exc
    import warnings

    try:
        with warnings.catch_warnings():
            # nbformat warns about cells without ids, but ids are not needed
            warnings.simplefilter("ignore")
            content = nbformat.reads(data, as_version=4)
        code_cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        metadata = content.get("metadata", {})
        language = str(
            metadata.get("language_info", {}).get("name")
            or metadata.get("kernelspec", {}).get("language")
            or "python"
        )
        cells = []
        for cell in code_cells:
            text = cell["source"]
            if not isinstance(text, str):
                raise TypeError("the source of a cell is not text")  # noqa: TRY301
            tags = cell.get("metadata", {}).get("tags", ())
            if text.strip() and "skip-execution" not in tags:
                executed = cell.get("execution_count") is not None or bool(cell.get("outputs"))
                outputs = tuple(_builtin_values(output) for output in cell.get("outputs", ()))
                cells.append(
                    StudyCell(
                        *(text, _title(text), code_hash(text), outputs if executed else None),
                        may_fail="raises-exception" in tags,
                    )
                )
    except Exception as exc:
        raise SourceError(
            f"{path} is not a notebook that can be read: {exc}. Open it in Jupyter and save it again.",
            slug="notebook-unreadable",
        ) from exc
    if language.lower() not in {"python", "ipython", "python3"}:
        raise SourceError(
            f"{path} is a notebook in {language}; only Python notebooks can be replayed.",
            slug="notebook-language",
        )
    return tuple(cells)


def _builtin_values(value: Any) -> Any:
    """Return a value of a notebook with nbformat's dictionary classes and tuples replaced by dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _builtin_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_builtin_values(item) for item in value]
    return value


def _title(text: str) -> str:
    for line in text.splitlines():
        bare = line.strip()
        if bare and not bare.startswith("#"):
            return bare if len(bare) <= 60 else bare[:57] + "..."
    return "(empty)"


def program_cells(data: bytes, path: str) -> tuple[StudyCell, ...]:
    """Return the cells of the script or notebook with the content `data`; raise if it cannot be read.

    The suffix of `path` tells notebooks from scripts.
    """
    if path.endswith(".ipynb"):
        try:
            return notebook_cells(data.decode("utf-8"), path)
        except UnicodeDecodeError as exc:
            raise SourceError(
                f"{path} is not a notebook that can be read: {exc}.", slug="notebook-unreadable"
            ) from exc
    import io
    import tokenize

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, ValueError, LookupError) as exc:
        raise SourceError(
            f"{path} is not a script that can be read: {exc}. Save it as UTF-8.",
            slug="script-unreadable",
        ) from exc
    return tuple(
        StudyCell(cell.text, cell.title, code_hash(cell.text)) for cell in split_into_cells(text)
    )


def study_from_files(files: Iterable[Path], *, argv: Sequence[str] = ()) -> Study:
    """Return a study with one version for each of the scripts and notebooks in `files`.

    Its files are all files in the common folder of the programs, and files elsewhere whose relative path is in the
    text of a program (`../data`). Notebooks run in their own folder. Scripts run in the common
    folder. They run in the current folder if it contains the common folder, and more of the relative paths in the
    scripts' texts are files there.
    """
    paths = [Path(file).absolute() for file in files]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"There is no file {path}.", slug="no-file")
    base = Path(os.path.commonpath([path.parent for path in paths]))
    cells = {path: program_cells(path.read_bytes(), path.name) for path in paths}
    texts = {
        path: {text for cell in cells[path] for text in _relative_paths(cell.text)}
        for path in paths
    }
    scripts = [path for path in paths if path.suffix != ".ipynb"]
    start = _start_folder(base, {text for path in scripts for text in texts[path]})
    outside_places: set[Path] = set()
    for path in paths:
        folder = start if path in scripts else path.parent
        modules = {name for cell in cells[path] for name in imported_modules(cell.text)}
        for text in texts[path]:
            place = Path(os.path.normpath(folder / text))
            # `place` is a folder above the programs, perhaps for `sys.path`: take only imported modules from it
            module_files = [place / name for module in modules for name in (module, f"{module}.py")]
            outside_places.update(module_files if base.is_relative_to(place) else [place])
    outside_places = {
        place for place in outside_places if place.exists() and not place.is_relative_to(base)
    }
    root = Path(os.path.commonpath([base, start, *outside_places]))
    project = project_files(root, [base, *sorted(outside_places)])
    names = _short_names([path.relative_to(base).as_posix() for path in paths])
    versions = []
    for path, name in zip(paths, names, strict=True):
        program = path.relative_to(root).as_posix()
        folder = start if path in scripts else path.parent
        versions.append(
            StudyVersion(
                name,
                program,
                cells[path],
                notebook=program.endswith(".ipynb"),
                cwd="" if folder == root else folder.relative_to(root).as_posix(),
                argv=tuple(argv),
                files=project,
            )
        )
    return Study(tuple(versions))


def _relative_paths(text: str) -> Iterator[str]:
    """Yield the string literals in the code `text` that may be relative file paths."""
    try:
        tree = ast.parse(text)
    except UNPARSED:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = node.value
            if 0 < len(value) < 400 and value.isprintable() and not value.startswith(("/", "~")):
                yield value


def _start_folder(base: Path, texts: set[str]) -> Path:
    """Return the folder in which scripts run: `base`, or the current folder if more of the paths `texts` are in it."""
    current = Path.cwd()
    if not base.is_relative_to(current):
        return base
    counts = {
        folder: sum((folder / text).is_file() for text in texts) for folder in (base, current)
    }
    return current if counts[current] > counts[base] else base


def _short_names(paths: Sequence[str]) -> list[str]:
    """Return the file paths without their suffixes; with suffixes if two paths would become equal."""
    short = [str(Path(path).with_suffix("")) for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def project_files(root: Path, places: Sequence[Path]) -> dict[str, FileRef]:
    """Return file path relative to `root` -> file, for all files at and below the paths `places`.

    Folders of version control, virtual environments and caches are skipped. Links to folders are followed once.
    The hashes are empty: all versions read the same files on disk. Raise if there are more than MOST_FILES files.
    """
    refs: dict[str, FileRef] = {}
    visited: set[tuple[int, int]] = set()

    def add(file: Path) -> None:
        if len(refs) >= MOST_FILES:
            raise UsageError(
                f"{root} has more than {MOST_FILES} files. Put the versions into a folder of "
                "their own, with the files that they read.",
                slug="too-many-files",
            )
        if file.is_file():
            refs[file.relative_to(root).as_posix()] = FileRef("", file.stat().st_size, file)

    for place in places:
        if place.is_file():
            add(place)
        for folder, folders, names in os.walk(place, followlinks=True):
            status = Path(folder).stat()
            if (status.st_dev, status.st_ino) in visited:  # reached a second time, through a link
                folders.clear()
                continue
            visited.add((status.st_dev, status.st_ino))
            folders[:] = sorted(
                name
                for name in folders
                if name not in SKIPPED_FOLDERS and not (Path(folder) / name / "pyvenv.cfg").exists()
            )
            for name in sorted(names):
                add(Path(folder) / name)
    return refs


@dataclass(frozen=True, slots=True)
class _Loop:
    key: str
    start: int
    stop: int
    node: ast.For


def split_loops(study: Study) -> Study:
    """Return the study with top-level `for … in range(n)` loops split into several cells.

    A loop is split at the iterations where the same loop ends in other versions. A version that trains ten more
    epochs can then continue from the state of the shorter version. A loop is split only if its bounds are literal
    numbers and it has no `break`, `else` or `return`: only then do its parts together do exactly what the loop does.
    """
    loops = [[_loop(cell.text) for cell in version.cells] for version in study.versions]
    stops: dict[str, set[int]] = {}
    for per_version in loops:
        for loop in per_version:
            if loop is not None:
                stops.setdefault(loop.key, set()).add(loop.stop)
    versions = []
    for version, per_version in zip(study.versions, loops, strict=True):
        cells: list[StudyCell] = []
        for cell, loop in zip(version.cells, per_version, strict=True):
            bounds = [] if loop is None else sorted(s for s in stops[loop.key] if s <= loop.stop)
            if loop is None or len(stops[loop.key]) == 1:
                cells.append(cell)
            else:
                cells.extend(_split(cell, loop, bounds))
        versions.append(replace(version, cells=tuple(cells)))
    return Study(tuple(versions))


def _loop(text: str) -> _Loop | None:
    try:
        body = ast.parse(text).body
    except UNPARSED:
        return None
    if len(body) != 1 or not isinstance(body[0], ast.For) or body[0].orelse:
        return None
    node = body[0]
    call = node.iter
    if not (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "range"
        and 1 <= len(call.args) <= 2
        and not call.keywords
    ):
        return None
    bounds = [
        arg.value for arg in call.args if isinstance(arg, ast.Constant) and type(arg.value) is int
    ]
    if len(bounds) != len(call.args) or _may_end_early(node.body):
        return None
    start, stop = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    if stop <= start:
        return None
    loop_code = ast.dump(node.target) + "".join(map(ast.dump, node.body))
    key = hashlib.sha256(f"{start} {loop_code}".encode()).hexdigest()
    return _Loop(key, start, stop, node)


def _may_end_early(body: Sequence[ast.stmt]) -> bool:
    """Return True if `body` contains a statement that may end the loop early, or an asynchronous one."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Break, ast.Return, ast.Await, ast.AsyncFor, ast.AsyncWith)):
                return True
    return False


def _split(cell: StudyCell, loop: _Loop, stops: Sequence[int]) -> list[StudyCell]:
    """Return one cell per range of iterations; each ends before one of `stops`.

    The last cell has the outputs of the whole loop. Return `cell` alone if its `range(…)` call fills several lines.
    """
    lines = cell.text.splitlines(keepends=True)
    range_call = loop.node.iter
    line_index = range_call.lineno - 1
    if range_call.end_lineno != range_call.lineno:
        return [cell]
    line = lines[line_index].encode()
    parts, begin = [], loop.start
    for stop in stops:
        new_line = (
            line[: range_call.col_offset]
            + f"range({begin}, {stop})".encode()
            + line[range_call.end_col_offset :]
        )
        text = "".join((*lines[:line_index], new_line.decode(), *lines[line_index + 1 :]))
        fraction = (stop - begin) / (loop.stop - loop.start)
        parts.append(
            StudyCell(
                text,
                f"{_title(cell.text)} [{begin}:{stop}]",
                hashlib.sha256(f"{loop.key} {begin} {stop}".encode()).hexdigest()[:32],
                seconds=None if cell.seconds is None else cell.seconds * fraction,
                size=cell.size,
                reads=cell.reads,
                lineage=_lineage_of_part(cell.lineage, fraction),
            )
        )
        begin = stop
    last = replace(parts[-1], outputs=cell.outputs, parts=len(parts))
    if cell.lineage is not None and last.lineage is not None:
        lineage = replace(last.lineage, variables=cell.lineage.variables)
        last = replace(last, lineage=lineage)
    return [*parts[:-1], last]


def _lineage_of_part(lineage: CellLineage | None, fraction: float) -> CellLineage | None:
    """Return the lineage of a part of a loop, with the `fraction` of its seconds; None if `lineage` is None.

    It has no values of variables, which were recorded only after the whole loop.
    """
    if lineage is None:
        return None
    return replace(lineage, seconds=lineage.seconds * fraction, variables={})
