"""The loops of a program: what they are called, and which one is which after an edit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rearview.source.comparison import Comparison

Loop = ast.For | ast.AsyncFor | ast.While
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULE = "<module>"


@dataclass(frozen=True, slots=True)
class LoopId:
    """One loop of one version, the same in every text derived from it by probes."""

    path: str
    function: str
    """Qualified as Python does it: `Trainer.fit`, `outer.<locals>.inner`, `<module>`."""
    ordinal: int
    """Counts the recorded loops of that function from 0, in the order of the text."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.function}:{self.ordinal}:{self.name}"


def loop_name(node: Loop, function: str) -> str:
    """Return the name people know a loop by.

    A `for` is named by the first name in its target that is not `_`; `rearview.loop("name", …)`
    by its name; a `while`, or a `for` that names nothing, by its function.

    >>> loop_name(ast.parse("for i, (x, y) in data: pass").body[0], "<module>")
    'i'
    >>> loop_name(ast.parse("while True: pass").body[0], "Trainer.fit")
    'fit'
    >>> loop_name(ast.parse("while True: pass").body[0], "<module>")
    'main'
    """
    if not isinstance(node, ast.While):
        given = _given(node.iter)
        if given is not None:
            return given
        for name in _target_names(node.target):
            if name.strip("_"):
                return name
    last = function.rpartition(".")[2]
    return "main" if last == MODULE else last


def _given(iterable: ast.expr) -> str | None:
    if not isinstance(iterable, ast.Call) or not iterable.args:
        return None
    func = iterable.func
    called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    first = iterable.args[0]
    if called == "loop" and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Starred):
        yield from _target_names(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _target_names(item)


def walk_loops(tree: ast.Module) -> Iterator[tuple[Loop, str, tuple[str, ...]]]:
    """Yield (loop, function, names of the loops around it in that function and its own)."""
    yield from _walk(tree, MODULE, "", ())


def _walk(
    node: ast.AST, function: str, prefix: str, around: tuple[str, ...]
) -> Iterator[tuple[Loop, str, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            inner = prefix + child.name
            yield from _walk(child, inner, f"{inner}.<locals>.", ())
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, function, f"{prefix}{child.name}.", around)
        elif isinstance(child, LOOPS):
            chain = (*around, unique_name(loop_name(child, function), around))
            yield child, function, chain
            for block, inside in ((child.body, chain), (child.orelse, around)):
                yield from _walk(ast.Module(block, []), function, prefix, inside)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _walk(child, function, prefix, around)


def unique_name(name: str, around: tuple[str, ...]) -> str:
    """Return `name`, numbered if a loop around it in the same function has it already."""
    if name not in around:
        return name
    count = 2
    while f"{name}_{count}" in around:
        count += 1
    return f"{name}_{count}"


def loop_ids(
    tree: ast.Module, path: str = "", *, recorded: Comparison | None = None
) -> dict[int, LoopId]:
    r"""Return the id of each loop by the line it begins on.

    With `recorded`, the comparison of the recorded text with this one, each recorded loop has
    the id it had when it was recorded, and the loops of probes have none.

    >>> tree = ast.parse("for epoch in range(3):\n  for x in data: pass")
    >>> [str(i) for i in loop_ids(tree, "t.py").values()]
    ['t.py:<module>:0:epoch', 't.py:<module>:1:x']
    """
    if recorded is not None:
        before = loop_ids(recorded.old, path)
        return {
            new.lineno: before[old.lineno]
            for old, new in recorded.matched
            if isinstance(old, LOOPS)
        }
    counts: dict[str, int] = {}
    found: dict[int, LoopId] = {}
    for node, function, chain in walk_loops(tree):
        ordinal = counts.get(function, 0)
        counts[function] = ordinal + 1
        found[node.lineno] = LoopId(path, function, ordinal, chain[-1])
    return found


def enclosing(parents: tuple[ast.AST, ...]) -> tuple[str, tuple[str, ...]]:
    """Return (function, loop names outermost first) for a place below `parents`."""
    function, prefix = MODULE, ""
    names: tuple[str, ...] = ()
    for node in parents:
        if isinstance(node, FUNCTIONS):
            function, names = prefix + node.name, ()
            prefix = f"{function}.<locals>."
        elif isinstance(node, ast.ClassDef):
            prefix = f"{prefix}{node.name}."
        elif isinstance(node, LOOPS):
            names = (*names, unique_name(loop_name(node, function), names))
    return function, names
