"""Which plain variables the body of a loop assigns: the candidates for captured columns."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rearview.source.loops import Loop

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assigned_names(loop: Loop) -> tuple[str, ...]:
    r"""Return the variables that a loop's body assigns outside loops inside it, in order.

    Names that begin with an underscore, and targets of loops, are left out.

    >>> text = "for e in r:\n  if e:\n    loss = 1\n  a, (b, _c) = f()\n  for i in a:\n    i += 1; x = 2"
    >>> assigned_names(ast.parse(text).body[0])
    ('loss', 'a', 'b')
    """
    found: dict[str, None] = {}
    for node in _statements(loop):
        for target in _targets(node):
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found.setdefault(part.id)
    targets = _loop_targets(loop)
    return tuple(name for name in found if not name.startswith("_") and name not in targets)


def loops_inside(loop: Loop) -> list[Loop]:
    """Return the loops in a loop's body, at any depth, that belong to the same function."""
    return [node for node in _inside(loop, into_loops=True) if isinstance(node, Loop)]


def _statements(loop: Loop) -> Iterator[ast.AST]:
    for node in _inside(loop, into_loops=False):
        if not isinstance(node, Loop):
            yield node


def _inside(loop: Loop, *, into_loops: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a loop's body in the order of the text, without entering other scopes."""
    todo: list[ast.AST] = list(reversed(loop.body))
    if isinstance(loop, ast.While):
        todo.append(loop.test)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, Loop) and not into_loops:
            todo.extend(reversed(node.orelse))
        elif not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        return [node.target]
    return []


def _loop_targets(loop: Loop) -> set[str]:
    loops = [loop, *loops_inside(loop)]
    return {
        part.id
        for one in loops
        if not isinstance(one, ast.While)
        for part in ast.walk(one.target)
        if isinstance(part, ast.Name)
    }
