"""Wrap probes so that they do not affect the recorded program.

Around a probe that may draw random numbers, the random state is saved and restored. A call to a tracker
(TensorBoard, W&B, MLflow, Lightning's `self.log` …) is replaced by a call of ours with the same arguments:
its values go to the table, and nothing reaches the tracker.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from rearview.source.log_calls import Aliases, log_call
from rearview.source.loops import FUNCTIONS
from rearview.source.text import blocks


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTIONS = _words(
    "abs bool dict enumerate float int isinstance len list log max min print range repr round "
    "set sorted str sum tuple type zip"
)
_METHODS = _words(
    "abs all any argmax argmin count cpu detach dim element_size exp flatten float get "
    "get_last_lr isfinite isnan item items keys log max mean median min named_parameters ndim "
    "norm numel numpy parameters pow size sqrt square state_dict std sum tolist track values var"
)
_STATEMENTS = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.For, ast.Pass)


def draws_no_random_numbers(stmt: ast.stmt) -> bool:
    """Return True if a statement only reads and computes, with functions that never draw random numbers.

    Methods are known by their names: `norm` of any logged object draws nothing. If one does draw, the state
    of the replay differs from the recorded one, and the replay reports that.

    >>> draws_no_random_numbers(ast.parse("rearview.log('n', float(w.grad.norm()) / len(x))").body[0])
    True
    >>> draws_no_random_numbers(ast.parse("rearview.log('n', model(x).item())").body[0])
    False
    """
    return all(
        _reads(node) if isinstance(node, ast.Call) else _plain(node) for node in ast.walk(stmt)
    )


def _plain(node: ast.AST) -> bool:
    if isinstance(node, ast.stmt):
        return isinstance(node, _STATEMENTS)
    return not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom)


def _reads(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _FUNCTIONS
    return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS


SHIELD = "__rearview_probe__"
"""Name that the runtime binds to a function. Called with the line and the random generators that a probe
uses, it returns a context manager for the statements of the probe.
"""
CALM = "calm"
"""Attribute of that function: the same for a probe that draws no random numbers, at a hundredth of the cost."""

TRACK = "track"
"""Attribute of that function that replaces the methods of trackers."""
OURS = "rearview"

Places = Mapping[tuple[int, int], tuple[str, ...]]
"""(line, column) of a statement -> the random generators that it draws from, as expressions."""


def shield_tree(tree: ast.Module, places: Places) -> ast.Module:
    r"""Return the tree with the statements at `places` wrapped by a shield.

    Neighbouring statements share a shield. All locations are kept, so tracebacks show the user's lines. The
    bodies of functions that probes add are wrapped too, because a framework may call them.

    >>> print(ast.unparse(shield_tree(ast.parse("a = 1\nprint(a)"), {(2, 0): ()})))
    a = 1
    with __rearview_probe__.calm(2):
        print(a)
    """
    _block(tree.body, places, _Tracked(tree))
    return tree


class _Tracked(ast.NodeTransformer):
    """Replaces calls to trackers by calls of ours."""

    def __init__(self, tree: ast.Module) -> None:
        self.aliases = Aliases(tree)
        self.ours = {OURS}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.ours |= {a.asname or a.name for a in node.names if a.name == OURS}
            elif isinstance(node, ast.ImportFrom) and node.module == OURS:
                self.ours |= {a.asname or a.name for a in node.names}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return the call, or a call of ours in its place; the arguments are evaluated as before."""
        self.generic_visit(node)
        call = log_call(node, self.aliases)
        if call is None or call.line or self._own(node.func):
            return node
        called = node.func.attr if isinstance(node.func, ast.Attribute) else "log"
        own_function: ast.expr = ast.Attribute(ast.Name(SHIELD, ast.Load()), TRACK, ast.Load())
        for part in ast.walk(own_function):
            if isinstance(part, ast.expr):
                ast.copy_location(part, node.func)
        name = ast.copy_location(ast.Constant(called), node.func)
        own_call = ast.Call(own_function, [name, *node.args], node.keywords)
        return ast.copy_location(own_call, node)

    def _own(self, func: ast.expr) -> bool:
        owner = func.value if isinstance(func, ast.Attribute) else func
        return isinstance(owner, ast.Name) and owner.id in self.ours


def _block(block: list[ast.stmt], places: Places, tracked: _Tracked) -> None:
    done: list[ast.stmt] = []
    group: list[ast.stmt] = []
    for stmt in block:
        if (stmt.lineno, stmt.col_offset) in places:
            if isinstance(stmt, FUNCTIONS):
                _shield_function(stmt)
            group.append(tracked.visit(stmt))
            continue
        if group:
            done.append(_shielded(group, places))
            group = []
        done.append(stmt)
        for inner in blocks(stmt):
            _block(inner, places, tracked)
    if group:
        done.append(_shielded(group, places))
    block[:] = done


def _shield_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    pauses = (ast.Yield, ast.YieldFrom, ast.Await)
    if any(isinstance(sub, pauses) for sub in ast.walk(node)):
        return  # a generator would leave and enter its shield while it is suspended
    first = 1 if ast.get_docstring(node, clean=False) is not None else 0
    if len(node.body) > first:
        node.body[first:] = [_shielded(node.body[first:], {})]


def _shielded(group: list[ast.stmt], places: Places) -> ast.With:
    first, last = group[0], group[-1]
    texts = dict.fromkeys(t for s in group for t in places.get((s.lineno, s.col_offset), ()))
    args: list[ast.expr] = [ast.Constant(first.lineno)]
    args.extend(ast.parse(text, mode="eval").body for text in texts)
    shield: ast.expr = ast.Name(SHIELD, ast.Load())
    if not texts and all(map(draws_no_random_numbers, group)):
        shield = ast.Attribute(shield, CALM, ast.Load())
    call = ast.Call(func=shield, args=args, keywords=[])
    node = ast.With(items=[ast.withitem(context_expr=call)], body=group)
    for sub in (node, *ast.walk(call)):
        if isinstance(sub, ast.expr | ast.stmt):
            sub.lineno, sub.col_offset = first.lineno, first.col_offset
            sub.end_lineno, sub.end_col_offset = first.lineno, first.col_offset
    node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset
    return node
