"""Which loops may be running when a function is entered, as far as the text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from rearview.model.point import name_of
from rearview.model.segment import DEEPEST
from rearview.source.loops import FUNCTIONS, LOOPS, MODULE, loop_ids

Chains = Mapping[tuple[str, str], tuple[tuple[str, ...], ...]]
"""(path, function) -> stacks of loops, outermost first, by name or by id."""


def chains(trees: Mapping[str, ast.Module], *, limit: int = 64) -> Chains:
    r"""Return, for each (path, function), the loops that may be running when it is entered.

    Calls are followed by name: `fit(...)` and `anything.fit(...)` may both mean any function
    called `fit`. A function that nobody calls by name (a callback, `forward`) is not listed, nor
    is one that is also handed on as a value (`opt.step(closure)`), nor a generator, whose body runs
    inside whichever loop draws from it, nor what such functions call: nothing is known about them.

    >>> text = "def step(): pass\ndef fit():\n  for i in x: step()\nfor epoch in y: fit()"
    >>> chains({"t.py": ast.parse(text)})["t.py", "step"]
    (('epoch', 'i'),)
    """
    return {key: names_of(found) for key, found in paths(trees, limit=limit).items()}


def names_of(found: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the loops of some paths, each stack of names once."""
    return tuple(sorted({tuple(map(name_of, path)) for path in found}))


def paths(trees: Mapping[str, ast.Module], *, limit: int = 64) -> Chains:
    r"""Return the same by the ids of the loops: two loops of one name are two loops.

    A function is not listed either if more stacks lead to it than `limit`. Of a stack that is deeper
    than recursion is followed, the outermost loops are given.

    >>> text = "def f():\n  for i in x: g()\nfor i in y: f()\ndef g(): pass"
    >>> paths({"t.py": ast.parse(text)})["t.py", "g"]
    (('t.py:<module>:0:i', 't.py:f:0:i'),)
    """
    calls: dict[str, set[tuple[str, str, tuple[str, ...]]]] = {}
    functions: set[tuple[str, str]] = set()
    for path, tree in trees.items():
        finder = _Finder({line: str(one) for line, one in loop_ids(tree, path).items()})
        functions |= {(path, function) for function in (MODULE, *finder.functions(tree))}
        for name, function, around in finder.calls(tree, MODULE, "", ()):
            calls.setdefault(name, set()).add((path, function, around))
    known: dict[tuple[str, str], set[tuple[str, ...]]] = {
        key: {()} for key in functions if key[1] == MODULE
    }
    endless: set[tuple[str, str]] = set()
    changed = True
    while changed:
        changed = False
        for key in functions:
            mine = known.get(key, set())
            for path, caller, around in calls.get(_called_as(key[1]), ()):
                for chain in known.get((path, caller), ()):
                    longer = (chain + around)[:DEEPEST]
                    if longer in mine:
                        continue
                    if len(mine) >= limit:
                        endless.add(key)
                        continue
                    mine = mine | {longer}
                    changed = True
            if mine:
                known[key] = mine
    unknown = {key for key in functions if key not in known} | endless
    unknown |= _handed_on(trees, functions) | set(_generators(trees))
    grown = True
    while grown:
        more = {
            key
            for key in functions - unknown
            if any((path, by) in unknown for path, by, _ in calls.get(_called_as(key[1]), ()))
        }
        grown = bool(more)
        unknown |= more
    return {key: tuple(sorted(found)) for key, found in known.items() if key not in unknown}


def _handed_on(
    trees: Mapping[str, ast.Module], functions: set[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return the functions that are used other than by a call, so that anybody may call them."""
    names: set[str] = set()
    attributes: set[str] = set()
    of_modules: set[str] = set()
    for tree in trees.values():
        nodes = list(ast.walk(tree))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in nodes:
            if id(node) in called or not isinstance(getattr(node, "ctx", None), ast.Load):
                continue
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                if getattr(node.value, "id", None) in modules:
                    of_modules.add(node.attr)
    found = set()
    for path, function in functions:
        *outer, name = function.split(".")
        method = bool(outer) and outer[-1] != "<locals>"
        if name in attributes if method else name in names or name in of_modules:
            found.add((path, function))
    return found - {key for key in found if key[1] == MODULE}


def _generators(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield (path, function) of each generator and coroutine."""
    for path, tree in trees.items():
        todo: list[tuple[ast.AST, str]] = [(tree, "")]
        while todo:
            node, prefix = todo.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, FUNCTIONS):
                    name = prefix + child.name
                    if isinstance(child, ast.AsyncFunctionDef) or _yields(child):
                        yield path, name
                    todo.append((child, f"{name}.<locals>."))
                elif isinstance(child, ast.ClassDef):
                    todo.append((child, f"{prefix}{child.name}."))
                else:
                    todo.append((child, prefix))


def _yields(function: ast.FunctionDef) -> bool:
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))
    return False


def loopers(trees: Mapping[str, ast.Module]) -> frozenset[str]:
    r"""Return the names of functions that run a loop, in themselves or in what they call.

    >>> sorted(loopers({"t.py": ast.parse("def a(): b()\ndef b():\n  for i in x: c()\ndef c(): pass")}))
    ['a', 'b']
    """
    bodies: dict[str, list[ast.AST]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                bodies.setdefault(node.name, []).append(node)
    found = {
        name
        for name, nodes in bodies.items()
        if any(isinstance(sub, LOOPS) for node in nodes for sub in ast.walk(node))
    }
    calls = {
        name: {called_name(sub) for node in nodes for sub in ast.walk(node)}
        for name, nodes in bodies.items()
    }
    grown = True
    while grown:
        more = {name for name, called in calls.items() if name not in found and called & found}
        grown = bool(more)
        found |= more
    return frozenset(found)


def called_name(node: ast.AST) -> str:
    """Return the name that a call calls something by; nothing for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _called_as(function: str) -> str:
    parts = function.split(".")
    return parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1]


class _Finder:
    def __init__(self, ids: Mapping[int, str]) -> None:
        self.ids = ids

    def functions(self, node: ast.AST, prefix: str = "") -> Iterator[str]:
        """Yield the qualified name of each function below a node."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                yield prefix + child.name
                yield from self.functions(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from self.functions(child, f"{prefix}{child.name}.")
            else:
                yield from self.functions(child, prefix)

    def calls(
        self, node: ast.AST, function: str, prefix: str, around: tuple[str, ...]
    ) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield (name called, function it is called in, loops of that function around it)."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                func = child.func
                if isinstance(func, ast.Attribute | ast.Name):
                    name = func.attr if isinstance(func, ast.Attribute) else func.id
                    yield name, function, around
            if isinstance(child, FUNCTIONS):
                inner = prefix + child.name
                yield from self.calls(child, inner, f"{inner}.<locals>.", ())
            elif isinstance(child, ast.ClassDef):
                yield from self.calls(child, function, f"{prefix}{child.name}.", around)
            elif isinstance(child, LOOPS):
                chain = (*around, self.ids[child.lineno])
                first: ast.expr = child.test if isinstance(child, ast.While) else child.iter
                yield from self.calls(ast.Expr(first), function, prefix, around)
                for block, inside in ((child.body, chain), (child.orelse, around)):
                    yield from self.calls(ast.Module(block, []), function, prefix, inside)
            else:
                yield from self.calls(child, function, prefix, around)
