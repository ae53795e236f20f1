"""Split a script into cells, hash the code of a cell, insert calls that tell the runtime which cell begins."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rearview.errors import SourceError

ENTER = "__rearview_cell__"
"""Name of the function that a script with marked cells calls before the first statement of each cell."""
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions that `ast.parse` raises if a text is not Python or is nested too deeply."""
MARKER = re.compile(r"^#\s?%%(?:\s|\[|$)")
"""Matches a line that begins with `# %%`: the first line of a cell in a script with such markers."""


@dataclass(frozen=True, slots=True)
class SourceCell:
    """One cell of a script: its text and where it begins."""

    text: str
    line: int
    """Line of the script on which the cell begins, counted from 1."""

    @property
    def title(self) -> str:
        """First line that is not blank or a comment, in at most 60 characters, or `(empty)`."""
        for line in self.text.splitlines():
            code = line.strip()
            if code and not code.startswith("#"):
                return code if len(code) <= 60 else code[:57] + "..."
        return "(empty)"


def split_into_cells(source: str) -> list[SourceCell]:
    r"""Return the cells of a script, in order. Joined, the texts of the cells are the script.

    If the script has `# %%` markers, a cell begins at each marker. Otherwise a cell is a paragraph of
    top-level statements, which a blank line ends. Neighbouring imports are one cell, neighbouring
    definitions are one cell, and a loop, `with`, `try` or `if` is a separate cell, which is never split.

    >>> [cell.title for cell in split_into_cells("import a\n\nimport b\nx = 1\ny = 2\n\nfor i in x:\n  f(i)\n")]
    ['import a', 'x = 1', 'for i in x:']
    """
    lines = source.splitlines(keepends=True)
    markers = [i for i, line in enumerate(lines) if MARKER.match(line)]
    tree = _parsed(source)
    if markers and tree is not None:
        # a marker inside a statement of several lines, such as a loop or a string, begins no cell
        inside = {
            n
            for node in tree.body
            for n in range(_first_line(node), (node.end_lineno or node.lineno))
        }
        markers = [i for i in markers if i not in inside]
    if markers:
        return _cells_from(lines, [0, *markers])
    if tree is None:
        _refuse(source)
    return _cells_from(lines, [0, *_paragraph_starts(tree, lines)] if tree else [0])


def has_markers(source: str) -> bool:
    r"""Return True if a script has `# %%` markers, which divide it into cells.

    >>> has_markers("# %%\nx = 1\n"), has_markers("x = 1\n")
    (True, False)
    """
    return any(MARKER.match(line) for line in source.splitlines())


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except UNPARSED:
        return None  # the script may contain IPython magics; then only `# %%` markers divide it


def _refuse(source: str) -> None:
    try:
        ast.parse(source)
    except UNPARSED as exc:
        raise SourceError(
            f"The script cannot be cut into cells: {exc}. Mend it, or mark its cells with `# %%`.",
            slug="cells",
        ) from exc


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _cells_from(lines: Sequence[str], starts: Sequence[int]) -> list[SourceCell]:
    """Return the cells whose first lines have the indices `starts` in `lines`, without blank cells."""
    ordered = sorted(set(starts))
    cells = []
    for begin, end in zip(ordered, [*ordered[1:], len(lines)], strict=True):
        text = "".join(lines[begin:end])
        if text.strip():
            cells.append(SourceCell(text, begin + 1))
    return cells


def _kind(node: ast.stmt) -> str:
    if isinstance(node, (ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return "import"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return "definition"
    if isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AsyncFor, ast.Match)):
        return "control"
    return "plain"


def _paragraph_starts(tree: ast.Module, lines: Sequence[str]) -> Iterator[int]:
    """Yield the index in `lines` of the first line of each cell, except for the first cell."""
    end, previous_kind = 0, ""
    for node in tree.body:
        first, kind = _first_line(node) - 1, _kind(node)
        if previous_kind and first >= end:  # two statements on one line stay in one cell
            blank = any(not line.strip() for line in lines[end:first])
            same_cell = kind == previous_kind and (kind in {"import", "definition"} or not blank)
            if not same_cell or kind == "control":
                start = first
                # comments right above a statement belong to the cell of the statement
                while start > end and lines[start - 1].lstrip().startswith("#"):
                    start -= 1
                yield start
        end, previous_kind = node.end_lineno or node.lineno, kind


def code_hash(text: str) -> str:
    """Return a hash of the code of a cell that does not depend on its formatting and comments.

    If the cell is not plain Python, hash its lines: then the formatting of code counts.

    >>> code_hash("x=1 # one") == code_hash("x = 1")
    True
    >>> code_hash("x = 1") == code_hash("x = 2")
    False
    """
    try:
        body = ast.parse(text)
    except UNPARSED:
        body = None
    normalized = ""
    if body is not None:
        with contextlib.suppress(RecursionError):  # code that is nested too deeply is hashed below
            normalized = ast.dump(body, annotate_fields=False)
    if not normalized:
        # the cell has IPython magics or shell lines: hash its lines, without comments
        lines = (line.rstrip() for line in text.splitlines())
        normalized = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(normalized.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def imported_modules(text: str) -> set[str]:
    r"""Return the top-level packages that the absolute imports of a cell name; empty if it is not Python.

    >>> sorted(imported_modules("import a.b\nfrom c import d"))
    ['a', 'c']
    """
    try:
        tree = ast.parse(text)
    except UNPARSED:
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def only_defines(text: str) -> bool:
    r"""Return True if a cell only imports modules, defines functions and assigns constants.

    A function counts only if defining it runs no code of a decorator or a default.

    >>> only_defines("import sys\nLR = 0.1\ndef f(): return sys.argv")
    True
    >>> only_defines("x = load()")
    False
    """
    try:
        tree = ast.parse(text)
    except UNPARSED:
        return False
    for node in tree.body:
        kind = _kind(node)
        if kind == "import":
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _runs_code(node):
            continue
        if isinstance(node, ast.Assign) and _is_constant(node.value):
            continue
        return False
    return True


def _runs_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if a function has a decorator or a default that is no constant: defining it runs code."""
    defaults = (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None))
    return bool(node.decorator_list) or not all(map(_is_constant, defaults))


def uses_its_file_name(text: str) -> bool:
    r"""Return True if a cell uses the name of its own file, by `__file__`, `sys.argv` or the module `__main__`.

    >>> uses_its_file_name("out = Path(__file__).stem"), uses_its_file_name("import sys\nprint(sys.argv[0])")
    (True, True)
    >>> uses_its_file_name("if __name__ == '__main__':\n    main()")
    False
    """
    try:
        tree = ast.parse(text)
    except UNPARSED:
        return bool(re.search(r"__file__|\bargv\b|__main__", text))
    guards = {
        constant
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and node.left.id == "__name__"
        for constant in node.comparators
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in {"__file__", "argv"}:
            return True
        if isinstance(node, ast.Attribute) and node.attr in {"argv", "__main__"}:
            return True
        if isinstance(node, ast.alias) and node.name in {"argv", "__main__"}:
            return True
        if isinstance(node, ast.Constant) and node.value == "__main__" and node not in guards:
            return True
    return False


def _is_constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def cell_starts(recorded: str, text: str) -> dict[int, int]:
    r"""Return {line of a cell's first statement in `text`: number of the cell}, counted from 1.

    The `recorded` text decides where cells begin. `text` is the recorded script, perhaps with statements
    added; an added statement belongs to the cell around it. A cell whose first statement is not in `text`
    is left out.

    >>> old = "import a\n\nx = 1\n\nfor i in x:\n    f(i)\n"
    >>> cell_starts(old, old)
    {1: 1, 3: 2, 5: 3}
    >>> cell_starts(old, old.replace("x = 1\n", "x = 1\n\nlog(x)\n"))
    {1: 1, 3: 2, 7: 3}
    """
    tree = ast.parse(recorded)
    starts: dict[int, int] = {}
    statements = [_first_line(node) for node in tree.body]
    for number, cell in enumerate(split_into_cells(recorded), 1):
        inside = range(cell.line, cell.line + cell.text.count("\n") + 1)
        line = next((each for each in statements if each in inside and each not in starts), None)
        if line is not None:
            starts[line] = number
    if text == recorded:
        return starts
    matcher = difflib.SequenceMatcher(None, recorded.split("\n"), text.split("\n"), autojunk=False)
    new_lines = {
        block.a + k + 1: block.b + k + 1
        for block in matcher.get_matching_blocks()
        for k in range(block.size)
    }
    statement_starts = {_first_line(node) for node in ast.parse(text).body}
    return {
        new_lines[line]: number
        for line, number in starts.items()
        if line in new_lines and new_lines[line] in statement_starts
    }


def mark_cells(tree: ast.Module, starts: dict[int, int]) -> None:
    """Insert a call of `ENTER` before the first statement of each cell; `starts` is from `cell_starts`."""
    body: list[ast.stmt] = []
    entered_cell = 0
    for index, node in enumerate(tree.body):
        entered_cell = starts.get(_first_line(node), entered_cell)
        if entered_cell and not _must_be_first(node, index):
            call = ast.Call(ast.Name(ENTER, ast.Load()), [ast.Constant(entered_cell)], [])
            mark = ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)
            body.append(ast.fix_missing_locations(mark))
            entered_cell = 0
        body.append(node)
    tree.body = body


def _must_be_first(node: ast.stmt, index: int) -> bool:
    """Return True if no call may be put before a statement: a docstring, or an import from `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return index == 0 and is_text
