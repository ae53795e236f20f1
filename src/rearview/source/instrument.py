"""Rewrite the loops of a module so that the runtime sees every iteration.

`for x in xs` becomes `for x in __rearview__("id", iter(xs))`, and `while test` becomes a `for` over an
endless iterator whose body first tests. A loop over a `range` becomes two, over its parts and over the
numbers of each, so that Python iterates over a plain range at full speed. Positions are kept, so
tracebacks, debuggers, coverage and profilers see the user's own lines.
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
"""Name of the runtime's entry. It ends in underscores: not mangled in classes."""
ITER = "__rearview_iter__"
"""Name of Python's own `iter`. The program calls it itself, so that a traceback shows no frame of ours, and
passes the iterator to the runtime."""
PARTS = "__rearview_parts__"
"""Name of the entry for loops over a `range`: it gives the range in parts."""
TURN = "__rearview_turn__"
"""Target of rewritten `while` loops; the runtime leaves it out of the state."""
PART = "__rearview_part__"
"""Target of the outer of the two loops over a `range`; left out of the state too."""
_DEEP = 4
"""Depth of nested loops up to which each becomes two: Python allows twenty nested blocks in all."""

COMPILERS = {
    *("jit", "njit", "pjit", "compile", "script", "script_method", "vectorize", "guvectorize"),
    *("stencil", "cuda_jit", "kernel"),
}
"""Decorators that compile a function from its text or bytecode: such a function is not rewritten."""

WALK = "__rearview_walk__"
"""Name of the function that keeps a loop's iterator in a local variable of a generator, so that a checkpoint
can capture it."""

LOG_CALLS = {
    *("log", "print", "info", "debug", "warning", "log_metric", "log_metrics", "log_dict"),
    *("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text"),
}
"""Names of calls that log or print; a loop that contains one is always watched."""


@dataclass(frozen=True, slots=True)
class LoopSite:
    """One loop in the program text, with the facts that the runtime needs."""

    id: str
    name: str
    path: str
    line: int
    talks: bool
    """Its body logs or prints."""
    loose: bool
    """It is in a generator or coroutine, so it may be suspended while other code runs."""
    breaks: frozenset[tuple[int, int]]
    """Line and column of every `break` after which the program continues where it would if the loop had ended."""
    inner: bool
    """Another loop of the same function encloses it."""
    assigned: tuple[str, ...] = ()
    """Variables that its body assigns outside loops inside it."""
    inside: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Loops inside it in the same function: the id of each, and the variables that it assigns."""


def instrument(
    tree: ast.Module,
    path: str,
    *,
    ids: Mapping[int, str] | None = None,
    autolog: bool = False,
    only: bool = False,
    suspends: bool = False,
) -> list[LoopSite]:
    """Rewrite `tree` in place and return its loops in order of appearance.

    `ids` gives, by line number, the ids that loops have in the version that was recorded, so that
    a probed text keeps them. With `autolog`, every scalar assigned in a loop is logged. With
    `only`, just the loops in `ids` are rewritten, and they count as never suspended, even in a
    generator function. With `suspends`, the module itself runs as a coroutine, as a notebook's cell
    with `await` does.
    """
    sites: list[LoopSite] = []
    if ids is None:
        ids = {line: str(loop_id) for line, loop_id in loop_ids(tree, path).items()}
    rewriter = _Rewriter(path, ids, sites, autolog=autolog, only=only)
    rewriter.loose = [suspends]
    rewriter.parts = not any(map(_names_range, ast.walk(tree)))
    rewriter.visit(tree)
    if sites:
        ast.fix_missing_locations(tree)
    return sites


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, path: str, ids: Mapping[int, str], sites: list[LoopSite], *, autolog: bool, only: bool
    ) -> None:
        self.path = path
        self.ids = ids
        self.sites = sites
        self.autolog = autolog
        self.only = only
        self.parts = True
        self.scope: list[str] = []
        self.loose = [False]
        self.generator = [False]
        self.depth = [0]

    @property
    def function(self) -> str:
        return ".".join(self.scope) or MODULE

    def _scoped(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self.scope.append(node.name)
        yields = _yields(node) and not self.only
        self.loose.append(isinstance(node, ast.AsyncFunctionDef) or yields)
        # a function under `types.coroutine` may `yield from` a coroutine, which is not iterable
        plain = not any(_name(decorator) == "coroutine" for decorator in node.decorator_list)
        self.generator.append(isinstance(node, ast.FunctionDef) and yields and plain)
        self.depth.append(0)
        # not rewritten: torch.compile and torch.jit trace `forward`, and it contains no training loop
        traced = node.name == "forward" and not _talks(node.body)
        if not traced and not any(map(_compiles, node.decorator_list)):
            self.generic_visit(node)
        self.depth.pop()
        self.generator.pop()
        self.loose.pop()
        self.scope.pop()
        return node

    visit_FunctionDef = _scoped
    visit_AsyncFunctionDef = _scoped
    visit_ClassDef = _scoped

    def _id(self, node: Loop) -> str:
        recorded_id = self.ids.get(node.lineno)
        if recorded_id is None:  # a loop that a probe adds
            return f"{self.path}:{self.function}:+{node.lineno}:{loop_name(node, self.function)}"
        return recorded_id

    def _site(self, node: Loop) -> LoopSite:
        loop_id = self._id(node)
        site = LoopSite(
            id=loop_id,
            name=loop_id.rpartition(":")[2],
            path=self.path,
            line=node.lineno,
            talks=_talks(node.body) or self.autolog,
            loose=self.loose[-1] or isinstance(node, ast.AsyncFor),
            breaks=_breaks(node),
            inner=self.depth[-1] > 0,
            assigned=() if self.only else assigned_names(node),
            inside=()
            if self.only
            else tuple((self._id(loop), assigned_names(loop)) for loop in loops_inside(node)),
        )
        self.sites.append(site)
        return site

    def _body(self, node: Loop) -> None:
        self.depth[-1] += 1
        self.generic_visit(node)
        self.depth[-1] -= 1
        if self.autolog:
            node.body = list(_with_logs(node.body))

    def _left_alone(self, node: Loop) -> bool:
        return self.only and node.lineno not in self.ids

    def visit_For(self, node: ast.For) -> ast.AST:
        if self._left_alone(node):
            self.generic_visit(node)
            return node
        site = self._site(node)
        suspends = self._suspends(node)
        self._body(node)
        where = node.iter
        if suspends:
            items: ast.expr = _walked(site.id, _iterator(node.iter, node), where)
        elif not site.loose and self.depth[-1] < _DEEP and self.parts and _is_range(node.iter):
            return _in_parts(node, site)
        else:
            items = _iterator(node.iter, node)
        node.iter = _at(where, _call(HOOK, site.id, items))
        return node

    def _suspends(self, node: Loop) -> bool:
        return self.generator[-1] and any(
            isinstance(part, ast.Yield | ast.YieldFrom) for part in _own(node.body)
        )

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.YieldFrom) and self.generator[-1]:
            inner = node.value.value
            name = f"{self.function}:{node.lineno}:"
            node.value.value = _walked(name, _iterator(inner, node.value), inner)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        if self._left_alone(node):
            self.generic_visit(node)
            return node
        self._site(node)
        self._body(node)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        if node.orelse or self._left_alone(node):
            # its `else` may contain a `break` of an outer loop: this loop is not rewritten
            self.generic_visit(node)
            return node
        site = self._site(node)
        suspends = self._suspends(node)
        self._body(node)
        where = node.test
        head: list[ast.stmt] = []
        if not (isinstance(node.test, ast.Constant) and node.test.value):
            done = ast.copy_location(ast.Break(), node)
            done.end_lineno, done.end_col_offset = node.lineno, node.col_offset + len("while")
            head = [_at(where, ast.If(node.test, [ast.Pass()], [done]))]
        nothing: ast.expr = _at(where, ast.Constant(None))
        if suspends:
            nothing = _walked(site.id, nothing, where)
        endless = _at(where, _call(HOOK, site.id, nothing))
        target = _at(where, ast.Name(TURN, ast.Store()))
        loop = ast.For(target, endless, [*head, *node.body], [])
        return ast.copy_location(loop, node)


def _is_range(iterable: ast.expr) -> bool:
    return (
        isinstance(iterable, ast.Call)
        and isinstance(iterable.func, ast.Name)
        and iterable.func.id == "range"
    )


def _names_range(node: ast.AST) -> bool:
    """Return True if a node binds the name `range` to something other than the builtin."""
    if isinstance(node, ast.Name):
        return node.id == "range" and isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.alias):
        return (node.asname or node.name) == "range"
    return "range" in (getattr(node, "name", None), getattr(node, "arg", None))


def _in_parts(node: ast.For, site: LoopSite) -> ast.For:
    """Return two nested loops: over the parts of a range, and over the numbers of each part.

    A `break` of the user leaves both loops: the `break` added for the outer one has the position of the
    user's, so that the runtime takes it for the user's.
    """
    where = node.iter
    parts = _at(where, _call(PARTS, site.id, node.iter))
    numbers = ast.copy_location(
        ast.For(node.target, _at(where, ast.Name(PART, ast.Load())), node.body, []), node
    )
    body: list[ast.stmt] = [numbers]
    leaving = _own_breaks(node)
    if leaving:
        numbers.orelse = [ast.copy_location(ast.Continue(), node)]
        body.append(ast.copy_location(ast.Break(), leaving[-1]))
    target = _at(where, ast.Name(PART, ast.Store()))
    return ast.copy_location(ast.For(target, parts, body, node.orelse), node)


def _call(hook: str, site: str, argument: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(hook, ast.Load()), [ast.Constant(site), argument], [])


def _iterator(iterable: ast.expr, user: ast.AST) -> ast.Call:
    """Return a call of `iter` at the position at which Python itself gets the iterator of `user`."""
    name = _at(iterable, ast.Name(ITER, ast.Load()))
    return _at(
        user if _asks_as_whole(loop=isinstance(user, ast.For)) else iterable,
        ast.Call(name, [iterable], []),
    )


@cache
def _asks_as_whole(*, loop: bool) -> bool:
    """Return True if this Python gets an iterator at the position of the whole statement.

    Other versions of Python do so at the position of the expression. Tracebacks underline that position.
    """
    text = "for x in y: pass" if loop else "def f(): yield from y"
    code = compile(text, "", "exec")
    if not loop:
        code = next(item for item in code.co_consts if isinstance(item, CodeType))
    asks = ("GET_ITER", "GET_YIELD_FROM_ITER")
    placed = next(item.positions for item in dis.get_instructions(code) if item.opname in asks)
    return placed is None or placed.col_offset != text.rindex("y")


def _walked(site: str, iterable: ast.expr, where: ast.AST) -> ast.NamedExpr:
    """Return an expression that keeps the iterator in a local variable named by the loop."""
    # a loop that a probe adds is numbered by its line: no other loop has that variable
    ordinal = site.rsplit(":", 2)[1].replace("+", "line_")
    name = ast.Name(f"{WALK}{ordinal}", ast.Store())
    call = ast.Call(ast.Name(WALK, ast.Load()), [iterable], [])
    return _at(where, ast.NamedExpr(name, call))


def _at(where: ast.AST, node: _Node) -> _Node:
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt) and not hasattr(part, "lineno"):
            ast.copy_location(part, where)
    return node


def _own(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk statements without entering functions, lambdas and classes defined in them."""
    todo: list[ast.AST] = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        if not isinstance(node, inside):
            todo.extend(ast.iter_child_nodes(node))


def _compiles(decorator: ast.expr) -> bool:
    """Return True if a decorator compiles the function from its text or bytecode."""
    while isinstance(decorator, ast.Call):
        if any(map(_compiles, decorator.args)):  # functools.partial(jax.jit, …)
            return True
        decorator = decorator.func
    return _name(decorator) in COMPILERS


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function.body))


def _breaks(loop: Loop) -> frozenset[tuple[int, int]]:
    if loop.orelse:
        return frozenset()
    ends = {(loop.lineno, loop.col_offset)} if isinstance(loop, ast.While) else set()
    return frozenset(
        ends | {(statement.lineno, statement.col_offset) for statement in _own_breaks(loop)}
    )


def _own_breaks(loop: Loop) -> list[ast.Break]:
    """Return every `break` that leaves this loop, not a loop inside it."""
    breaks = []
    todo: list[ast.AST] = list(loop.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Break):
            breaks.append(node)
        elif isinstance(node, Loop):
            todo.extend(node.orelse)  # a break there belongs to the loop around it
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo.extend(ast.iter_child_nodes(node))
    return breaks


def _talks(body: list[ast.stmt]) -> bool:
    for node in _own(body):
        if isinstance(node, ast.Call):
            if _name(node.func) in LOG_CALLS:
                return True
    return False


def _with_logs(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield `body` with a log call after each assignment of plain names."""
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
_BOTH = opmap.get("STORE_FAST_LOAD_FAST", -1)
"""One instruction for a store and the load after it, from Python 3.13 on."""


def without_targets(code: CodeType) -> CodeType:
    r"""Return code that does not bind the targets of the loops that `instrument` adds.

    Without this, `locals()`, `vars()`, `dir()` and class bodies would show them. The part of a range is
    stored only to be loaded at once, so it can stay on the stack; the target of a rewritten `while` is
    never read, so it can be dropped. If a version of Python compiles them in an unknown way, they stay.

    >>> tree = ast.parse("def f():\n  for i in range(2): x = i\n  return locals()")
    >>> _ = instrument(tree, "t.py")
    >>> space = {PARTS: lambda site, numbers: (numbers,), ITER: iter}
    >>> exec(without_targets(compile(tree, "t.py", "exec")), space)
    >>> space["f"]()
    {'i': 1, 'x': 1}
    """
    kept = tuple(
        without_targets(each) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    data = bytearray(code.co_code)
    names = code.co_varnames if code.co_flags & CO_OPTIMIZED else code.co_names
    for name in (PART, TURN):
        if name in names:
            _drop(data, names.index(name), pairs=name == PART)
    return code.replace(co_code=bytes(data), co_consts=kept)


def _drop(data: bytearray, number: int, *, pairs: bool) -> None:
    """Remove each store of variable `number`: with the load after it if `pairs`, else by popping the value."""
    words = [*_words(data)]
    for (at, store, first), (then, load, second) in pairwise(words):
        if store == _BOTH and pairs and first == number << 4 | number:
            data[at] = opmap["NOP"]
        elif store in _STORES and first == number:
            if not pairs:
                data[at] = opmap["POP_TOP"]
            elif load in _LOADS and second == number:
                data[at] = data[then] = opmap["NOP"]


def _words(data: bytearray) -> Iterator[tuple[int, int, int]]:
    """Yield (position, instruction, argument) of bytecode, without prefixes and caches."""
    high = 0
    for at in range(0, len(data), 2):
        instruction, argument = data[at], data[at + 1] | high
        high = argument << 8 if instruction == opmap["EXTENDED_ARG"] else 0
        if instruction not in (opmap["EXTENDED_ARG"], opmap["CACHE"]):
            yield at, instruction, argument
