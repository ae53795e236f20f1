"""Cells of a script: cut it, hash the code of a cell without its formatting, mark cells for the runtime."""

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
"""Name of the function that is called before the first statement of a cell."""
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What Python raises for a text that it cannot parse, also for one that is nested too deeply."""
MARKER = re.compile(r"^#\s?%%(?:\s|\[|$)")
"""First line of a cell in a percent script."""


@dataclass(frozen=True, slots=True)
class SourceCell:
    """One cell: its text and the number of its first line, counted from 1."""

    text: str
    line: int

    @property
    def title(self) -> str:
        """First line with code, shortened, for people."""
        for line in self.text.splitlines():
            bare = line.strip()
            if bare and not bare.startswith("#"):
                return bare if len(bare) <= 60 else bare[:57] + "..."
        return "(empty)"


def cut(source: str) -> list[SourceCell]:
    r"""Return the cells of a script, in order; joined they are the script.

    `# %%` markers are respected if there are any. Otherwise a cell is a paragraph of top-level
    statements: a blank line ends it. Neighbouring imports are one cell, neighbouring definitions are
    one cell, and a loop, `with`, `try` or `if` is a separate cell, which is never split.

    >>> [cell.title for cell in cut("import a\n\nimport b\nx = 1\ny = 2\n\nfor i in x:\n  f(i)\n")]
    ['import a', 'x = 1', 'for i in x:']
    """
    lines = source.splitlines(keepends=True)
    marked = [i for i, line in enumerate(lines) if MARKER.match(line)]
    tree = _parsed(source)
    if marked and tree is not None:
        # a marker inside a string or a block is text, not a cut
        inside = {
            n
            for node in tree.body
            for n in range(_first_line(node), (node.end_lineno or node.lineno))
        }
        marked = [i for i in marked if i not in inside]
    if marked:
        return _joined(lines, [0, *marked])
    if tree is None:
        _refuse(source)
    return _joined(lines, [0, *_paragraphs(tree, lines)] if tree else [0])


def has_markers(source: str) -> bool:
    r"""Return True if a script is written in cells, with `# %%` before each.

    >>> has_markers("# %%\nx = 1\n"), has_markers("x = 1\n")
    (True, False)
    """
    return any(MARKER.match(line) for line in source.splitlines())


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except UNPARSED:
        return None  # magics in a percent script: the markers alone decide


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


def _joined(lines: Sequence[str], starts: Sequence[int]) -> list[SourceCell]:
    cuts = sorted(set(starts))
    cells = []
    for begin, end in zip(cuts, [*cuts[1:], len(lines)], strict=True):
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


def _paragraphs(tree: ast.Module, lines: Sequence[str]) -> Iterator[int]:
    """Yield the index of the line with which each cell but the first begins."""
    end, before = 0, ""
    for node in tree.body:
        first, kind = _first_line(node) - 1, _kind(node)
        if before and first >= end:  # else it shares a line with the statement before it
            blank = any(not line.strip() for line in lines[end:first])
            same = kind == before and (kind in {"import", "definition"} or not blank)
            if not same or kind == "control":
                start = first
                # comments right above a statement belong to it
                while start > end and lines[start - 1].lstrip().startswith("#"):
                    start -= 1
                yield start
        end, before = node.end_lineno or node.lineno, kind


def code_hash(text: str) -> str:
    """Return a hash of the code of a cell; formatting and comments do not count.

    >>> code_hash("x=1 # one") == code_hash("x = 1")
    True
    >>> code_hash("x = 1") == code_hash("x = 2")
    False
    """
    try:
        body = ast.parse(text)
    except UNPARSED:
        body = None
    plain = ""
    if body is not None:
        with contextlib.suppress(RecursionError):  # nested too deeply: the text as it is
            plain = ast.dump(body, annotate_fields=False)
    if not plain:
        # magics, shell lines, top-level await: the text, without blank ends and lines
        kept = (line.rstrip() for line in text.splitlines())
        plain = "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def imported_modules(text: str) -> set[str]:
    r"""Return the first parts of the modules that a cell imports by statement.

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
    r"""Return True if a cell only imports, defines functions and classes, or assigns constants.

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
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _computes(node):
            continue
        if isinstance(node, ast.Assign) and _constant(node.value):
            continue
        return False
    return True


def _computes(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if defining a function calls something: a decorator, or a default that is no constant."""
    defaults = (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None))
    return bool(node.decorator_list) or not all(map(_constant, defaults))


def names_program(text: str) -> bool:
    r"""Return True if a cell uses the name of its own file: `__file__`, `sys.argv`, the module `__main__`.

    >>> names_program("out = Path(__file__).stem"), names_program("import sys\nprint(sys.argv[0])")
    (True, True)
    >>> names_program("if __name__ == '__main__':\n    main()")
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


def _constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def cell_starts(recorded: str, text: str) -> dict[int, int]:
    r"""Return the cells of a script by the line of the statement that each begins with.

    The `recorded` text decides where cells begin. `text` is the same script, perhaps with statements added;
    an added statement belongs to the cell around it.

    >>> old = "import a\n\nx = 1\n\nfor i in x:\n    f(i)\n"
    >>> cell_starts(old, old)
    {1: 1, 3: 2, 5: 3}
    >>> cell_starts(old, old.replace("x = 1\n", "x = 1\n\nlog(x)\n"))
    {1: 1, 3: 2, 7: 3}
    """
    tree = ast.parse(recorded)
    firsts: dict[int, int] = {}
    statements = [_first_line(node) for node in tree.body]
    for number, cell in enumerate(cut(recorded), 1):
        inside = range(cell.line, cell.line + cell.text.count("\n") + 1)
        line = next((each for each in statements if each in inside and each not in firsts), None)
        if line is not None:
            firsts[line] = number
    if text == recorded:
        return firsts
    pairs = difflib.SequenceMatcher(None, recorded.split("\n"), text.split("\n"), autojunk=False)
    moved = {
        block.a + k + 1: block.b + k + 1
        for block in pairs.get_matching_blocks()
        for k in range(block.size)
    }
    heads = {_first_line(node) for node in ast.parse(text).body}
    return {
        moved[line]: number
        for line, number in firsts.items()
        if line in moved and moved[line] in heads
    }


def mark_cells(tree: ast.Module, starts: dict[int, int]) -> None:
    """Put a call before each statement with which a cell begins; `starts` gives the cells by line."""
    body: list[ast.stmt] = []
    waiting = 0
    for place, node in enumerate(tree.body):
        waiting = starts.get(_first_line(node), waiting)
        if waiting and not _must_be_first(node, place):
            call = ast.Call(ast.Name(ENTER, ast.Load()), [ast.Constant(waiting)], [])
            mark = ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)
            body.append(ast.fix_missing_locations(mark))
            waiting = 0
        body.append(node)
    tree.body = body


def _must_be_first(node: ast.stmt, place: int) -> bool:
    """Return True for a docstring, and for an import from `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return place == 0 and text
