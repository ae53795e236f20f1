"""Probes that cannot draw random numbers: they need no copy of the random state around them."""

from __future__ import annotations

import ast


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


def calm(stmt: ast.stmt) -> bool:
    """Say whether a statement only reads and computes, with functions that never draw.

    Methods go by their names: `norm` of anything that people log draws nothing. Should one draw
    all the same, the replay's state differs from the recorded one, and that is said.

    >>> calm(ast.parse("rearview.log('n', float(w.grad.norm()) / len(x))").body[0])
    True
    >>> calm(ast.parse("rearview.log('n', model(x).item())").body[0])
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
