"""Recognize an edit of a recorded statement that only extracts a variable, so that a probe can read a value.

    clip_grad_norm_(ps, 1.0)      ->  norm = clip_grad_norm_(ps, 1.0)
    x = f(y)                      ->  x = seen = f(y)
    if f(y) > best:               ->  if (acc := f(y)) > best:
    return f(y)                   ->  out = f(y) ... return out

The first three edits assign a variable inside the statement. In the last, a separate statement computes the
value first, so expressions that the recorded statement evaluated before the value are now evaluated after it:
`computed_before` returns the first of these expressions if the order may matter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rearview.source.loops import FUNCTIONS


@dataclass(frozen=True, slots=True)
class Rebindable:
    """The variables and attributes that a function call may rebind."""

    names: frozenset[str] = frozenset()
    """Variables that some function declares `global` or `nonlocal`."""
    attributes: frozenset[str] = frozenset()
    """Attributes that are assigned outside `__init__`, or computed at each read, such as properties."""


def rebindable(trees: Iterable[ast.Module]) -> Rebindable:
    r"""Return the variables and attributes that function calls in the recorded program `trees` may rebind.

    >>> tree = ast.parse("def f(self):\n    global n\n    self.a = n = 1")
    >>> sorted(rebindable([tree]).names | rebindable([tree]).attributes)
    ['a', 'n']
    """
    names: set[str] = set()
    attributes: set[str] = set()
    for tree in trees:
        constructor_ids: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                if node.decorator_list:
                    attributes.add(node.name)
                if node.name == "__init__":
                    constructor_ids |= {id(inner_node) for inner_node in ast.walk(node)}
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names.update(node.names)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                if id(node) not in constructor_ids:
                    attributes.add(node.attr)
    return Rebindable(frozenset(names), frozenset(attributes))


def computed_before(stmt: ast.stmt, reads: set[int], rebindable: Rebindable) -> str:
    """Return the text of the first expression that `stmt` computes before the last of `reads`, or '' if none.

    `reads` has the `id()` of name nodes in the statement. Constants do not count, nor do variables and attributes
    that are not in `rebindable`: they have the same value if they are read later.

    >>> stmt = ast.parse("out.append((a[0], v))").body[0]
    >>> computed_before(stmt, {id(n) for n in ast.walk(stmt) if getattr(n, "id", "") == "v"}, Rebindable())
    'a[0]'
    """
    evaluated_nodes = list(_evaluated(stmt))
    last_read = max(
        (at for at, node in enumerate(evaluated_nodes) if id(node) in reads), default=-1
    )
    for node in evaluated_nodes[: last_read + 1]:
        if id(node) in reads or isinstance(node, ast.Constant | ast.Tuple | ast.List):
            continue  # a tuple or list of plain lookups has no side effects
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            continue
        if isinstance(node, ast.Name) and node.id not in rebindable.names:
            continue
        if isinstance(node, ast.Attribute) and node.attr not in rebindable.attributes:
            continue
        return " ".join(ast.unparse(node).split())
    return ""


def evaluated_reads(stmt: ast.stmt, reads: set[int]) -> list[int]:
    """Return the members of `reads`, `id()`s of name nodes, that `stmt` evaluates, in the order of evaluation."""
    return [id(node) for node in _evaluated(stmt) if id(node) in reads]


def _evaluated(node: ast.AST | None) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without its blocks, in the order of evaluation."""
    if node is None:
        return
    for part in _parts(node):
        yield from _evaluated(part)
    if isinstance(node, ast.expr):
        yield node


def _parts(node: ast.AST) -> list[ast.AST | None]:
    if isinstance(node, ast.AugAssign):
        target: ast.AST = node.target
        return [target, node.value]
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        return [node.value]
    if isinstance(node, ast.Assert | ast.If):
        return [node.test]
    if isinstance(node, ast.Dict):
        return [part for pair in zip(node.keys, node.values, strict=True) for part in pair]
    if isinstance(node, ast.IfExp):
        return [node.test, node.body, node.orelse]
    if isinstance(node, ast.Lambda):
        return []
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return [node.generators[0].iter]
    return [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.expr | ast.keyword | ast.Slice)
    ]


REWRITABLE = (
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
    ast.Assert,
    ast.If,
)
"""Types of statements from which an edit may extract variables. Loops are not among them, because Rearview rewrites
a loop according to its text.
"""
_CONDITIONAL = (ast.BoolOp, ast.IfExp, ast.Compare, ast.ListComp, ast.SetComp, ast.DictComp)
_OPAQUE = (ast.Lambda, ast.GeneratorExp)

AssignmentAbove = Callable[[str], ast.Assign | ast.AnnAssign | None]
"""Function that takes a name and returns a statement above the edited statement, in the same block: the nearest
one whose only target is this name, or None.
"""


@dataclass(frozen=True, slots=True)
class ExtractedVariable:
    """A variable to which an edit assigns a value that a recorded statement computes."""

    stmt: ast.stmt
    """The statement of the edited text that assigns the variable: the edited statement, or a new one above it."""
    target: ast.Name
    sure: bool
    """Whether the variable is assigned whenever the statement runs."""
    read: ast.Name | None = None
    """The name that replaced the value, if a new statement above assigns the variable; otherwise None."""
    into: ast.stmt | None = None
    """The statement that contains `read`, or None."""


@dataclass(frozen=True, slots=True)
class RewrittenStatement:
    """The comparison of a recorded statement with its edited form, from which variables were extracted."""

    extracted_variables: tuple[ExtractedVariable, ...]
    why: str = ""
    """Reason why the edited statement may compute something else than the recorded one, or ''."""


def rewrite_of(
    old: ast.stmt, new: ast.stmt, assignment_above: AssignmentAbove, rebindable: Rebindable
) -> RewrittenStatement | None:
    r"""Return the variables that `new` extracts from `old`, or None if `new` differs from `old` in other ways.

    >>> old, new = (ast.parse(text).body[0] for text in ("f(x)", "n = f(x)"))
    >>> [value.target.id for value in rewrite_of(old, new, lambda name: None, Rebindable()).extracted_variables]
    ['n']
    """
    if not isinstance(old, REWRITABLE) or not isinstance(new, REWRITABLE):
        return None
    reader = _StatementComparer(new, assignment_above)
    if not reader.statement(old):
        return None
    variables_above = [
        variable for variable in reader.extracted_variables if variable.read is not None
    ]
    why = _changed_order(variables_above, new, rebindable) if variables_above else ""
    return RewrittenStatement(tuple(reader.extracted_variables), why)


class _StatementComparer:
    """Compares a recorded statement with `new` and records the variables that only `new` assigns."""

    def __init__(self, new: ast.stmt, assignment_above: AssignmentAbove) -> None:
        self.new = new
        self.assignment_above = assignment_above
        self.extracted_variables: list[ExtractedVariable] = []
        self._stmt = new
        self._conditional = 0

    def statement(self, old: ast.stmt) -> bool:
        """Return True if the new statement is the statement `old` with variables extracted."""
        new = self.new
        if isinstance(old, ast.Expr) and isinstance(new, ast.Assign | ast.AnnAssign):
            targets = _targets(new)
            # a `yield from` is instrumented only if it is a whole statement, so an assignment changes how it runs
            if new.value is None or isinstance(old.value, ast.YieldFrom):
                return False
            return self._add_targets(targets) and self.node(old.value, new.value)
        if isinstance(old, ast.Assign) and isinstance(new, ast.Assign):
            old_targets = [ast.dump(target) for target in old.targets]
            extra = []
            for target in new.targets:
                if old_targets and ast.dump(target) == old_targets[0]:
                    old_targets.pop(0)
                else:
                    extra.append(target)
            return not old_targets and self._add_targets(extra) and self.node(old.value, new.value)
        if type(old) is not type(new):
            return False
        if isinstance(old, ast.Assert):  # the message is evaluated only if the test fails
            same_test = self.field(old.test, getattr(new, "test", None))
            self._conditional += 1
            return same_test and self.field(old.msg, getattr(new, "msg", None))
        return all(
            self.field(getattr(old, name, None), getattr(new, name, None))
            for name in old._fields
            if name not in {"body", "orelse"} or not isinstance(old, ast.If)
        )

    def _add_targets(self, targets: list[ast.expr]) -> bool:
        for target in targets:
            names = list(_names(target))
            if not names:
                return False
            self.extracted_variables += [
                ExtractedVariable(self._stmt, name, sure=True) for name in names
            ]
        return True

    def field(self, old: object, new: object) -> bool:
        """Return True if a field of two syntax nodes has equal values, apart from extracted variables."""
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            return self.node(old, new)
        if isinstance(old, list) and isinstance(new, list):
            return len(old) == len(new) and all(map(self.field, old, new))
        return type(old) is type(new) and old == new

    def node(self, old: ast.AST, new: ast.AST) -> bool:
        """Return True if `new` equals `old`, except that variables stand for some subexpressions; record these variables."""
        if isinstance(new, ast.NamedExpr) and not isinstance(old, ast.NamedExpr):
            self.extracted_variables.append(
                ExtractedVariable(self._stmt, new.target, sure=not self._conditional)
            )
            return self.node(old, new.value)
        if isinstance(new, ast.Name) and isinstance(new.ctx, ast.Load):
            if isinstance(old, ast.Name):
                return old.id == new.id
            return self._extracted_above(old, new)
        if type(old) is not type(new):
            return False
        if isinstance(old, _OPAQUE):
            return ast.dump(old) == ast.dump(new)
        self._conditional += isinstance(old, _CONDITIONAL)
        first = isinstance(old, ast.BoolOp | ast.IfExp | ast.Compare)
        all_equal = True
        for at, (old_child, new_child) in enumerate(_children(old, new)):
            # the first operand of `and`, `or` and `if` is always evaluated
            self._conditional -= first and at == 0
            all_equal = all_equal and self.field(old_child, new_child)
            self._conditional += first and at == 0
        self._conditional -= isinstance(old, _CONDITIONAL)
        return all_equal

    def _extracted_above(self, old: ast.AST, read: ast.Name) -> bool:
        stmt = self.assignment_above(read.id)
        if stmt is None or self._conditional:
            return False
        (target,) = _targets(stmt)
        assert isinstance(target, ast.Name)
        assert stmt.value is not None
        outer_stmt, self._stmt = self._stmt, stmt
        equal = self.node(old, stmt.value)
        self._stmt = outer_stmt
        # a variable inside the value is recorded before the value: the recorded statement used this order
        self.extracted_variables.append(
            ExtractedVariable(stmt, target, sure=True, read=read, into=outer_stmt)
        )
        return equal


def _targets(stmt: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]


def _children(old: ast.AST, new: ast.AST) -> Iterator[tuple[object, object]]:
    """Yield (value in `old`, value in `new`) for each field of two nodes, in the order of evaluation.

    The operand that is always evaluated comes first, separate from the other operands.
    """
    names = list(old._fields)
    if isinstance(old, ast.BoolOp):
        names.remove("values")
        yield old.values[:1], getattr(new, "values", [])[:1]
        yield old.values[1:], getattr(new, "values", [])[1:]
    elif isinstance(old, ast.Compare):
        names = [name for name in names if name not in {"left", "comparators"}]
        head = [old.left, *old.comparators[:1]]
        yield head, [getattr(new, "left", None), *getattr(new, "comparators", [])[:1]]
        yield old.comparators[1:], getattr(new, "comparators", [])[1:]
    for name in names:
        yield getattr(old, name, None), getattr(new, name, None)


def _names(target: ast.expr) -> Iterator[ast.Name]:
    """Yield the names in the target of an assignment, or nothing if the target contains other expressions."""
    items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if all(isinstance(item, ast.Name) for item in items):
        yield from (item for item in items if isinstance(item, ast.Name))


def _changed_order(
    variables_above: list[ExtractedVariable], stmt: ast.stmt, rebindable: Rebindable
) -> str:
    """Return the reason why values extracted above `stmt` may be computed in another order than before, or ''."""
    names = [variable.target.id for variable in variables_above]
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        return f"the value of `{repeated_name}` was computed more than once"
    positions = [(variable.stmt.lineno, variable.stmt.col_offset) for variable in variables_above]
    if positions != sorted(positions):
        return f"`{names[-1]}` was computed after `{names[-2]}`"
    bound_names = {
        node.target.id
        for variable in variables_above
        for node in ast.walk(variable.stmt)
        if isinstance(node, ast.NamedExpr)
    }
    rebindable = Rebindable(rebindable.names | bound_names, rebindable.attributes)
    for statement in (*(variable.stmt for variable in variables_above), stmt):
        reads = [id(variable.read) for variable in variables_above if variable.into is statement]
        if reads != evaluated_reads(statement, set(reads)):
            return "it was evaluated later, or not always"
        computed_first = computed_before(statement, set(reads), rebindable)
        if computed_first:
            return f"`{computed_first}` was evaluated before it"
    return ""
