"""Keep probes from changing the random state and the trackers of the recorded program.

Each probe is put into a `with` statement that restores the random state if the probe may draw random
numbers. A call to a tracker (TensorBoard, W&B, MLflow, Lightning's `self.log` …) is replaced by a call to
Rearview with equal arguments: its values become records, and nothing reaches the tracker.
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

    Methods are judged by their names: `norm` is taken to draw nothing on any object. If a method does draw,
    the state of the replay differs from the recorded state, and the replay reports the difference.

    >>> draws_no_random_numbers(ast.parse("rearview.log('n', float(w.grad.norm()) / len(x))").body[0])
    True
    >>> draws_no_random_numbers(ast.parse("rearview.log('n', model(x).item())").body[0])
    False
    """
    return all(
        _calls_known_function(node) if isinstance(node, ast.Call) else _is_plain(node)
        for node in ast.walk(stmt)
    )


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.stmt):
        return isinstance(node, _STATEMENTS)
    return not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom)


def _calls_known_function(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _FUNCTIONS
    return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS


PROBE_HOOK = "__rearview_probe__"
"""Name of the runtime's function that takes the line of a probe and the random generators that the probe uses,
and returns a context manager, which restores the random state after the statements of the probe.
"""
WITHOUT_RANDOM = "calm"
"""Attribute of `PROBE_HOOK`: a function for probes that draw no random numbers. It returns a context manager
that does not save the random state, at a hundredth of the cost.
"""
TRACK = "track"
"""Attribute of `PROBE_HOOK`: the function that probes call instead of functions and methods of trackers."""
PACKAGE = "rearview"
"""Package whose log calls in probes are left as they are."""

Places = Mapping[tuple[int, int], tuple[str, ...]]
"""(line, column) of a statement that a probe adds -> expressions of the random generators that it draws from."""


def isolate_probes(tree: ast.Module, places: Places) -> ast.Module:
    r"""Put the probes at `places` into `with` statements that restore the random state; return the changed `tree`.

    Neighbouring statements share one `with`. All locations are kept, so tracebacks show the user's lines. The
    bodies of functions that probes add are wrapped too, because a framework may call these functions.

    >>> print(ast.unparse(isolate_probes(ast.parse("a = 1\nprint(a)"), {(2, 0): ()})))
    a = 1
    with __rearview_probe__.calm(2):
        print(a)
    """
    _wrap_probes_in(tree.body, places, _TrackerCalls(tree))
    return tree


class _TrackerCalls(ast.NodeTransformer):
    """Replaces each call to a tracker in the visited nodes by a call to Rearview."""

    def __init__(self, tree: ast.Module) -> None:
        self.aliases = Aliases(tree)
        self.package_names = {PACKAGE}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.package_names |= {a.asname or a.name for a in node.names if a.name == PACKAGE}
            elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
                self.package_names |= {a.asname or a.name for a in node.names}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return `node`, or if it calls a tracker, a call to Rearview with the same arguments."""
        self.generic_visit(node)
        call = log_call(node, self.aliases)
        if call is None or call.line or self._is_of_rearview(node.func):
            return node
        called = node.func.attr if isinstance(node.func, ast.Attribute) else "log"
        own_function: ast.expr = ast.Attribute(ast.Name(PROBE_HOOK, ast.Load()), TRACK, ast.Load())
        for part in ast.walk(own_function):
            if isinstance(part, ast.expr):
                ast.copy_location(part, node.func)
        name = ast.copy_location(ast.Constant(called), node.func)
        own_call = ast.Call(own_function, [name, *node.args], node.keywords)
        return ast.copy_location(own_call, node)

    def _is_of_rearview(self, func: ast.expr) -> bool:
        owner = func.value if isinstance(func, ast.Attribute) else func
        return isinstance(owner, ast.Name) and owner.id in self.package_names


def _wrap_probes_in(block: list[ast.stmt], places: Places, tracker_calls: _TrackerCalls) -> None:
    statements: list[ast.stmt] = []
    group: list[ast.stmt] = []
    for stmt in block:
        if (stmt.lineno, stmt.col_offset) in places:
            if isinstance(stmt, FUNCTIONS):
                _wrap_body(stmt)
            group.append(tracker_calls.visit(stmt))
            continue
        if group:
            statements.append(_wrapped(group, places))
            group = []
        statements.append(stmt)
        for inner in blocks(stmt):
            _wrap_probes_in(inner, places, tracker_calls)
    if group:
        statements.append(_wrapped(group, places))
    block[:] = statements


def _wrap_body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    pauses = (ast.Yield, ast.YieldFrom, ast.Await)
    if any(isinstance(sub, pauses) for sub in ast.walk(node)):
        # recorded code may draw random numbers while the function is suspended; the end of a `with` would undo
        # these draws
        return
    first = 1 if ast.get_docstring(node, clean=False) is not None else 0
    if len(node.body) > first:
        node.body[first:] = [_wrapped(node.body[first:], {})]


def _wrapped(group: list[ast.stmt], places: Places) -> ast.With:
    """Return one `with` statement around `group`; it names the random generators that `places` lists."""
    first, last = group[0], group[-1]
    generators = dict.fromkeys(g for s in group for g in places.get((s.lineno, s.col_offset), ()))
    args: list[ast.expr] = [ast.Constant(first.lineno)]
    args.extend(ast.parse(generator, mode="eval").body for generator in generators)
    hook: ast.expr = ast.Name(PROBE_HOOK, ast.Load())
    if not generators and all(map(draws_no_random_numbers, group)):
        hook = ast.Attribute(hook, WITHOUT_RANDOM, ast.Load())
    call = ast.Call(func=hook, args=args, keywords=[])
    node = ast.With(items=[ast.withitem(context_expr=call)], body=group)
    for sub in (node, *ast.walk(call)):
        if isinstance(sub, ast.expr | ast.stmt):
            sub.lineno, sub.col_offset = first.lineno, first.col_offset
            sub.end_lineno, sub.end_col_offset = first.lineno, first.col_offset
    node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset
    return node
