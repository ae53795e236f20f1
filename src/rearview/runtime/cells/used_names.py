"""Names in the text of a cell: all names in it, and the names whose value it uses before it sets them."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable
from typing import Protocol

EVALUATING = frozenset(
    {"query", "eval", "ols", "glm", "logit", "from_formula", "dmatrices", "dmatrix"}
)
"""Methods of pandas and statsmodels that evaluate a text with the variables of the notebook."""


class DefinedNames(Protocol):
    """The names of a function or class that a cell defines at its top level."""

    @property
    def name(self) -> str:
        """Name of the function or class."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Names that the body of the definition uses and does not define."""
        ...

    @property
    def at_once(self) -> frozenset[str]:
        """Names that are looked up when the definition runs."""
        ...


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names of all variables and of all attributes in a syntax tree."""
    names: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Global):
            names.update(node.names)
    return names | names_in_texts(tree), attributes


def names_in_texts(node: ast.AST) -> set[str]:
    """Return the names in texts that a library evaluates with the variables of the cell: `frame.query("x > @y")`."""
    return {
        name
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in EVALUATING
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for name in re.findall(r"[^\W\d]\w*", text.value)
    }


def names_used(node: ast.AST, *, when_called: bool = False) -> set[str]:
    """Return the names whose value a statement or expression takes from outside.

    Local variables of functions, lambdas and comprehensions are left out. `when_called` also leaves out names that
    are looked up while a function or class is defined.

    >>> sorted(names_used(ast.parse("y = [f(i) for i in x]").body[0]))
    ['f', 'x']
    """
    if isinstance(node, ast.Expr) and _is_shell_line(node.value):
        return {
            name
            for text in ast.walk(node)
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
            for name in re.findall(r"[^\W\d]\w*", text.value)
        }
    try:
        table = symtable.symtable(ast.unparse(node), "<cell>", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return names_in(node)[0]  # symtable refuses `await` at the top of a cell
    names: set[str] = set()
    if not when_called:
        for each in ast.walk(node):
            targets: list[ast.expr] = [each.target] if isinstance(each, ast.AugAssign) else []
            targets += each.targets if isinstance(each, ast.Delete) else []
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    todo = table.get_children() if when_called else [table]
    while todo:
        scope = todo.pop()
        names |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if (symbol.is_referenced() if scope is table else symbol.is_global())
        }
        todo += scope.get_children()
    return names


def _is_shell_line(node: ast.expr) -> bool:
    """Return True if IPython made this call from a line `!command`, which can name variables of the notebook."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "system"
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "get_ipython"
    )


class CellReads:
    r"""Collects the names whose value a cell may use before it sets them, statement by statement.

    >>> cell = ast.parse("x = 1\nfor i in y:\n    x += i\nprint(x, z)")
    >>> sorted(CellReads([]).of(cell.body))
    ['print', 'y', 'z']
    """

    def __init__(self, definitions: Iterable[DefinedNames]) -> None:
        self._definitions: dict[str, list[DefinedNames]] = {}
        for each in definitions:
            self._definitions.setdefault(each.name, []).append(each)
        self._reads: set[str] = set()

    def of(self, body: Iterable[ast.stmt]) -> set[str]:
        """Return the names whose earlier value the statements may use, on any branch."""
        bound: frozenset[str] = frozenset()
        for node in body:
            definitions = self._definitions.get(_name_of(node), [])
            for each in definitions:
                self._reads |= each.at_once - bound
            bound = bound | {_name_of(node)} if definitions else self._walk([node], bound)
        return self._reads

    def _read(self, node: ast.AST | None, bound: frozenset[str]) -> None:
        """Add the names that a statement or expression uses and that are not yet bound."""
        if node is None:
            return
        names = names_used(node) | names_in_texts(node)
        uncalled = set(self._definitions)
        while called := uncalled & names:  # a function of this cell uses the names in its body
            uncalled -= called
            for name in called:
                names = names.union(*(each.names for each in self._definitions[name]))
        self._reads |= names - bound

    def _read_target(self, target: ast.expr, bound: frozenset[str]) -> None:
        """Add the names that are looked up to assign to a target: `x` in `x[0]`."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._read_target(part, bound)
        elif isinstance(target, ast.Starred):
            self._read_target(target.value, bound)
        elif not isinstance(target, ast.Name):
            self._read(target, bound)

    def _walk(self, body: Iterable[ast.stmt], bound: frozenset[str]) -> frozenset[str]:
        """Add the reads of successive statements; return the names that are certainly bound after the last one."""
        for node in body:
            if isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try):
                bound = self._branches(node, bound)
            elif isinstance(node, ast.With | ast.AsyncWith):
                bound = self._block(node, bound)
            else:
                bound = self._simple(node, bound)
        return bound

    def _simple(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return bound | {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        self._read(node, bound)
        if isinstance(node, ast.Assign):
            return bound | {name for target in node.targets for name in _bound_by(target)}
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return bound | _bound_by(node.target)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return bound | {node.name}
        if isinstance(node, ast.Delete):
            return bound - {each.id for each in node.targets if isinstance(each, ast.Name)}
        return bound

    def _block(self, node: ast.With | ast.AsyncWith, bound: frozenset[str]) -> frozenset[str]:
        for item in node.items:
            self._read(item.context_expr, bound)
            if item.optional_vars is not None:
                self._read_target(item.optional_vars, bound)
                bound |= _bound_by(item.optional_vars)
        self._walk(node.body, bound)
        return bound  # the block may end early, with an error that the context manager suppresses

    def _branches(
        self, node: ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try, bound: frozenset[str]
    ) -> frozenset[str]:
        if isinstance(node, ast.If):
            self._read(node.test, bound)
            return self._walk(node.body, bound) & self._walk(node.orelse, bound)
        inside = bound
        if isinstance(node, ast.While):
            self._read(node.test, bound)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                self._read(handler.type, bound)
                self._walk(handler.body, bound | ({handler.name} if handler.name else set()))
            self._walk(node.finalbody, bound)
        else:
            self._read(node.iter, bound)
            self._read_target(node.target, bound)
            inside = bound | _bound_by(node.target)
        self._walk(node.body, inside)
        self._walk(node.orelse, bound)
        return bound


def _name_of(node: ast.stmt) -> str:
    """Return the name that a definition or an assignment of a lambda binds; empty for any other statement."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
    return ""


def _bound_by(target: ast.expr) -> set[str]:
    """Return the names that an assignment to `target` binds."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Starred):
        return _bound_by(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return {name for part in target.elts for name in _bound_by(part)}
    return set()
