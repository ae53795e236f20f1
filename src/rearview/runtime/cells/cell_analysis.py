"""What the text of a cell says about its inputs and effects: names, definitions, calls for their effect."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from rearview.source.cells import code_hash
from rearview.source.notebooks import python_of

HARMLESS_MAGICS = ("matplotlib", "config", "load_ext", "reload_ext", "autoreload", "precision")
"""Line magics that only set something up: a cell of them can be run again at any time."""
TIMING = frozenset({"time", "timeit", "prun", "lprun", "memit"})
FILE_QUESTIONS = frozenset(
    {"exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "stat", "lstat", "access"}
    | {"getmtime", "getctime", "getatime", "getsize", "disk_usage"}
)
"""Functions that ask the file system without opening anything: what they were told is not known."""
SHOWN = frozenset({"_", "__", "___", "Out", "_oh", "In", "_ih", "_i", "_ii", "_iii"})
"""Names under which a kernel keeps earlier cells and their results."""

_NUMBERED = re.compile(r"_i?\d+\Z")


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class that a cell defines at its top level."""

    name: str
    digest: str
    names: frozenset[str]
    """Names in its body."""
    attributes: frozenset[str]
    at_once: frozenset[str]
    """Names that are looked up when it is defined: decorators, defaults, bases."""
    calls: frozenset[str]
    """Calls in its body for their effect, dotted."""


@dataclass(frozen=True, slots=True)
class CellAnalysis:
    """One cell, as its text has it."""

    digest: str
    """Hash of its code."""
    names: frozenset[str]
    """Variables that it names, without those in functions that it only defines."""
    attributes: frozenset[str]
    definitions: tuple[Definition, ...]
    preamble: str
    """Its imports and definitions alone, on the lines where they are; empty if it has none."""
    only_preamble: bool
    """Whether it has nothing else."""
    calls: frozenset[str]
    """Calls for their effect, dotted: `plt.style.use`."""
    last_call: str
    """The call that is the last statement: for its effect only if it shows no result."""
    sets_up: bool
    """Whether it has magics that set something up."""
    refused: str
    """Why its results cannot be kept; empty if nothing in its text speaks against it."""
    shown: bool
    """Whether it reads results of earlier cells by `_`, `Out` and the like."""


@lru_cache(maxsize=4096)
def analyse(source: str) -> CellAnalysis:
    r"""Return what a cell's source says.

    >>> cell = analyse("import numpy as np\nx = np.ones(3)\nnp.seterr(all='raise')")
    >>> sorted(cell.names), cell.preamble, cell.only_preamble, cell.last_call
    (['np', 'x'], 'import numpy as np', False, 'np.seterr')
    >>> analyse("%%time\nx = 1").refused
    'it measures time'
    """
    lines, sets_up = [], False
    for line in source.split("\n"):
        bare = line.strip()
        if bare.startswith("%") and not bare.startswith("%%"):
            if bare.lstrip("%").split()[:1] and bare.lstrip("%").split()[0] in HARMLESS_MAGICS:
                sets_up = True
                lines.append("")
                continue
        lines.append(line)
    text = python_of("\n".join(lines)) if "\n".join(lines).strip() else ""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        tree = ast.Module([], [])
    magics = _magics(source)
    refused = ""
    if magics & TIMING:
        refused = "it measures time"
    elif any(line.startswith("#! ") for line in text.split("\n")):
        refused = "it is not Python"
    top = list(tree.body)
    definitions = tuple(_definition(node) for node in top if _defined_name(node))
    plain = [node for node in top if not _is_preamble(node)]
    kept = [node for node in top if _is_preamble(node)]
    last = plain[-1] if plain and plain[-1] is top[-1] and isinstance(plain[-1], ast.Expr) else None
    names, attributes = _names(tree)
    loads = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    shown = any(name in SHOWN or _NUMBERED.match(name) for name in loads)
    questions = attributes & FILE_QUESTIONS or names & (FILE_QUESTIONS - {"stat", "access"})
    if not refused and questions:
        refused = f"it asks the file system ({min(questions)})"
    return CellAnalysis(
        code_hash(source),
        frozenset(_names_at_once(top, definitions)),
        frozenset(attributes),
        definitions,
        _only_lines(text, kept),
        not plain,
        frozenset(_effect_calls([node for node in plain if node is not last])),
        next(_effect_calls([last]), "") if last is not None else "",
        sets_up,
        refused,
        shown,
    )


def _names_at_once(body: Iterable[ast.stmt], definitions: Iterable[Definition]) -> set[str]:
    """Return the names that are looked up when a cell runs, also in functions that it defines and names."""
    names: set[str] = set()
    for node in body:
        if not _defined_name(node):
            names |= _names(node)[0]
    for definition in definitions:
        names |= definition.at_once
    waiting = list(definitions)
    while True:
        called = [each for each in waiting if each.name in names]
        if not called:
            return names
        waiting = [each for each in waiting if each not in called]
        for each in called:
            names |= each.names


def _magics(source: str) -> set[str]:
    words = (line.strip().lstrip("%").split() for line in source.split("\n") if "%" in line[:9])
    return {word[0] for word in words if word}


def _defined_name(node: ast.stmt) -> str:
    """Return the name of a top-level function, class or lambda; empty for other statements."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        target = node.targets[0]
        return target.id if len(node.targets) == 1 and isinstance(target, ast.Name) else ""
    return ""


def _is_preamble(node: ast.stmt) -> bool:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return bool(isinstance(node, ast.Import | ast.ImportFrom) or _defined_name(node) or text)


def _definition(node: ast.stmt) -> Definition:
    names, attributes = _names(node)
    now: list[ast.AST] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        now = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        body: list[ast.stmt] = node.body
    elif isinstance(node, ast.ClassDef):
        inner = (ast.FunctionDef, ast.AsyncFunctionDef)
        now = [*node.decorator_list, *node.bases, *(each.value for each in node.keywords)]
        now += [each for each in node.body if not isinstance(each, inner)]
        now += [
            part for each in node.body if isinstance(each, inner) for part in each.decorator_list
        ]
        body = node.body
    else:
        body = []
    at_once = {name for part in now for name in _names(part)[0]}
    digest = hashlib.sha256(ast.dump(node).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    calls = frozenset(_effect_calls(body, deep=True))
    return Definition(
        _defined_name(node),
        digest,
        frozenset(names),
        frozenset(attributes),
        frozenset(at_once),
        calls,
    )


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    names: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Global):
            names.update(node.names)
    return names, attributes


def _only_lines(text: str, kept: Iterable[ast.stmt]) -> str:
    """Return the text of some statements, each on its own line; the other lines are blank."""
    lines = text.split("\n")
    kept_lines = [""] * len(lines)
    for node in kept:
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        end = node.end_lineno or node.lineno
        if first == end and kept_lines[first - 1]:
            kept_lines[first - 1] += "; " + (ast.get_source_segment(text, node) or "")
        elif first == end:
            kept_lines[first - 1] = ast.get_source_segment(text, node) or ""
        else:
            kept_lines[first - 1 : end] = lines[first - 1 : end]
    return "\n".join(kept_lines).rstrip()


def _effect_calls(body: Iterable[ast.stmt], *, deep: bool = False) -> Iterator[str]:
    """Yield the calls whose result is not used, and the modules whose attributes are assigned, dotted."""
    for statement in body:
        todo: list[ast.AST] = [statement]
        while todo:
            node = todo.pop()
            inner = isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
            )
            if inner and not deep:
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
                call = node.value.value if isinstance(node.value, ast.Await) else node.value
                name = _dotted(call.func) if isinstance(call, ast.Call) else ""
                if name:
                    yield name
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
                targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
                for target in targets:
                    if isinstance(target, ast.Attribute | ast.Subscript):
                        yield f"{_dotted(target)}="
            todo += ast.iter_child_nodes(node)


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
