"""Rewrite the loops of a module so that the runtime sees every iteration.

`for x in xs` becomes `for x in __rearview__("id", iter(xs))`, and `while test` becomes a `for` loop over an
endless iterator, whose body begins with the test. A loop over a `range` becomes two nested loops: the outer one
over subranges that the runtime chooses, the inner one over the numbers of a subrange, at Python's full speed.
Positions are kept, so tracebacks, debuggers, coverage and profilers see the user's own lines.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import CO_OPTIMIZED
from itertools import pairwise
from opcode import opmap
from types import CodeType
from typing import TypeVar

from rearview.source.loops import MODULE, Loop, assigned_names, loop_ids, loop_name, loops_inside

_Node = TypeVar("_Node", bound=ast.AST)

HOOK = "__rearview__"
"""Name of the runtime's function that yields the items of a loop. It ends in underscores, so that Python does not
mangle the name in classes."""
ITER = "__rearview_iter__"
"""Name under which a rewritten program calls Python's `iter`. The program calls `iter`, not the runtime, so that
a traceback shows no frame of Rearview."""
PARTS = "__rearview_parts__"
"""Name of the runtime's function that yields a `range` as consecutive subranges."""
TURN = "__rearview_turn__"
"""Loop variable of the `for` loop that replaces a `while` loop. The runtime leaves it out of the state."""
PART = "__rearview_part__"
"""Loop variable of the outer of the two loops that replace a loop over a `range`: the current subrange. The
runtime leaves this variable out of the state."""
_MAX_SPLIT_DEPTH = 4
"""A loop over a `range` with this many or more loops of its function around it is not split into two loops, because
Python allows only twenty nested blocks."""

COMPILERS = {
    *("jit", "njit", "pjit", "compile", "script", "script_method", "vectorize", "guvectorize"),
    *("stencil", "cuda_jit", "kernel"),
}
"""Decorators that compile a function from its text or bytecode. A function with one of these is not rewritten."""

WALK = "__rearview_walk__"
"""Name of the runtime's function that wraps the iterator of a loop in a generator function if the body of the loop
yields, and the iterator of a `yield from`. The result is assigned to a local variable, so that a checkpoint can
capture the iterator."""

LOG_CALLS = {
    *("log", "print", "info", "debug", "warning", "log_metric", "log_metrics", "log_dict"),
    *("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text"),
}
"""Names of functions and methods that log or print: a loop with such a call is always watched."""


@dataclass(frozen=True, slots=True)
class LoopSite:
    """One rewritten loop of the program, with the facts about it that the runtime needs."""

    id: str
    name: str
    path: str
    line: int
    may_log: bool
    """Whether the body logs or prints: then the runtime watches each iteration, even if the loop is short."""
    loose: bool
    """Whether the loop is in a generator or coroutine, so that other code may run while the loop is suspended."""
    breaks: frozenset[tuple[int, int]]
    """(line, column) of each `break` of the loop, and of a `while` itself, which ends the loop at its test.

    Empty if the loop has an `else`, because a `break` skips the `else`."""
    inner: bool
    """Whether another loop of the same function encloses the loop."""
    assigned: tuple[str, ...] = ()
    """Variables that the body assigns outside the loops in it (see `assigned_names`)."""
    inside: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(id, assigned variables) of each loop in the body, at any depth, without loops of functions defined there."""


def instrument(
    tree: ast.Module,
    path: str,
    *,
    ids: Mapping[int, str] | None = None,
    autolog: bool = False,
    only: bool = False,
    suspends: bool = False,
) -> list[LoopSite]:
    """Rewrite `tree`, the module at `path`, in place and return its rewritten loops in order of appearance.

    `ids` maps line numbers to the ids that loops have in the recorded version, so that loops keep their ids in a
    text with probes. With `autolog`, every scalar assigned in a loop is logged. With `only`, just the loops in
    `ids` are rewritten, and are taken for loops that are never suspended, even in a generator function.
    `suspends` says that the module itself runs as a coroutine, like a cell of a notebook with `await`.
    """
    sites: list[LoopSite] = []
    if ids is None:
        ids = {line: str(loop_id) for line, loop_id in loop_ids(tree, path).items()}
    rewriter = _Rewriter(path, ids, sites, autolog=autolog, only=only)
    rewriter.loose = [suspends]
    rewriter.split_ranges = not any(map(_rebinds_range, ast.walk(tree)))
    rewriter.visit(tree)
    if sites:
        ast.fix_missing_locations(tree)
    return sites


class _Rewriter(ast.NodeTransformer):
    """Rewrites the loops of one module.

    Three lists have one item for the module and one for each function or class around the current node, outermost
    first. `loose`: whether the function may be suspended. `generator`: whether it is a plain generator function.
    `depth`: number of loops of the function around the current node.
    """

    def __init__(
        self, path: str, ids: Mapping[int, str], sites: list[LoopSite], *, autolog: bool, only: bool
    ) -> None:
        self.path = path
        self.ids = ids
        self.sites = sites
        self.autolog = autolog
        self.only = only
        self.split_ranges = True
        self.scope: list[str] = []
        self.loose = [False]
        self.generator = [False]
        self.depth = [0]

    @property
    def function(self) -> str:
        return ".".join(self.scope) or MODULE

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self.scope.append(node.name)
        yields = _yields(node) and not self.only
        self.loose.append(isinstance(node, ast.AsyncFunctionDef) or yields)
        # a function decorated with `types.coroutine` may `yield from` a coroutine, which is not iterable
        is_plain = not any(_name(decorator) == "coroutine" for decorator in node.decorator_list)
        self.generator.append(isinstance(node, ast.FunctionDef) and yields and is_plain)
        self.depth.append(0)
        # `forward` is not rewritten unless it logs: torch.compile and torch.jit trace it, and it does not train
        traced = node.name == "forward" and not _logs_or_prints(node.body)
        if not traced and not any(map(_compiles, node.decorator_list)):
            self.generic_visit(node)
        self.depth.pop()
        self.generator.pop()
        self.loose.pop()
        self.scope.pop()
        return node

    visit_FunctionDef = _visit_scope
    visit_AsyncFunctionDef = _visit_scope
    visit_ClassDef = _visit_scope

    def _id_of(self, node: Loop) -> str:
        recorded_id = self.ids.get(node.lineno)
        if recorded_id is None:  # the recorded version has no such loop: a probe adds it
            return f"{self.path}:{self.function}:+{node.lineno}:{loop_name(node, self.function)}"
        return recorded_id

    def _add_site(self, node: Loop) -> LoopSite:
        loop_id = self._id_of(node)
        site = LoopSite(
            id=loop_id,
            name=loop_id.rpartition(":")[2],
            path=self.path,
            line=node.lineno,
            may_log=_logs_or_prints(node.body) or self.autolog,
            loose=self.loose[-1] or isinstance(node, ast.AsyncFor),
            breaks=_breaks(node),
            inner=self.depth[-1] > 0,
            assigned=() if self.only else assigned_names(node),
            inside=()
            if self.only
            else tuple((self._id_of(loop), assigned_names(loop)) for loop in loops_inside(node)),
        )
        self.sites.append(site)
        return site

    def _rewrite_body(self, node: Loop) -> None:
        self.depth[-1] += 1
        self.generic_visit(node)
        self.depth[-1] -= 1
        if self.autolog:
            node.body = list(_with_logs(node.body))

    def _is_unwatched(self, node: Loop) -> bool:
        return self.only and node.lineno not in self.ids

    def visit_For(self, node: ast.For) -> ast.AST:
        if self._is_unwatched(node):
            self.generic_visit(node)
            return node
        site = self._add_site(node)
        suspends = self._suspends(node)
        self._rewrite_body(node)
        where = node.iter
        if suspends:
            items: ast.expr = _walked(site.id, _iterator(node.iter, node), where)
        elif (
            not site.loose
            and self.depth[-1] < _MAX_SPLIT_DEPTH
            and self.split_ranges
            and _is_range(node.iter)
        ):
            return _in_parts(node, site)
        else:
            items = _iterator(node.iter, node)
        node.iter = _at(where, _call(HOOK, site.id, items))
        return node

    def _suspends(self, node: Loop) -> bool:
        """Return True if the loop is in a generator function, and its body contains a `yield`."""
        return self.generator[-1] and any(
            isinstance(part, ast.Yield | ast.YieldFrom) for part in _nodes_in(node.body)
        )

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.YieldFrom) and self.generator[-1]:
            inner = node.value.value
            name = f"{self.function}:{node.lineno}:"
            node.value.value = _walked(name, _iterator(inner, node.value), inner)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        if self._is_unwatched(node):
            self.generic_visit(node)
            return node
        self._add_site(node)
        self._rewrite_body(node)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        if node.orelse or self._is_unwatched(node):
            # an `else` may contain a `break` of an outer loop: a loop with `else` is not rewritten
            self.generic_visit(node)
            return node
        site = self._add_site(node)
        suspends = self._suspends(node)
        self._rewrite_body(node)
        where = node.test
        head: list[ast.stmt] = []
        if not (isinstance(node.test, ast.Constant) and node.test.value):
            end = ast.copy_location(ast.Break(), node)
            end.end_lineno, end.end_col_offset = node.lineno, node.col_offset + len("while")
            head = [_at(where, ast.If(node.test, [ast.Pass()], [end]))]
        no_items: ast.expr = _at(where, ast.Constant(None))
        if suspends:
            no_items = _walked(site.id, no_items, where)
        endless = _at(where, _call(HOOK, site.id, no_items))
        target = _at(where, ast.Name(TURN, ast.Store()))
        loop = ast.For(target, endless, [*head, *node.body], [])
        return ast.copy_location(loop, node)


def _is_range(iterable: ast.expr) -> bool:
    return (
        isinstance(iterable, ast.Call)
        and isinstance(iterable.func, ast.Name)
        and iterable.func.id == "range"
    )


def _rebinds_range(node: ast.AST) -> bool:
    """Return True if `node` binds the name `range`, which then may not be the builtin."""
    if isinstance(node, ast.Name):
        return node.id == "range" and isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.alias):
        return (node.asname or node.name) == "range"
    return "range" in (getattr(node, "name", None), getattr(node, "arg", None))


def _in_parts(node: ast.For, site: LoopSite) -> ast.For:
    """Return `node`, a loop over a range, as two nested loops: over subranges, and over the numbers of each.

    A `break` of the user ends both loops. The `break` that is added for the outer loop has the position of one of
    the user's, so that the runtime finds it in `site.breaks`.
    """
    where = node.iter
    parts = _at(where, _call(PARTS, site.id, node.iter))
    numbers = ast.copy_location(
        ast.For(node.target, _at(where, ast.Name(PART, ast.Load())), node.body, []), node
    )
    body: list[ast.stmt] = [numbers]
    breaks = _own_breaks(node)
    if breaks:
        numbers.orelse = [ast.copy_location(ast.Continue(), node)]
        body.append(ast.copy_location(ast.Break(), breaks[-1]))
    target = _at(where, ast.Name(PART, ast.Store()))
    return ast.copy_location(ast.For(target, parts, body, node.orelse), node)


def _call(hook: str, site: str, argument: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(hook, ast.Load()), [ast.Constant(site), argument], [])


def _iterator(iterable: ast.expr, user: ast.AST) -> ast.Call:
    """Return the node of a call `iter(iterable)` with the position at which Python itself would call `iter`.

    `user` is the `for` loop or the `yield from` that iterates over `iterable`.
    """
    name = _at(iterable, ast.Name(ITER, ast.Load()))
    return _at(
        user if _iter_has_position_of_whole(loop=isinstance(user, ast.For)) else iterable,
        ast.Call(name, [iterable], []),
    )


@cache
def _iter_has_position_of_whole(*, loop: bool) -> bool:
    """Return True if this Python calls `iter` at the position of the whole `for` loop or `yield from`.

    Other versions of Python call `iter` at the position of the iterable. Tracebacks underline the position.
    With `loop`, the result is for `for` loops, otherwise for `yield from`.
    """
    text = "for x in y: pass" if loop else "def f(): yield from y"
    code = compile(text, "", "exec")
    if not loop:
        code = next(item for item in code.co_consts if isinstance(item, CodeType))
    names = ("GET_ITER", "GET_YIELD_FROM_ITER")
    position = next(item.positions for item in dis.get_instructions(code) if item.opname in names)
    return position is None or position.col_offset != text.rindex("y")


def _walked(site: str, iterable: ast.expr, where: ast.AST) -> ast.NamedExpr:
    """Return an expression that wraps `iterable` by `WALK` and assigns the result to a local variable.

    The name of the variable ends in the number of the loop, which is taken from its id `site`.
    """
    # the id of a loop that a probe adds has a line in place of a number: no two loops share a variable
    ordinal = site.rsplit(":", 2)[1].replace("+", "line_")
    name = ast.Name(f"{WALK}{ordinal}", ast.Store())
    call = ast.Call(ast.Name(WALK, ast.Load()), [iterable], [])
    return _at(where, ast.NamedExpr(name, call))


def _at(where: ast.AST, node: _Node) -> _Node:
    """Give all parts of `node` that have no position yet the position of `where`, and return `node`."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt) and not hasattr(part, "lineno"):
            ast.copy_location(part, where)
    return node


def _nodes_in(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the syntax nodes in statements, without those inside functions, lambdas and classes."""
    remaining: list[ast.AST] = list(nodes)
    while remaining:
        node = remaining.pop()
        yield node
        scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        if not isinstance(node, scopes):
            remaining.extend(ast.iter_child_nodes(node))


def _compiles(decorator: ast.expr) -> bool:
    """Return True if `decorator` is in `COMPILERS`, also as the argument of another decorator."""
    while isinstance(decorator, ast.Call):
        if any(map(_compiles, decorator.args)):  # such as `functools.partial(jax.jit, …)`
            return True
        decorator = decorator.func
    return _name(decorator) in COMPILERS


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _nodes_in(function.body))


def _breaks(loop: Loop) -> frozenset[tuple[int, int]]:
    if loop.orelse:
        return frozenset()
    ends = {(loop.lineno, loop.col_offset)} if isinstance(loop, ast.While) else set()
    return frozenset(
        ends | {(statement.lineno, statement.col_offset) for statement in _own_breaks(loop)}
    )


def _own_breaks(loop: Loop) -> list[ast.Break]:
    """Return every `break` that ends `loop`, without those that end a loop inside it."""
    breaks = []
    remaining: list[ast.AST] = list(loop.body)
    while remaining:
        node = remaining.pop()
        if isinstance(node, ast.Break):
            breaks.append(node)
        elif isinstance(node, Loop):
            remaining.extend(node.orelse)  # a `break` in the `else` of a loop ends the loop around
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            remaining.extend(ast.iter_child_nodes(node))
    return breaks


def _logs_or_prints(body: list[ast.stmt]) -> bool:
    for node in _nodes_in(body):
        if isinstance(node, ast.Call):
            if _name(node.func) in LOG_CALLS:
                return True
    return False


def _with_logs(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of `body`, each followed by calls that log the plain variables it assigns."""
    for statement in body:
        yield statement
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
            targets = [statement.target]
        names = [
            part.id
            for target in targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        ]
        for name in names:
            attribute = ast.Attribute(ast.Name(HOOK, ast.Load()), "scalar", ast.Load())
            value = ast.Name(name, ast.Load())
            call = ast.Call(attribute, [ast.Constant(name), value], [])
            yield _at(statement, ast.Expr(call))


_STORES = {opmap[name] for name in ("STORE_FAST", "STORE_NAME")}
_LOADS = {opmap[name] for name in ("LOAD_FAST", "LOAD_NAME", "LOAD_FAST_BORROW") if name in opmap}
_STORE_AND_LOAD = opmap.get("STORE_FAST_LOAD_FAST", -1)
"""Number of the instruction that stores one variable and loads another; -1 before Python 3.13."""


def without_targets(code: CodeType) -> CodeType:
    r"""Return `code` changed so that it does not bind the loop variables `PART` and `TURN` of added loops.

    Otherwise `locals()`, `vars()`, `dir()` and class bodies would show these variables. `PART` is stored only to
    be loaded at once, so the value can stay on the stack; `TURN` is never read, so the value can be dropped. If a
    version of Python compiles a store in an unknown way, the variable stays.

    >>> tree = ast.parse("def f():\n  for i in range(2): x = i\n  return locals()")
    >>> _ = instrument(tree, "t.py")
    >>> space = {PARTS: lambda site, numbers: (numbers,), ITER: iter}
    >>> exec(without_targets(compile(tree, "t.py", "exec")), space)
    >>> space["f"]()
    {'i': 1, 'x': 1}
    """
    constants = tuple(
        without_targets(each) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    data = bytearray(code.co_code)
    names = code.co_varnames if code.co_flags & CO_OPTIMIZED else code.co_names
    for name in (PART, TURN):
        if name in names:
            _remove_stores(data, names.index(name), with_loads=name == PART)
    return code.replace(co_code=bytes(data), co_consts=constants)


def _remove_stores(data: bytearray, number: int, *, with_loads: bool) -> None:
    """Remove each store of variable `number` from bytecode, in place.

    With `with_loads`, the load that follows the store is removed too, so that the value stays on the stack;
    without, the value is popped.
    """
    for (at, store, first), (then, load, second) in pairwise(_instructions(data)):
        if store == _STORE_AND_LOAD and with_loads and first == number << 4 | number:
            data[at] = opmap["NOP"]
        elif store in _STORES and first == number:
            if not with_loads:
                data[at] = opmap["POP_TOP"]
            elif load in _LOADS and second == number:
                data[at] = data[then] = opmap["NOP"]


def _instructions(data: bytearray) -> list[tuple[int, int, int]]:
    """Return (position, instruction, argument) for each instruction of bytecode.

    An `EXTENDED_ARG` is merged into the argument of the next instruction; `CACHE` entries are left out.
    """
    high = 0
    instructions = []
    for at in range(0, len(data), 2):
        instruction, argument = data[at], data[at + 1] | high
        high = argument << 8 if instruction == opmap["EXTENDED_ARG"] else 0
        if instruction not in (opmap["EXTENDED_ARG"], opmap["CACHE"]):
            instructions.append((at, instruction, argument))
    return instructions
