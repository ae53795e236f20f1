"""What a statement evaluates before a certain value, and whether that could as well come later."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rearview.source.loops import FUNCTIONS


@dataclass(frozen=True, slots=True)
class Loose:
    """What a call may change behind the text's back."""

    names: frozenset[str] = frozenset()
    """Variables that some function declares `global` or `nonlocal`."""
    attributes: frozenset[str] = frozenset()
    """Attributes that are stored outside `__init__`, or computed when they are read."""


def loose(trees: Iterable[ast.Module]) -> Loose:
    r"""Return what the recorded texts rebind from elsewhere.

    >>> tree = ast.parse("def f(self):\n    global n\n    self.a = n = 1")
    >>> sorted(loose([tree]).names | loose([tree]).attributes)
    ['a', 'n']
    """
    names: set[str] = set()
    attributes: set[str] = set()
    for tree in trees:
        born: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                if node.decorator_list:
                    attributes.add(node.name)
                if node.name == "__init__":
                    born |= {id(sub) for sub in ast.walk(node)}
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names.update(node.names)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                if id(node) not in born:
                    attributes.add(node.attr)
    return Loose(frozenset(names), frozenset(attributes))


def early(stmt: ast.stmt, reads: set[int], unsettled: Loose) -> str:
    """Return what the statement computes before the last of `reads`; nothing if only loads.

    `reads` are ids of names in it. A variable or a method that is merely looked up may be looked
    up later, unless a call may change which one that is.

    >>> stmt = ast.parse("out.append((a[0], v))").body[0]
    >>> early(stmt, {id(n) for n in ast.walk(stmt) if getattr(n, "id", "") == "v"}, Loose())
    'a[0]'
    """
    done = list(_evaluated(stmt))
    last = max((at for at, node in enumerate(done) if id(node) in reads), default=-1)
    for node in done[: last + 1]:
        if id(node) in reads or isinstance(node, ast.Constant | ast.Tuple | ast.List):
            continue  # a display of things that were looked up is not worth an order either
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            continue
        if isinstance(node, ast.Name) and node.id not in unsettled.names:
            continue
        if isinstance(node, ast.Attribute) and node.attr not in unsettled.attributes:
            continue
        return " ".join(ast.unparse(node).split())
    return ""


def reached(stmt: ast.stmt, reads: set[int]) -> list[int]:
    """Return those of `reads` that the statement comes to, in the order in which it does."""
    return [id(node) for node in _evaluated(stmt) if id(node) in reads]


def _evaluated(node: ast.AST | None) -> Iterator[ast.AST]:
    """Yield the parts of a statement's head in the order in which they are done."""
    if node is None:
        return
    for part in _parts(node):
        yield from _evaluated(part)
    if isinstance(node, ast.expr):
        yield node


def _parts(node: ast.AST) -> list[ast.AST | None]:
    if isinstance(node, ast.AugAssign):
        target: ast.AST = node.target
        return [target, node.value]
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        return [node.value]
    if isinstance(node, ast.Assert | ast.If):
        return [node.test]
    if isinstance(node, ast.Dict):
        return [part for pair in zip(node.keys, node.values, strict=True) for part in pair]
    if isinstance(node, ast.IfExp):
        return [node.test, node.body, node.orelse]
    if isinstance(node, ast.Lambda):
        return []
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return [node.generators[0].iter]
    return [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.expr | ast.keyword | ast.Slice)
    ]
