"""Compute how far back the replay of a probe must start, because variables of probes carry values between iterations.

A checkpoint contains the state of the run, not the variables that a probe adds. If a probe counts iterations, or
reads at the end of an epoch what it collected in the steps, its values are exact only if the replay starts before
the first of these iterations.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from rearview.source import mutations
from rearview.source.log_calls import Aliases, log_call
from rearview.source.loops import FUNCTIONS, LOOPS
from rearview.source.mutations import last_name, root
from rearview.source.probes.align import AddedStatement
from rearview.source.probes.extracted_variables import ExtractedVariable
from rearview.source.scopes import COMPREHENSIONS, Scope, Scopes

START = -1
"""`Need.depth` of a probe whose replay must start with the program."""

Chain = tuple[int, ...]
"""The `id()`s of the syntax nodes of nested loops, from the outermost in."""
VariableInContext = tuple[ExtractedVariable, tuple[ast.AST, ...]]
"""(extracted variable, syntax nodes that enclose the statement that assigns it)."""


@dataclass(frozen=True, slots=True)
class Need:
    """The loops in which the replay of an added statement may start, and the loops whose values it reads."""

    depth: int
    """Number of loops around the statement, from the outermost in, of which a replay may skip first iterations. The
    other loops around it must run from their first iteration. START: the replay must start with the program.
    """
    feeding_loops: tuple[tuple[ast.AST, ...], ...]
    """Loops that assign variables which the statement reads, but that do not enclose the statement.

    Each loop is given as the chain of nested loops from the outermost to itself."""


@dataclass(slots=True)
class _Event:
    """One read or write of a variable by an added or edited statement."""

    stmt: int
    order: tuple[int, int]
    chain: Chain
    blocks: tuple[int, ...]
    plain: bool
    """Whether the event is an assignment that replaces the previous value without using it."""
    foreign: bool
    """Whether the variable belongs to another scope than the statement, or is used in another scope."""


@dataclass(slots=True)
class _Uses:
    writes: list[_Event] = field(default_factory=list)
    reads: list[_Event] = field(default_factory=list)


class _Collector(ast.NodeVisitor):
    def __init__(self, scopes: Scopes, aliases: Aliases) -> None:
        self.scopes = scopes
        self.aliases = aliases
        self.uses: dict[tuple[int, str], _Uses] = {}
        self.base: Scope = scopes.top
        self.scope: Scope = scopes.top
        self.stmt = 0
        self.chain: Chain = ()
        self.blocks: tuple[int, ...] = ()

    def collect(self, number: int, added_statement: AddedStatement, chain: Chain) -> None:
        self.stmt, self.chain = number, chain
        self.blocks = tuple(id(parent) for parent in added_statement.parents)
        self.base = self.scope = self.scopes.of[id(added_statement.node)]
        self.visit(added_statement.node)

    def collect_extracted(
        self,
        number: int,
        added_statement: AddedStatement,
        chain: Chain,
        variable: ExtractedVariable,
    ) -> None:
        """Record that a recorded statement (`added_statement`, as edited) assigns the extracted `variable`."""
        self.stmt, self.chain = number, chain
        self.blocks = tuple(id(parent) for parent in added_statement.parents)
        self.base = self.scope = self.scopes.of[id(added_statement.node)]
        self._record(variable.target.id, variable.target, write=True, plain=variable.sure)

    def visit(self, node: ast.AST) -> None:
        outer = self.scope, self.blocks
        if isinstance(node, ast.stmt):
            self._statement(node)
        self.scope = self.scopes.opened.get(id(node), self.scope)
        block = isinstance(node, ast.stmt | ast.excepthandler | ast.match_case)
        # it is not certain that a block runs, except for the body of a `with`
        if block and hasattr(node, "body") and not isinstance(node, ast.With | ast.AsyncWith):
            self.blocks = (*self.blocks, id(node))
        super().visit(node)
        self.scope, self.blocks = outer

    def _record(self, name: str, node: ast.AST, *, write: bool, plain: bool) -> None:
        binding_scope = self.scope.owner_of(name)
        if (
            binding_scope is None
            or name not in binding_scope.added_bound
            or self._within(binding_scope)
        ):
            return
        position = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        scope = self.scope
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
            scope = scope.parent
        foreign = binding_scope is not self.base or scope is not self.base
        event = _Event(self.stmt, position, self.chain, self.blocks, plain, foreign)
        uses = self.uses.setdefault((id(binding_scope), name), _Uses())
        (uses.writes if write else uses.reads).append(event)

    def _within(self, scope: Scope) -> bool:
        """Return True if `scope` is inside the current statement: its variables exist only there."""
        up = scope.parent
        while up is not None:
            if up is self.base:
                return True
            up = up.parent
        return False

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self._record(node.name, node, write=True, plain=True)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                self._record(name, node, write=True, plain=True)
        elif isinstance(node, ast.AugAssign):
            base = root(node.target)
            if isinstance(base, ast.Name):
                self._record(base.id, node, write=False, plain=False)
                self._record(base.id, node, write=True, plain=False)
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            self._mutation(call if log_call(call, self.aliases) is None else None)

    def _mutation(self, call: ast.Call | None) -> None:
        if call is None:
            return
        # a call whose result is not used may change every variable of the probe that is passed to it
        bases = [root(arg) for arg in (*call.args, *(k.value for k in call.keywords))]
        if isinstance(call.func, ast.Attribute):
            bases.append(root(call.func.value))
        for base in bases:
            if isinstance(base, ast.Name):
                binding_scope = self.scope.owner_of(base.id)
                if binding_scope is not None and binding_scope.kinds.get(base.id) == "value":
                    self._record(base.id, base, write=True, plain=False)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._record(node.id, node, write=False, plain=False)
        elif isinstance(node.ctx, ast.Store):
            self._record(node.id, node, write=True, plain=True)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)

    def _store(self, node: ast.Subscript | ast.Attribute) -> None:
        base = root(node)
        if not isinstance(node.ctx, ast.Load) and isinstance(base, ast.Name):
            self._record(base.id, node, write=True, plain=False)
        self.generic_visit(node)

    visit_Subscript = visit_Attribute = _store

    def visit_Assign(self, node: ast.Assign) -> None:
        # the value is read before the target is bound
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Call(self, node: ast.Call) -> None:
        called = last_name(node.func)
        changes = (
            called in mutations.CHANGING_METHODS or called in mutations.FIRST_ARGUMENT_FUNCTIONS
        )
        if changes or (called.endswith("_") and not called.endswith("__")):
            self._mutation(node)
        self.generic_visit(node)

    def _loop(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        for stmt in (*node.body, *node.orelse):
            self.visit(stmt)

    visit_For = visit_AsyncFor = _loop


def needs(
    added_statements: Sequence[AddedStatement],
    scopes: Scopes,
    aliases: Aliases,
    extracted_variables: Sequence[VariableInContext] = (),
) -> list[Need]:
    """Return the `Need` of each added statement, in order."""
    collector = _Collector(scopes, aliases)
    loops: dict[int, ast.AST] = {}
    chains: list[Chain] = []
    extracting_statements = [
        AddedStatement(each.stmt, parents) for each, parents in extracted_variables
    ]
    for number, item in enumerate([*added_statements, *extracting_statements]):
        chain: Chain = ()
        for parent in item.parents:
            if isinstance(parent, FUNCTIONS):
                chain = ()
            elif isinstance(parent, LOOPS):
                loops[id(parent)] = parent
                chain = (*chain, id(parent))
        chains.append(chain)
        if number < len(added_statements):
            collector.collect(number, item, chain)
        else:
            collector.collect_extracted(
                number, item, chain, extracted_variables[number - len(added_statements)][0]
            )
    depths = [len(chain) for chain in chains]
    feeds: list[set[Chain]] = [set() for _ in chains]
    changed = True
    while changed:
        changed = False
        for uses in collector.uses.values():
            for read in uses.reads:
                depth, feed = _needs_of_read(read, uses.writes, depths, feeds)
                if depth < depths[read.stmt] or not feed <= feeds[read.stmt]:
                    depths[read.stmt] = min(depth, depths[read.stmt])
                    feeds[read.stmt] |= feed
                    changed = True
    return [
        Need(depth, tuple(tuple(loops[key] for key in chain) for chain in sorted(feed, key=len)))
        for depth, feed in zip(depths[: len(added_statements)], feeds, strict=False)
    ]


def _needs_of_read(
    read: _Event, writes: list[_Event], depths: list[int], feeds: list[set[Chain]]
) -> tuple[int, set[Chain]]:
    """Return (depth, chains of feeding loops) of a `Need` that results from one read of a variable.

    `writes` are all writes of the variable; `depths` and `feeds` are the results so far for each statement.
    """
    depth = depths[read.stmt]
    feed: set[Chain] = set()
    if read.foreign or any(write.foreign for write in writes):
        # the order of calls is unknown: the value is certain only if no loop and no other scope writes the variable
        changing_writes = [write for write in writes if write.chain or write.foreign]
        return (START if changing_writes else depth), {
            write.chain for write in changing_writes if write.chain
        }
    sure_writes = [
        write
        for write in writes
        if write.plain
        and write.order < read.order
        and read.blocks[: len(write.blocks)] == write.blocks
    ]
    last_sure = max(sure_writes, key=lambda write: write.order, default=None)
    if last_sure is not None and last_sure.stmt == read.stmt:
        return depth, feed  # each execution of the statement assigns the variable before reading it
    reaching_writes = [write for write in writes if _reaches(write, read, last_sure)]
    if last_sure is not None and last_sure.chain:
        depth = min(depth, len(last_sure.chain))
    elif any(write.chain for write in reaching_writes):
        depth = min(depth, 0)
    for write in reaching_writes if last_sure is None else (*reaching_writes, last_sure):
        if write.chain != read.chain[: len(write.chain)]:
            feed.add(write.chain)
        if write.stmt != read.stmt:
            feed |= feeds[write.stmt]
            if depths[write.stmt] < len(write.chain):
                depth = min(depth, depths[write.stmt])
    return depth, feed


def _reaches(write: _Event, read: _Event, last_sure: _Event | None) -> bool:
    """Return True if `read` may read the value that `write` assigns.

    `last_sure` is the last assignment that certainly runs before `read`, or None.
    """
    shared = 0
    for write_loop, read_loop in zip(write.chain, read.chain, strict=False):
        if write_loop != read_loop:
            break
        shared += 1
    if last_sure is None:
        return write.order < read.order or shared > 0
    if write is last_sure or write.order < last_sure.order:
        return False
    return write.order < read.order or shared > len(last_sure.chain)
