"""How closely the values of added code are connected with the objects of the recorded run.

Added code may change values of its own, but it may only read an object of the run. `Levels` tells the two
apart for each expression, from the text alone; in doubt a value counts as an object of the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from rearview.source.mutations import COPIES, FRESH, GENERATORS, MODULE_SIGNS, last_name, root
from rearview.source.scopes import Scope, Scopes


class Level(IntEnum):
    """How a value is connected with the objects of the recorded run."""

    FRESH = 0
    """Created by the probe."""
    SHALLOW = 1
    """A container created by the probe that contains objects of the run."""
    CODE = 2
    """A module, function or class."""
    LIVE = 3
    """May be an object of the run, or share memory with one."""


def deeper(level: Level) -> Level:
    """Return the level of an element or attribute of a value."""
    return Level.LIVE if level is Level.SHALLOW else level


def join(*levels: Level) -> Level:
    """Return the level of a new value made from others: a copy is at most shallow."""
    return Level.FRESH if max(levels, default=Level.FRESH) is Level.FRESH else Level.SHALLOW


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What the recorded texts say about names, over all files."""

    modules: frozenset[str] = frozenset()
    """Expressions that recorded code treats as modules or optimizers: `model`, `self.net`."""
    generators: frozenset[str] = frozenset()
    """Expressions that hold a random generator of the run's own: `rng`, `self.rng`."""


def facts(trees: list[ast.Module]) -> ProgramFacts:
    """Collect what the recorded texts say about names."""
    modules: set[str] = set()
    generators: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in MODULE_SIGNS:
                    modules.add(ast.unparse(node.func.value))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if last_name(node.value.func) in GENERATORS:
                    generators.update(map(ast.unparse, node.targets))
    return ProgramFacts(frozenset(modules), frozenset(generators))


class Levels:
    """Levels of the expressions of added code.

    A variable of a probe gets the highest level that any assignment gives it, so the order of statements
    does not matter. `given` are names that probes share with recorded code.
    """

    def __init__(
        self, scopes: Scopes, added: list[ast.stmt], given: Iterable[tuple[Scope, str]] = ()
    ) -> None:
        self.scopes = scopes
        self._levels: dict[tuple[int, str], Level] = {
            (id(home), name): Level.LIVE for home, name in given
        }
        changed = True
        while changed:
            before = dict(self._levels)
            for stmt in added:
                self._collect(stmt, scopes.of[id(stmt)])
            changed = before != self._levels

    def _collect(self, node: ast.AST, scope: Scope) -> None:
        scope = self.scopes.opened.get(id(node), scope)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._give(target, self.of(node.value, scope), scope)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._give(node.target, self.of(node.value, scope), scope)
        elif isinstance(node, ast.AugAssign):
            self._give(node.target, join(self.of(node.value, scope)), scope)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._give(node.target, deeper(self.of(node.iter, scope)), scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._give(node.optional_vars, self.of(node.context_expr, scope), scope)
        for child in ast.iter_child_nodes(node):
            self._collect(child, scope)

    def _give(self, target: ast.expr, level: Level, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            home = scope.home(target.id) or scope
            key = (id(home), target.id)
            self._levels[key] = max(level, self._levels.get(key, Level.FRESH))
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._give(item, deeper(level), scope)
        elif isinstance(target, ast.Starred):
            self._give(target.value, level, scope)
        elif isinstance(target, ast.Subscript | ast.Attribute) and level is not Level.FRESH:
            base = root(target)
            if isinstance(base, ast.Name):
                self._give(base, Level.SHALLOW, scope)

    def of(self, node: ast.expr, scope: Scope) -> Level:
        """Return the level of an expression."""
        if isinstance(node, ast.Name):
            return self._name(node.id, scope)
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            return deeper(self.of(node.value, scope))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return join(*(self.of(item, scope) for item in node.elts))
        if isinstance(node, ast.Dict):
            return join(*(self.of(value, scope) for value in node.values))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return join(self.of(node.elt, self.scopes.opened.get(id(node), scope)))
        if isinstance(node, ast.DictComp):
            return join(self.of(node.value, self.scopes.opened.get(id(node), scope)))
        if isinstance(node, ast.BinOp):
            return join(self.of(node.left, scope), self.of(node.right, scope))
        if isinstance(node, ast.UnaryOp):
            return join(self.of(node.operand, scope))
        if isinstance(node, ast.BoolOp):
            return max(self.of(value, scope) for value in node.values)
        if isinstance(node, ast.IfExp):
            return max(self.of(node.body, scope), self.of(node.orelse, scope))
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        return Level.FRESH

    def _name(self, name: str, scope: Scope) -> Level:
        home = scope.home(name)
        if home is None:
            return Level.CODE
        level = self._levels.get((id(home), name))
        if level is not None:
            return level
        if home.kinds.get(name) in {"import", "def"}:
            return Level.CODE
        own_class = home.added and home.parent is not None and home.parent.is_class
        if name == "self" and own_class and home.parent is not None and home.parent.added:
            return Level.FRESH
        # an exception that the probe catches is its own; parameters may be objects of the run
        return Level.FRESH if name in home.added_bound else Level.LIVE

    def _call(self, node: ast.Call, scope: Scope) -> Level:
        called = last_name(node.func)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        levels = [self.of(arg, scope) for arg in arguments]
        if called in FRESH:
            return Level.FRESH
        if called in {"globals", "locals", "vars"}:
            return Level.LIVE
        if isinstance(node.func, ast.Attribute):
            levels.append(self.of(node.func.value, scope))
        elif isinstance(node.func, ast.Name):
            home = scope.home(node.func.id)
            is_recorded = home is not None and node.func.id not in home.added_bound
            if is_recorded and not called[:1].isupper() and not levels:
                return Level.LIVE  # a function of the project may return an object of the run
        levels = [Level.FRESH if level is Level.CODE else level for level in levels]
        if called in COPIES or called[:1].isupper():
            return join(*levels)
        return Level.FRESH if max(levels, default=Level.FRESH) is Level.FRESH else Level.LIVE
