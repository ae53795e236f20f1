"""Recorded statements that an edit rewrote to name a value, and that compute the same as before.

    clip_grad_norm_(ps, 1.0)      ->  norm = clip_grad_norm_(ps, 1.0)
    x = f(y)                      ->  x = seen = f(y)
    if f(y) > best:               ->  if (acc := f(y)) > best:
    return f(y)                   ->  out = f(y) ... return out

The first three only add a name. In the last, a separate statement computes the value, so expressions that
the recorded statement evaluated before it are now evaluated after it: `computed_before` says if that matters.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rearview.source.loops import FUNCTIONS


@dataclass(frozen=True, slots=True)
class Rebindable:
    """Variables and attributes that a call may rebind."""

    names: frozenset[str] = frozenset()
    """Variables that some function declares `global` or `nonlocal`."""
    attributes: frozenset[str] = frozenset()
    """Attributes that are assigned outside `__init__`, or computed when they are read."""


def rebindable(trees: Iterable[ast.Module]) -> Rebindable:
    r"""Return what calls may rebind, according to the recorded texts.

    >>> tree = ast.parse("def f(self):\n    global n\n    self.a = n = 1")
    >>> sorted(rebindable([tree]).names | rebindable([tree]).attributes)
    ['a', 'n']
    """
    names: set[str] = set()
    attributes: set[str] = set()
    for tree in trees:
        born: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                if node.decorator_list:
                    attributes.add(node.name)
                if node.name == "__init__":
                    born |= {id(sub) for sub in ast.walk(node)}
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names.update(node.names)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                if id(node) not in born:
                    attributes.add(node.attr)
    return Rebindable(frozenset(names), frozenset(attributes))


def computed_before(stmt: ast.stmt, reads: set[int], rebindable: Rebindable) -> str:
    """Return the expression that a statement computes before the last of `reads`; '' if it only reads variables.

    `reads` are ids of names in the statement. Reading a variable or a method may be done later, unless a
    call may rebind it.

    >>> stmt = ast.parse("out.append((a[0], v))").body[0]
    >>> computed_before(stmt, {id(n) for n in ast.walk(stmt) if getattr(n, "id", "") == "v"}, Rebindable())
    'a[0]'
    """
    done = list(_evaluated(stmt))
    last = max((at for at, node in enumerate(done) if id(node) in reads), default=-1)
    for node in done[: last + 1]:
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


def names_reached(stmt: ast.stmt, reads: set[int]) -> list[int]:
    """Return the names of `reads` that the statement evaluates, in the order of evaluation."""
    return [id(node) for node in _evaluated(stmt) if id(node) in reads]


def _evaluated(node: ast.AST | None) -> Iterator[ast.AST]:
    """Yield the parts of a statement's head in the order of evaluation."""
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


WRITABLE = (
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
    ast.Assert,
    ast.If,
)
"""Kinds of statements whose values an edit may name; not loops, because their text determines how
they run.
"""
_MAYBE = (ast.BoolOp, ast.IfExp, ast.Compare, ast.ListComp, ast.SetComp, ast.DictComp)
_OPAQUE = (ast.Lambda, ast.GeneratorExp)

AssignmentAbove = Callable[[str], ast.Assign | ast.AnnAssign | None]
"""Returns the statement before, in the same block, that assigns to one name and nothing else."""


@dataclass(frozen=True, slots=True)
class ExtractedVariable:
    """A name that an edit gives to a value of a recorded statement."""

    stmt: ast.stmt
    """The statement that binds the name: the recorded one as it reads now, or one inserted before it."""
    target: ast.Name
    sure: bool
    """The name is bound whenever the statement runs."""
    read: ast.Name | None = None
    """Where the recorded statement reads the value by its name, if it does."""
    into: ast.stmt | None = None
    """The statement that contains `read`."""


@dataclass(frozen=True, slots=True)
class RewrittenStatement:
    """A recorded statement as it reads now; `why` says why it does not compute the same, if it does not."""

    extracted_variables: tuple[ExtractedVariable, ...]
    why: str = ""


def rewritten(
    old: ast.stmt, new: ast.stmt, before: AssignmentAbove, rebindable: Rebindable
) -> RewrittenStatement | None:
    r"""Return the names that `new` gives to values of `old`; None if it is another statement.

    >>> old, new = (ast.parse(text).body[0] for text in ("f(x)", "n = f(x)"))
    >>> [value.target.id for value in rewritten(old, new, lambda name: None, Rebindable()).extracted_variables]
    ['n']
    """
    if not isinstance(old, WRITABLE) or not isinstance(new, WRITABLE):
        return None
    reader = _BindingReader(new, before)
    if not reader.statement(old):
        return None
    lifted = [variable for variable in reader.extracted_variables if variable.read is not None]
    why = _order(lifted, new, rebindable) if lifted else ""
    return RewrittenStatement(tuple(reader.extracted_variables), why)


class _BindingReader:
    """Compares two statements and notes where only the second one names a value."""

    def __init__(self, new: ast.stmt, before: AssignmentAbove) -> None:
        self.new = new
        self.before = before
        self.extracted_variables: list[ExtractedVariable] = []
        self._stmt = new
        self._maybe = 0

    def statement(self, old: ast.stmt) -> bool:
        """Return True if the new statement is the old one with names in it."""
        new = self.new
        if isinstance(old, ast.Expr) and isinstance(new, ast.Assign | ast.AnnAssign):
            targets = _targets(new)
            # how `yield from` runs depends on the statement that contains it
            if new.value is None or isinstance(old.value, ast.YieldFrom):
                return False
            return self._give(targets) and self.node(old.value, new.value)
        if isinstance(old, ast.Assign) and isinstance(new, ast.Assign):
            old_targets = [ast.dump(target) for target in old.targets]
            extra = []
            for target in new.targets:
                if old_targets and ast.dump(target) == old_targets[0]:
                    old_targets.pop(0)
                else:
                    extra.append(target)
            return not old_targets and self._give(extra) and self.node(old.value, new.value)
        if type(old) is not type(new):
            return False
        if isinstance(old, ast.Assert):  # its message is evaluated only when it fails
            same_test = self.field(old.test, getattr(new, "test", None))
            self._maybe += 1
            return same_test and self.field(old.msg, getattr(new, "msg", None))
        return all(
            self.field(getattr(old, name, None), getattr(new, name, None))
            for name in old._fields
            if name not in {"body", "orelse"} or not isinstance(old, ast.If)
        )

    def _give(self, targets: list[ast.expr]) -> bool:
        for target in targets:
            names = list(_names(target))
            if not names:
                return False
            self.extracted_variables += [
                ExtractedVariable(self._stmt, name, sure=True) for name in names
            ]
        return True

    def field(self, old: object, new: object) -> bool:
        """Return True if the same field of two nodes has the same code."""
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            return self.node(old, new)
        if isinstance(old, list) and isinstance(new, list):
            return len(old) == len(new) and all(map(self.field, old, new))
        return type(old) is type(new) and old == new

    def node(self, old: ast.AST, new: ast.AST) -> bool:
        """Return True if two expressions are equal except for names that the second gives to values."""
        if isinstance(new, ast.NamedExpr) and not isinstance(old, ast.NamedExpr):
            self.extracted_variables.append(
                ExtractedVariable(self._stmt, new.target, sure=not self._maybe)
            )
            return self.node(old, new.value)
        if isinstance(new, ast.Name) and isinstance(new.ctx, ast.Load):
            if isinstance(old, ast.Name):
                return old.id == new.id
            return self._lifted(old, new)
        if type(old) is not type(new):
            return False
        if isinstance(old, _OPAQUE):
            return ast.dump(old) == ast.dump(new)
        self._maybe += isinstance(old, _MAYBE)
        first = isinstance(old, ast.BoolOp | ast.IfExp | ast.Compare)
        all_equal = True
        for at, (old_child, new_child) in enumerate(_children(old, new)):
            # the first operand of `and`, `or` and `if` is always evaluated
            self._maybe -= first and at == 0
            all_equal = all_equal and self.field(old_child, new_child)
            self._maybe += first and at == 0
        self._maybe -= isinstance(old, _MAYBE)
        return all_equal

    def _lifted(self, old: ast.AST, read: ast.Name) -> bool:
        stmt = self.before(read.id)
        if stmt is None or self._maybe:
            return False
        (target,) = _targets(stmt)
        assert isinstance(target, ast.Name)
        assert stmt.value is not None
        kept, self._stmt = self._stmt, stmt
        equal = self.node(old, stmt.value)
        self._stmt = kept
        # inner ones first: the recorded statement computed them in this order
        self.extracted_variables.append(
            ExtractedVariable(stmt, target, sure=True, read=read, into=kept)
        )
        return equal


def _targets(stmt: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]


def _children(old: ast.AST, new: ast.AST) -> Iterator[tuple[object, object]]:
    """Yield the fields of two nodes side by side, in the order of evaluation."""
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
    """Yield the names of a target that consists only of names; nothing for other targets."""
    items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if all(isinstance(item, ast.Name) for item in items):
        yield from (item for item in items if isinstance(item, ast.Name))


def _order(lifted: list[ExtractedVariable], stmt: ast.stmt, rebindable: Rebindable) -> str:
    """Return the expression that was computed before a value that is now computed first, or ''."""
    names = [variable.target.id for variable in lifted]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return f"the value of `{twice}` was computed more than once"
    places = [(variable.stmt.lineno, variable.stmt.col_offset) for variable in lifted]
    if places != sorted(places):
        return f"`{names[-1]}` was computed after `{names[-2]}`"
    bound = {
        node.target.id
        for variable in lifted
        for node in ast.walk(variable.stmt)
        if isinstance(node, ast.NamedExpr)
    }
    rebindable = Rebindable(rebindable.names | bound, rebindable.attributes)
    for statement in (*(variable.stmt for variable in lifted), stmt):
        reads = [id(variable.read) for variable in lifted if variable.into is statement]
        if reads != names_reached(statement, set(reads)):
            return "it was evaluated later, or not always"
        first = computed_before(statement, set(reads), rebindable)
        if first:
            return f"`{first}` was evaluated before it"
    return ""
