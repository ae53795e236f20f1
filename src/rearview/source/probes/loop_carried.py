"""How far back the replay of a probe must start because its own variables carry values between iterations.

A checkpoint contains the state of the run, not the variables that a probe adds. A probe that counts
iterations, or that reads at the end of an epoch what it collected in its steps, is exact only if the
replay starts before the first of those iterations.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from rearview.source import mutations
from rearview.source.log_calls import Aliases, log_call
from rearview.source.loops import FUNCTIONS, LOOPS
from rearview.source.mutations import last_name, root
from rearview.source.probes.align import Added
from rearview.source.probes.naming_edits import NamedValue
from rearview.source.scopes import COMPREHENSIONS, Scope, Scopes

START = -1
"""Depth of a probe whose replay must start with the program."""

Chain = tuple[int, ...]
NamedInContext = tuple[NamedValue, tuple[ast.AST, ...]]
"""A name that a recorded statement gives to its value, with the nodes around the statement."""


@dataclass(frozen=True, slots=True)
class Need:
    """Where the replay of an added statement may start, and which loops must run to feed it."""

    depth: int
    """How many loops of its function may be entered in the middle; START: none, nor the callers' loops."""
    feeds: tuple[tuple[ast.AST, ...], ...]
    """Chains of other loops whose iterations must run for it."""


@dataclass(slots=True)
class _Event:
    stmt: int
    order: tuple[int, int]
    chain: Chain
    blocks: tuple[int, ...]
    plain: bool
    """An unconditional assignment: the value before it does not matter."""
    foreign: bool


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

    def look(self, number: int, added: Added, chain: Chain) -> None:
        self.stmt, self.chain = number, chain
        self.blocks = tuple(id(parent) for parent in added.parents)
        self.base = self.scope = self.scopes.of[id(added.node)]
        self.visit(added.node)

    def name(self, number: int, added: Added, chain: Chain, named_value: NamedValue) -> None:
        """Record that a recorded statement gives its value a name."""
        self.stmt, self.chain = number, chain
        self.blocks = tuple(id(parent) for parent in added.parents)
        self.base = self.scope = self.scopes.of[id(added.node)]
        self._note(named_value.target.id, named_value.target, write=True, plain=named_value.sure)

    def visit(self, node: ast.AST) -> None:
        kept = self.scope, self.blocks
        if isinstance(node, ast.stmt):
            self._statement(node)
        self.scope = self.scopes.opened.get(id(node), self.scope)
        block = isinstance(node, ast.stmt | ast.excepthandler | ast.match_case)
        # only a `with` certainly runs its body
        if block and hasattr(node, "body") and not isinstance(node, ast.With | ast.AsyncWith):
            self.blocks = (*self.blocks, id(node))
        super().visit(node)
        self.scope, self.blocks = kept

    def _note(self, name: str, node: ast.AST, *, write: bool, plain: bool) -> None:
        home = self.scope.owner_of(name)
        if home is None or name not in home.added_bound or self._within(home):
            return
        position = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        scope = self.scope
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
            scope = scope.parent
        foreign = home is not self.base or scope is not self.base
        event = _Event(self.stmt, position, self.chain, self.blocks, plain, foreign)
        uses = self.uses.setdefault((id(home), name), _Uses())
        (uses.writes if write else uses.reads).append(event)

    def _within(self, scope: Scope) -> bool:
        """Return True if a scope is inside the statement: its variables exist only there."""
        up = scope.parent
        while up is not None:
            if up is self.base:
                return True
            up = up.parent
        return False

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self._note(node.name, node, write=True, plain=True)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                self._note(name, node, write=True, plain=True)
        elif isinstance(node, ast.AugAssign):
            base = root(node.target)
            if isinstance(base, ast.Name):
                self._note(base.id, node, write=False, plain=False)
                self._note(base.id, node, write=True, plain=False)
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            self._mutation(call if log_call(call, self.aliases) is None else None)

    def _mutation(self, call: ast.Call | None) -> None:
        if call is None:
            return
        # called for its effect: it may change any variable of the probe that it gets
        bases = [root(arg) for arg in (*call.args, *(k.value for k in call.keywords))]
        if isinstance(call.func, ast.Attribute):
            bases.append(root(call.func.value))
        for base in bases:
            if isinstance(base, ast.Name):
                home = self.scope.owner_of(base.id)
                if home is not None and home.kinds.get(base.id) == "value":
                    self._note(base.id, base, write=True, plain=False)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(node.id, node, write=False, plain=False)
        elif isinstance(node.ctx, ast.Store):
            self._note(node.id, node, write=True, plain=True)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)

    def _store(self, node: ast.Subscript | ast.Attribute) -> None:
        base = root(node)
        if not isinstance(node.ctx, ast.Load) and isinstance(base, ast.Name):
            self._note(base.id, node, write=True, plain=False)
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
    added: Sequence[Added],
    scopes: Scopes,
    aliases: Aliases,
    named_values: Sequence[NamedInContext] = (),
) -> list[Need]:
    """Return, for each added statement, where its replay may start."""
    collector = _Collector(scopes, aliases)
    loops: dict[int, ast.AST] = {}
    chains: list[Chain] = []
    named = [Added(each.stmt, parents) for each, parents in named_values]
    for number, item in enumerate([*added, *named]):
        chain: Chain = ()
        for parent in item.parents:
            if isinstance(parent, FUNCTIONS):
                chain = ()
            elif isinstance(parent, LOOPS):
                loops[id(parent)] = parent
                chain = (*chain, id(parent))
        chains.append(chain)
        if number < len(added):
            collector.look(number, item, chain)
        else:
            collector.name(number, item, chain, named_values[number - len(added)][0])
    depths = [len(chain) for chain in chains]
    feeds: list[set[Chain]] = [set() for _ in chains]
    changed = True
    while changed:
        changed = False
        for uses in collector.uses.values():
            for read in uses.reads:
                depth, feed = _limit(read, uses.writes, depths, feeds)
                if depth < depths[read.stmt] or not feed <= feeds[read.stmt]:
                    depths[read.stmt] = min(depth, depths[read.stmt])
                    feeds[read.stmt] |= feed
                    changed = True
    return [
        Need(depth, tuple(tuple(loops[key] for key in chain) for chain in sorted(feed, key=len)))
        for depth, feed in zip(depths[: len(added)], feeds, strict=False)
    ]


def _limit(
    read: _Event, writes: list[_Event], depths: list[int], feeds: list[set[Chain]]
) -> tuple[int, set[Chain]]:
    """Return (depth, chains that feed it) that result from one read of one variable."""
    depth = depths[read.stmt]
    feed: set[Chain] = set()
    if read.foreign or any(write.foreign for write in writes):
        # the order of calls is unknown: only a variable that no loop changes is certain
        changing = [write for write in writes if write.chain or write.foreign]
        return (START if changing else depth), {write.chain for write in changing if write.chain}
    sure = [
        write
        for write in writes
        if write.plain
        and write.order < read.order
        and read.blocks[: len(write.blocks)] == write.blocks
    ]
    base = max(sure, key=lambda write: write.order, default=None)
    if base is not None and base.stmt == read.stmt:
        return depth, feed  # both are in one statement, which always runs as a whole
    reaching = [write for write in writes if _reaches(write, read, base)]
    if base is not None and base.chain:
        depth = min(depth, len(base.chain))
    elif any(write.chain for write in reaching):
        depth = min(depth, 0)
    for write in reaching if base is None else (*reaching, base):
        if write.chain != read.chain[: len(write.chain)]:
            feed.add(write.chain)
        if write.stmt != read.stmt:
            feed |= feeds[write.stmt]
            if depths[write.stmt] < len(write.chain):
                depth = min(depth, depths[write.stmt])
    return depth, feed


def _reaches(write: _Event, read: _Event, base: _Event | None) -> bool:
    """Return True if `read` may read the value that `write` assigns; `base` is the last sure write."""
    shared = 0
    for write_loop, read_loop in zip(write.chain, read.chain, strict=False):
        if write_loop != read_loop:
            break
        shared += 1
    if base is None:
        return write.order < read.order or shared > 0
    if write is base or write.order < base.order:
        return False
    return write.order < read.order or shared > len(base.chain)
