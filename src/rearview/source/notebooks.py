"""Convert a notebook to program text, and changed program text back to a notebook.

All code that reads programs (loops, probes, propagation) reads `study.ipynb` as a file `study.ipynb.py`. This
program text contains the code cells in order, each below a marker line. Magics and shell lines are replaced by the
calls that IPython translates them to. Outputs and execution counts are left out.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from rearview.errors import SourceError
from rearview.model.run import NOTEBOOK, is_notebook

PROGRAM = ".ipynb.py"
"""Suffix of the file name of a notebook's program text."""
PYTHON_BODIES = ("time", "capture")
"""Cell magics that run their body as Python in the notebook's own namespace."""
_MARKER = "# %% In [{}]"
_MARKER_LINE = re.compile(r"# %% In \[(\d+)\]\Z")
_MAGIC_PREFIX = "#: "
"""Prefix that the program text has before the line `%%magic` of a cell if the body of the cell is Python."""
_UNREADABLE_PREFIX = "#! "
"""Prefix that the program text has before each line of a cell that is not Python."""
_FILE_AND_LINE = re.compile(r"([^\s`'\"]+\.ipynb)\.py:(\d+)")
_VOLATILE = frozenset({"execution", "ExecuteTime", "papermill", "collapsed", "scrolled", "widgets"})
"""Keys of metadata that tools write when cells are executed or viewed."""


@dataclass(frozen=True, slots=True)
class CodeCell:
    """A code cell that is executed when the notebook runs."""

    number: int
    """Number of the cell among the executed cells, from 1: 3 for `In [3]` after a run from top to bottom."""
    position: int
    """Index of the cell among all cells of the notebook."""
    source: str
    """Text of the cell as the user wrote it."""
    text: str
    """Text of the cell as Python, with magics translated to calls (see `python_of`)."""
    line: int
    """Line of the program text on which the cell begins."""
    tags: frozenset[str] = frozenset()

    @property
    def magic(self) -> str:
        """The cell magic that runs the rest of the cell as Python, such as `time`; empty if there is none."""
        return _body_magic(self.source)

    @property
    def readable(self) -> bool:
        """Whether the cell is Python, perhaps with magics and shell lines."""
        return not is_unreadable(self.text)

    def tree(self) -> ast.Module:
        """Return the syntax tree of the cell; the first line of the cell is line 1."""
        return ast.parse(self.text)


@dataclass(frozen=True, slots=True)
class Notebook:
    """The executed code cells of a notebook, and the program text that they form."""

    cells: tuple[CodeCell, ...]
    text: str
    """The program text: all cells in order, each below a marker line."""
    language: str = "python"
    kernel: str = ""

    def cell_at(self, line: int) -> tuple[int, int]:
        """Return (number of the cell, line in the cell), both from 1, for a line of the program text."""
        for cell in reversed(self.cells):
            if line >= cell.line - 1:
                return cell.number, max(1, line - cell.line + 1)
        return 1, 1


def parse(data: bytes, path: str = "the notebook") -> Notebook:
    """Return the notebook whose file contains `data`; raise `SourceError` if it is not a notebook of format 4."""
    content = _content(data, path)
    language = _language(content)
    cells: list[CodeCell] = []
    lines: list[str] = []
    for position, source, tags in _executed(content):
        number = len(cells) + 1
        text = python_of(source) if language == "python" else ""
        lines.append(_MARKER.format(number))
        cells.append(CodeCell(number, position, source, text, len(lines) + 1, tags))
        lines += text.split("\n")
    text = "".join(f"{line}\n" for line in lines)
    spec = (content.get("metadata") or {}).get("kernelspec") or {}
    return Notebook(tuple(cells), text, language, str(spec.get("name", "")))


def language_and_positions(data: bytes, path: str = "the notebook") -> tuple[str, list[int]]:
    """Return (language of a notebook, indices of the executed cells among all its cells).

    Unlike `parse`, this function does not import IPython, which translates magics to Python.
    """
    content = _content(data, path)
    return _language(content), [position for position, _, _ in _executed(content)]


def _language(content: Mapping[str, Any]) -> str:
    metadata = content.get("metadata") or {}
    spec, info = metadata.get("kernelspec") or {}, metadata.get("language_info") or {}
    return str(info.get("name") or spec.get("language") or "python").lower()


def _executed(content: Mapping[str, Any]) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield (index among all cells, source, tags) of each code cell that is executed."""
    for position, cell in enumerate(content["cells"]):
        source, tags = _source(cell), _tags(cell)
        if cell.get("cell_type") == "code" and source.strip() and "skip-execution" not in tags:
            yield position, source, tags


def _content(data: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as exc:
        raise SourceError(
            f"{path} is not a notebook: it is not JSON ({exc}). Open it in Jupyter and save it again.",
            slug="no-notebook",
        ) from exc
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise SourceError(
            f"{path} is not a notebook of format 4: it has no list of cells. Convert it with "
            "`jupyter nbconvert --to notebook --inplace`.",
            slug="no-notebook",
        )
    return content


def _source(cell: Mapping[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else str(source)


def _tags(cell: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(map(str, (cell.get("metadata") or {}).get("tags") or ()))


@lru_cache(maxsize=4096)
def python_of(source: str) -> str:
    r"""Return the source of a cell as Python. Lines keep their numbers as far as IPython keeps them.

    Each line of a cell that is not Python becomes a comment.

    >>> python_of("x = 1"), python_of("%%time\nx = 1"), python_of("for x in")
    ('x = 1', '#: %%time\nx = 1', '#! for x in')
    >>> python_of("\n%matplotlib inline")
    "\nget_ipython().run_line_magic('matplotlib', 'inline')"
    """
    if _parses(source):
        return source
    if _body_magic(source):
        first, _, body = source.partition("\n")
        inner = python_of(body)
        if not inner.startswith(_UNREADABLE_PREFIX):
            return f"{_MAGIC_PREFIX}{first}\n{inner}"
    from IPython.core.inputtransformer2 import TransformerManager

    manager: Any = TransformerManager
    blank = re.match(r"(?:[ \t]*\n)*", source)
    above = blank.group().count("\n") if blank is not None else 0
    try:
        text: str = manager().transform_cell(source).removesuffix("\n")
    except SyntaxError:
        text = ""
    if text and _parses(text):
        return "\n" * above + text
    return "\n".join(_UNREADABLE_PREFIX + line for line in source.split("\n"))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _body_magic(source: str) -> str:
    match = re.match(r"%%(\w+)", source)
    return match.group(1) if match is not None and match.group(1) in PYTHON_BODIES else ""


def is_unreadable(text: str) -> bool:
    r"""Return True if `text` is what `python_of` returns for a cell that is not Python.

    >>> is_unreadable(python_of("for x in")), is_unreadable(python_of("#! note\nx = 1"))
    (True, False)
    """
    return all(line.startswith(_UNREADABLE_PREFIX) for line in text.split("\n"))


def source_of(text: str) -> str:
    """Return the source of a cell from `text`, its text as Python, perhaps with added probes.

    This is the reverse of `python_of`, except that magics inside the cell stay translated to calls.
    """
    lines = text.split("\n")
    if is_unreadable(text):
        return "\n".join(line.removeprefix(_UNREADABLE_PREFIX) for line in lines)
    if lines[0].startswith(f"{_MAGIC_PREFIX}%%"):
        lines[0] = lines[0].removeprefix(_MAGIC_PREFIX)
    return "\n".join(lines)


def divide_into_cells(old: str, text: str, path: str = "the notebook") -> str:
    r"""Return `text` with its marker lines changed so that it has the cells of `old`.

    `text` and `old` are program texts of notebooks; `text` adds statements. An added cell becomes part of the
    cell before it, because recorded values are found by the numbers of cells. Every line keeps its number.

    >>> old = "# %% In [1]\nx = 1\n# %% In [2]\ny = 2\n"
    >>> new = "# %% In [1]\nx = 1\n# %% In [2]\nlog(x)\n# %% In [3]\ny = 2\n"
    >>> divide_into_cells(old, new).split("\n")
    ['# %% In [1]', 'x = 1', '# %%', 'log(x)', '# %% In [2]', 'y = 2', '']
    """
    before, lines = _numbered(old), text.split("\n")
    after = _numbered(text)
    pairs = difflib.SequenceMatcher(
        None, [line for _, line in before], [line for _, line in after], autojunk=False
    )
    votes: dict[int, Counter[int]] = {}
    for a, b, size in pairs.get_matching_blocks():
        for k in range(size):
            votes.setdefault(after[b + k][0], Counter())[before[a + k][0]] += 1
    markers = [at for at, line in enumerate(lines) if _MARKER_LINE.match(line)]
    count = sum(1 for line in old.split("\n") if _MARKER_LINE.match(line))
    last = 0
    for cell, at in enumerate(markers, 1):
        number = votes[cell].most_common(1)[0][0] if cell in votes else max(last, 1)
        if number not in (last, last + 1):
            _refuse_placement(path)
        lines[at] = _MARKER.format(number) if number > last else "# %%"
        last = number
    if last != count:
        _refuse_placement(path)
    return "\n".join(lines)


def _numbered(text: str) -> list[tuple[int, str]]:
    """Return (number of the cell, line) for the lines of a program text, without blank lines and markers."""
    lines, cell = [], 0
    for line in text.split("\n"):
        if _MARKER_LINE.match(line):
            cell += 1
        elif line.strip():
            lines.append((cell, line.strip()))
    return lines


def with_text(data: bytes, text: str, path: str = "the notebook") -> bytes:
    """Return the notebook file `data` with its cells changed so that the program text becomes `text`."""
    content = _content(data, path)
    before = parse(data, path)
    bodies: list[list[str]] = []
    for line in text.removesuffix("\n").split("\n"):
        if _MARKER_LINE.match(line):
            bodies.append([])
        elif bodies:
            bodies[-1].append(line)
        elif line.strip():
            _refuse_placement(path)
    if len(bodies) != len(before.cells):
        _refuse_placement(path)
    for cell, body in zip(before.cells, bodies, strict=True):
        changed = "\n".join(body)
        if changed != cell.text:
            content["cells"][cell.position]["source"] = source_of(changed).splitlines(keepends=True)
    notebook = _encoded(content)
    if parse(notebook, path).text != text:
        _refuse_placement(path)
    return notebook


def _refuse_placement(path: str) -> NoReturn:
    raise SourceError(
        f"The statements added to {path} cannot be assigned to its cells, so it is not "
        "replayed. Put each statement on a separate line, inside a cell.",
        slug="no-place",
    )


def without_outputs(data: bytes) -> bytes:
    """Return a notebook file without outputs and other content that depends on executing or viewing it.

    Notebooks with equal programs then have equal bytes. Data that is not a notebook is returned unchanged.
    """
    try:
        content = _content(data, "")
    except SourceError:
        return data
    metadata = {k: v for k, v in (content.get("metadata") or {}).items() if k not in _VOLATILE}
    info = metadata.pop("language_info", None)  # a kernel adds this when it runs the notebook
    if isinstance(info, dict) and info.get("name", "python") != "python":
        metadata["language_info"] = {"name": info["name"]}
    cells = []
    for cell in content["cells"]:
        if not isinstance(cell, dict):
            return data
        plain_cell = {k: v for k, v in cell.items() if k not in {"outputs", "execution_count"}}
        plain_cell["metadata"] = {
            k: v for k, v in (cell.get("metadata") or {}).items() if k not in _VOLATILE
        }
        plain_cell["source"] = _source(cell).splitlines(keepends=True)
        if cell.get("cell_type") == "code":
            plain_cell |= {"execution_count": None, "outputs": []}
        cells.append(plain_cell)
    return _encoded({**content, "metadata": metadata, "cells": cells})


def _encoded(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )


def as_programs(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return `files` (path -> content) plus the program text `<path>.py` of each Python notebook among them."""
    programs = dict(files)
    for path, data in files.items():
        if is_notebook(path):
            try:
                notebook = parse(data, path)
            except SourceError:
                continue
            if notebook.language == "python":
                programs[f"{path}.py"] = notebook.text.encode("utf-8", "surrogatepass")
    return programs


def name_cells(message: str, texts: Mapping[str, str]) -> str:
    r"""Return a message with positions in program texts, such as `a.ipynb.py:3`, given as cell and line in the cell.

    >>> name_cells("at a.ipynb.py:3 it", {"a.ipynb.py": "# %% In [1]\nx = 1\ny = 2\n"})
    'at a.ipynb cell 1, line 2 it'
    """

    def cell_and_line(match: re.Match[str]) -> str:
        text = texts.get(f"{match.group(1)}.py")
        if text is None:
            return match.group()
        number = marker_line = 0
        for at, each in enumerate(text.split("\n")[: int(match.group(2))], 1):
            marker = _MARKER_LINE.match(each)
            if marker:
                number, marker_line = int(marker.group(1)), at
        return f"{match.group(1)} cell {number}, line {max(1, int(match.group(2)) - marker_line)}"

    return _FILE_AND_LINE.sub(cell_and_line, message).replace(PROGRAM, NOTEBOOK)
