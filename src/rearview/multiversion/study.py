"""A study: versions of one program, each a list of cells with their measurements.

Versions come from notebooks and scripts on disk, from recorded runs, or from a package.
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
"""Most files that a study may have, its programs not counted."""


@dataclass(frozen=True, slots=True)
class StudyCell:
    """One cell of one version."""

    text: str
    title: str
    code: str
    """Hash of its code."""
    outputs: tuple[dict[str, Any], ...] | None = None
    """The outputs that the author saw below the cell, as notebooks store them; None: not recorded."""
    seconds: float | None = None
    size: int | None = None
    """Bytes of the state after it, as measured."""
    reads: tuple[str, ...] | None = None
    """Files of the project that it read, relative to the project; None: not recorded."""
    lineage: CellLineage | None = None
    """Inputs, cost and resulting variables of its recorded run; None: not recorded."""
    parts: int = 1
    """Number of cells, up to this one, into which a loop of the author was cut; 1 if it was not cut."""
    may_fail: bool = False
    """Whether it is marked as one that raises (the tag `raises-exception`)."""

    def fails_with(self, name: str) -> bool:
        """Return True if the author's cell raised an error of this name, or is marked as one that raises."""
        return self.may_fail or any(
            output.get("output_type") == "error" and output.get("ename") == name
            for output in self.outputs or ()
        )


@dataclass(frozen=True, slots=True)
class FileRef:
    """One file that versions may read: its content hash, and where its bytes are."""

    digest: str
    size: int
    place: Path | None = None
    """File with these bytes; None if only the hash is known."""


@dataclass(frozen=True, slots=True)
class StudyVersion:
    """One version of the program."""

    name: str
    program: str
    """Path of the script or notebook in the project."""
    cells: tuple[StudyCell, ...]
    notebook: bool = False
    cwd: str = ""
    """Folder it runs in, relative to the project."""
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that the recorded run read; None: not set."""
    files: Mapping[str, FileRef] = field(default_factory=dict)
    """Every file of the project, by path; programs of other versions may be imported, too."""
    inputs: frozenset[str] | None = None
    """Files that the recorded run read or may have read; None: any of them."""
    printed: str | None = None
    """Everything the recorded run printed; None: not recorded."""
    run: str = ""
    """Id of the recorded run it comes from."""


@dataclass(frozen=True, slots=True)
class Study:
    """Versions that are replayed together."""

    versions: tuple[StudyVersion, ...]

    def only(self, names: Sequence[str]) -> Study:
        """Return the study with the named versions only; raise if one does not exist."""
        by_name = {version.name: version for version in self.versions}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise UsageError(
                f"There is no version {missing[0]!r}. The versions are {', '.join(by_name)}.",
                slug="no-version",
            )
        return Study(tuple(by_name[name] for name in dict.fromkeys(names)))


def imports(study: Study, module: str) -> bool:
    """Return True if a program of a study, or a module that is packed with it, imports a module."""
    if any(module in imported_modules(c.text) for v in study.versions for c in v.cells):
        return True
    places = {
        ref.place for v in study.versions for name, ref in v.files.items() if name.endswith(".py")
    }
    return any(module in imported_modules(p.read_text("utf-8", "replace")) for p in places if p)


def digest_of(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def notebook_cells(data: str, path: str) -> tuple[StudyCell, ...]:
    """Return the code cells of a notebook; raise if it is not a Python notebook."""
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
            warnings.simplefilter("ignore")  # about cells without ids: unused here
            content = nbformat.reads(data, as_version=4)
        raw = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        metadata = content.get("metadata", {})
        language = str(
            metadata.get("language_info", {}).get("name")
            or metadata.get("kernelspec", {}).get("language")
            or "python"
        )
        cells = []
        for cell in raw:
            text = cell["source"]
            if not isinstance(text, str):
                raise TypeError("the source of a cell is not text")  # noqa: TRY301
            tags = cell.get("metadata", {}).get("tags", ())
            if text.strip() and "skip-execution" not in tags:
                executed = cell.get("execution_count") is not None or bool(cell.get("outputs"))
                outputs = tuple(_plain(output) for output in cell.get("outputs", ()))
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


def _plain(value: Any) -> Any:
    """Return a value of a notebook as plain dicts, lists and scalars."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _title(text: str) -> str:
    for line in text.splitlines():
        bare = line.strip()
        if bare and not bare.startswith("#"):
            return bare if len(bare) <= 60 else bare[:57] + "..."
    return "(empty)"


def program_cells(data: bytes, path: str) -> tuple[StudyCell, ...]:
    """Return the cells of a script or notebook."""
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


def from_files(files: Iterable[Path], *, argv: Sequence[str] = ()) -> Study:
    """Return the study of scripts and notebooks, each a version.

    Its files are those of the folder of the programs, and what programs name outside it by a relative path
    (`../data`). Notebooks run in their own folder. Scripts run in the folder of all programs, or in the
    current folder above it if that is where the files are that they name.
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
    start = _script_folder(base, {text for path in scripts for text in texts[path]})
    named: set[Path] = set()
    for path in paths:
        folder = start if path in scripts else path.parent
        modules = {name for cell in cells[path] for name in imported_modules(cell.text)}
        for text in texts[path]:
            place = Path(os.path.normpath(folder / text))
            # of a folder above, which may be searched for modules, only these are taken
            inside = [place / name for module in modules for name in (module, f"{module}.py")]
            named.update(inside if base.is_relative_to(place) else [place])
    named = {place for place in named if place.exists() and not place.is_relative_to(base)}
    root = Path(os.path.commonpath([base, start, *named]))
    others = project_files(root, [base, *sorted(named)])
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
                files=others,
            )
        )
    return Study(tuple(versions))


def _relative_paths(text: str) -> Iterator[str]:
    """Yield the texts in a cell that may be relative paths."""
    try:
        tree = ast.parse(text)
    except UNPARSED:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = node.value
            if 0 < len(value) < 400 and value.isprintable() and not value.startswith(("/", "~")):
                yield value


def _script_folder(base: Path, texts: set[str]) -> Path:
    """Return the folder in which scripts run: the current one if they name more files from there."""
    here = Path.cwd()
    if not base.is_relative_to(here):
        return base
    found = {folder: sum((folder / text).is_file() for text in texts) for folder in (base, here)}
    return here if found[here] > found[base] else base


def _short_names(paths: Sequence[str]) -> list[str]:
    """Return the paths without suffix if they stay distinct, else unchanged."""
    short = [str(Path(path).with_suffix("")) for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def project_files(root: Path, places: Sequence[Path]) -> dict[str, FileRef]:
    """Return the files at and below some places, without version control, environments and caches.

    They are named relative to `root`. Links to folders are followed once. The hash is left empty: files on
    disk are the same for all versions.
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
            about = Path(folder).stat()
            if (about.st_dev, about.st_ino) in visited:  # a link to a folder above it
                folders.clear()
                continue
            visited.add((about.st_dev, about.st_ino))
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
    """Cut top-level `for … in range(n)` loops where other versions of the same loop end.

    A version that trains ten more epochs then continues the path of the shorter version. Only loops whose
    bounds are plain numbers are cut, and only without `break`, `else` or `return`, so that the parts
    together do exactly what the loop does.
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
                cells.extend(_parts(cell, loop, bounds))
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
    if len(bounds) != len(call.args) or _leaves(node.body):
        return None
    start, stop = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    if stop <= start:
        return None
    rest = ast.dump(node.target) + "".join(map(ast.dump, node.body))
    key = hashlib.sha256(f"{start} {rest}".encode()).hexdigest()
    return _Loop(key, start, stop, node)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Return True if a statement may leave the loop early."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Break, ast.Return, ast.Await, ast.AsyncFor, ast.AsyncWith)):
                return True
    return False


def _parts(cell: StudyCell, loop: _Loop, stops: Sequence[int]) -> list[StudyCell]:
    """Return the cell cut at these iterations; the last part has the outputs of them all."""
    lines = cell.text.splitlines(keepends=True)
    head = loop.node.iter
    row = head.lineno - 1
    if head.end_lineno != head.lineno:
        return [cell]
    line = lines[row].encode()
    parts, begin = [], loop.start
    for stop in stops:
        new = (
            line[: head.col_offset]
            + f"range({begin}, {stop})".encode()
            + line[head.end_col_offset :]
        )
        text = "".join((*lines[:row], new.decode(), *lines[row + 1 :]))
        share = (stop - begin) / (loop.stop - loop.start)
        parts.append(
            StudyCell(
                text,
                f"{_title(cell.text)} [{begin}:{stop}]",
                hashlib.sha256(f"{loop.key} {begin} {stop}".encode()).hexdigest()[:32],
                seconds=None if cell.seconds is None else cell.seconds * share,
                size=cell.size,
                reads=cell.reads,
                lineage=_part_of(cell.lineage, share),
            )
        )
        begin = stop
    last = replace(parts[-1], outputs=cell.outputs, parts=len(parts))
    if cell.lineage is not None and last.lineage is not None:
        left = replace(last.lineage, variables=cell.lineage.variables)
        last = replace(last, lineage=left)
    return [*parts[:-1], last]


def _part_of(lineage: CellLineage | None, share: float) -> CellLineage | None:
    """Return the lineage of a part of a loop; values of variables between two parts were not recorded."""
    if lineage is None:
        return None
    return replace(lineage, seconds=lineage.seconds * share, variables={})
