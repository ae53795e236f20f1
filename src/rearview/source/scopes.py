"""Find the names that each scope of a text binds and reads, separately for recorded and added code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from rearview.source.loops import FUNCTIONS, MODULE

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True, eq=False)
class Scope:
    """One scope (the inside of a module, class, function, lambda or comprehension) and the names in it."""

    node: ast.AST
    name: str
    """Qualified name of the function or class; `<module>` for the module."""
    parent: Scope | None
    added: bool
    """Whether added code opens the scope; otherwise, recorded code does."""
    recorded_bound: dict[str, int] = field(default_factory=dict)
    """Name -> first line on which recorded code binds the name."""
    recorded_read: dict[str, int] = field(default_factory=dict)
    """Name -> first line on which recorded code reads the name."""
    added_bound: dict[str, int] = field(default_factory=dict)
    """Name -> first line on which added code binds the name."""
    parameters: set[str] = field(default_factory=set)
    outer: dict[str, str] = field(default_factory=dict)
    """Name that is declared in the scope -> its declaration: `global` or `nonlocal`."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Bound name -> kind of the statement that binds it: `import`, `from`, `def`, or `value` for others."""
    children: list[Scope] = field(default_factory=list)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def module(self) -> Scope:
        return self if self.parent is None else self.parent.module

    def local(self, name: str) -> bool:
        """Return True if `name` is a local variable of the scope."""
        return name not in self.outer and (
            name in self.recorded_bound or name in self.added_bound or name in self.parameters
        )

    def owner_of(self, name: str) -> Scope | None:
        """Return the scope that binds the variable `name` which code in this scope sees; None if no scope binds it."""
        if self.outer.get(name) == "global":
            return self.module if self.module.local(name) else None
        if self.local(name):
            return self
        scope = self.parent
        while scope is not None:
            if scope.local(name) and not scope.is_class:
                return scope
            scope = scope.parent
        return None

    def recorded_use(self, name: str) -> int | None:
        """Return a line on which recorded code uses the variable `name` of this scope, or None if none does."""
        for table in (self.recorded_read, self.recorded_bound):
            if name in table:
                return table[name]
        if name in self.parameters and not self.added:
            return getattr(self.node, "lineno", 1)
        for child in self.children:
            line = child.use_of_outer_variable(name)
            if line is not None:
                return line
        return None

    def use_of_outer_variable(self, name: str) -> int | None:
        """Return a line on which recorded code in this scope uses `name` of an outer scope, or None if none does."""
        is_local = name in self.parameters or (
            name in self.recorded_bound and name not in self.outer
        )
        if is_local and not self.is_class:
            return None
        for table in (self.recorded_read, self.recorded_bound if name in self.outer else {}):
            if name in table:
                return table[name]
        for child in self.children:
            line = child.use_of_outer_variable(name)
            if line is not None:
                return line
        return None


class Scopes(ast.NodeVisitor):
    """The scopes of one text.

    `added` are the `id()`s of the nodes of added statements and names, `aliases` those of names that were added to
    recorded imports.
    """

    def __init__(self, tree: ast.Module, added: set[int], aliases: set[int]) -> None:
        self.added_ids = added
        self.alias_ids = aliases
        self.top = Scope(tree, MODULE, None, added=False)
        self.of: dict[int, Scope] = {}
        """`id()` of the node of a statement -> the scope around the statement."""
        self.opened: dict[int, Scope] = {id(tree): self.top}
        """`id()` of a node of a module, class, function, lambda or comprehension -> the scope inside it."""
        self._scope = self.top
        self._added = False
        self._class_prefix = ""
        for stmt in tree.body:
            self.visit(stmt)

    def visit(self, node: ast.AST) -> None:
        """Visit a node and the nodes inside it; meanwhile, `_added` tells whether the node is added."""
        if isinstance(node, ast.stmt):
            self.of[id(node)] = self._scope
        before = self._added
        self._added = before or id(node) in self.added_ids
        super().visit(node)
        self._added = before

    def _open(self, node: ast.AST, name: str) -> Scope:
        scope = Scope(node, name, self._scope, added=self._added)
        self._scope.children.append(scope)
        self.opened[id(node)] = scope
        return scope

    def _inside(self, scope: Scope, nodes: list[ast.AST]) -> None:
        before, self._scope = self._scope, scope
        for node in nodes:
            self.visit(node)
        self._scope = before

    def bind(self, name: str, line: int, kind: str = "value") -> None:
        """Record that the current scope binds `name` on `line`, in a statement of `kind` (see `Scope.kinds`)."""
        scope = self._scope
        table = scope.added_bound if self._added else scope.recorded_bound
        table.setdefault(name, line)
        if kind == "value" or name not in scope.kinds:
            scope.kinds[name] = kind

    def _qualify(self, name: str) -> str:
        scope = self._scope
        if scope.parent is None:
            return name
        return f"{scope.name}.{name}" if scope.is_class else f"{scope.name}.<locals>.{name}"

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.bind(node.name, node.lineno, "def")
        for sub in (*node.decorator_list, *_evaluated_outside(node.args)):
            self.visit(sub)
        if node.returns is not None:
            self.visit(node.returns)
        scope = self._open(node, self._qualify(node.name))
        scope.parameters |= {arg.arg for arg in _arguments(node.args)}
        self._inside(scope, list(node.body))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for sub in _evaluated_outside(node.args):
            self.visit(sub)
        scope = self._open(node, self._qualify("<lambda>"))
        scope.parameters |= {arg.arg for arg in _arguments(node.args)}
        self._inside(scope, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bind(node.name, node.lineno, "def")
        for sub in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(sub)
        self._inside(self._open(node, self._qualify(node.name)), list(node.body))

    def _comprehension(self, node: ast.AST) -> None:
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        self.visit(generators[0].iter)
        scope = self._open(node, self._scope.name)
        for generator in generators:
            scope.parameters |= {
                sub.id for sub in ast.walk(generator.target) if isinstance(sub, ast.Name)
            }
        inner_parts: list[ast.AST] = []
        for i, generator in enumerate(generators):
            inner_parts.extend([generator.iter] if i else [])
            inner_parts.extend(generator.ifs)
        for part in ("elt", "key", "value"):
            value = getattr(node, part, None)
            if value is not None:
                inner_parts.append(value)
        self._inside(scope, inner_parts)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            if not self._added:
                self._scope.recorded_read.setdefault(node.id, node.lineno)
        else:
            self.bind(node.id, node.lineno)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        added = self._added or id(node.target) in self.added_ids
        scope = self._scope
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
            scope = scope.parent
        table = scope.added_bound if added else scope.recorded_bound
        table.setdefault(node.target.id, node.lineno)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and not self._added:
            self._scope.recorded_read.setdefault(node.target.id, node.lineno)
        self.generic_visit(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            before, self._added = self._added, self._added or id(alias) in self.alias_ids
            kind = "import" if isinstance(node, ast.Import) else "from"
            self.bind(alias.asname or alias.name.split(".")[0], node.lineno, kind)
            self._added = before

    visit_Import = visit_ImportFrom = _import

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.bind(node.name, node.lineno)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.bind(node.name, node.lineno)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.bind(node.rest, node.lineno)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        word = "global" if isinstance(node, ast.Global) else "nonlocal"
        for name in node.names:
            self._scope.outer[name] = word

    visit_Nonlocal = visit_Global


def _arguments(args: ast.arguments) -> Iterator[ast.arg]:
    yield from (*args.posonlyargs, *args.args, *args.kwonlyargs)
    for extra in (args.vararg, args.kwarg):
        if extra is not None:
            yield extra


def _evaluated_outside(args: ast.arguments) -> Iterator[ast.expr]:
    """Yield the defaults and annotations of parameters, which are evaluated in the scope around the function."""
    yield from args.defaults
    yield from (default for default in args.kw_defaults if default is not None)
    yield from (arg.annotation for arg in _arguments(args) if arg.annotation is not None)


def bound_by(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """Return (name, node that binds the name) for each name that `node` binds in its scope, ordered by line."""
    bound: list[tuple[str, ast.AST]] = []
    stack: list[ast.AST] = [node]
    while stack:
        sub = stack.pop()
        if isinstance(sub, (*FUNCTIONS, ast.ClassDef)):
            bound.append((sub.name, sub))
            continue
        if isinstance(sub, ast.Lambda):
            continue
        if isinstance(sub, COMPREHENSIONS):
            bound.extend(
                (inner.target.id, inner)
                for inner in ast.walk(sub)
                if isinstance(inner, ast.NamedExpr)
            )
            continue
        if isinstance(sub, ast.Name) and not isinstance(sub.ctx, ast.Load):
            bound.append((sub.id, sub))
        elif isinstance(sub, ast.Import | ast.ImportFrom):
            bound.extend((a.asname or a.name.split(".")[0], sub) for a in sub.names)
        elif isinstance(sub, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and sub.name:
            bound.append((sub.name, sub))
        elif isinstance(sub, ast.MatchMapping) and sub.rest:
            bound.append((sub.rest, sub))
        stack.extend(ast.iter_child_nodes(sub))
    return sorted(bound, key=lambda item: getattr(item[1], "lineno", 0))
