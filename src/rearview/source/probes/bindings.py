"""Recorded statements that an edit rewrote to name a value, and that compute the same as before.

    clip_grad_norm_(ps, 1.0)      ->  norm = clip_grad_norm_(ps, 1.0)
    x = f(y)                      ->  x = seen = f(y)
    if f(y) > best:               ->  if (acc := f(y)) > best:
    return f(y)                   ->  out = f(y) ... return out

The first three only add a name. In the last, a value is computed in a statement of its own, so what the
recorded statement evaluated before that value now comes after it: `early` says if that matters.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rearview.source.loops import FUNCTIONS


@dataclass(frozen=True, slots=True)
class Loose:
    """What a call may change behind the text's back."""

    names: frozenset[str] = frozenset()
    """Variables that some function declares `global` or `nonlocal`."""
    attributes: frozenset[str] = frozenset()
    """Attributes that are stored outside `__init__`, or computed when they are read."""


def loose(trees: Iterable[ast.Module]) -> Loose:
    r"""Return what the recorded texts rebind from elsewhere.

    >>> tree = ast.parse("def f(self):\n    global n\n    self.a = n = 1")
    >>> sorted(loose([tree]).names | loose([tree]).attributes)
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
    return Loose(frozenset(names), frozenset(attributes))


def early(stmt: ast.stmt, reads: set[int], unsettled: Loose) -> str:
    """Return what the statement computes before the last of `reads`; nothing if only loads.

    `reads` are ids of names in it. A variable or a method that is merely looked up may be looked
    up later, unless a call may change which one that is.

    >>> stmt = ast.parse("out.append((a[0], v))").body[0]
    >>> early(stmt, {id(n) for n in ast.walk(stmt) if getattr(n, "id", "") == "v"}, Loose())
    'a[0]'
    """
    done = list(_evaluated(stmt))
    last = max((at for at, node in enumerate(done) if id(node) in reads), default=-1)
    for node in done[: last + 1]:
        if id(node) in reads or isinstance(node, ast.Constant | ast.Tuple | ast.List):
            continue  # a display of things that were looked up is not worth an order either
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            continue
        if isinstance(node, ast.Name) and node.id not in unsettled.names:
            continue
        if isinstance(node, ast.Attribute) and node.attr not in unsettled.attributes:
            continue
        return " ".join(ast.unparse(node).split())
    return ""


def reached(stmt: ast.stmt, reads: set[int]) -> list[int]:
    """Return those of `reads` that the statement comes to, in the order in which it does."""
    return [id(node) for node in _evaluated(stmt) if id(node) in reads]


def _evaluated(node: ast.AST | None) -> Iterator[ast.AST]:
    """Yield the parts of a statement's head in the order in which they are done."""
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
"""Statements that may name their values. Not loops: how they are written says how they are run."""
_MAYBE = (ast.BoolOp, ast.IfExp, ast.Compare, ast.ListComp, ast.SetComp, ast.DictComp)
_OPAQUE = (ast.Lambda, ast.GeneratorExp)

Before = Callable[[str], ast.Assign | ast.AnnAssign | None]
"""Gives the statement above, in the same block, that assigns a value to one name alone."""


@dataclass(frozen=True, slots=True)
class Given:
    """A name that an edit gives to a value of a recorded statement."""

    stmt: ast.stmt
    """Binds the name: the recorded statement as it reads now, or one put above it."""
    target: ast.Name
    sure: bool
    """It is bound whenever the statement runs."""
    read: ast.Name | None = None
    """Where the recorded statement takes the value from the name, if it does."""
    into: ast.stmt | None = None
    """The statement that `read` stands in."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A recorded statement as it reads now; `why` says what keeps it from computing the same."""

    given: tuple[Given, ...]
    why: str = ""


def rewritten(old: ast.stmt, new: ast.stmt, before: Before, loose: Loose) -> Rewritten | None:
    r"""Return the names that `new` gives to values of `old`; None if it is another statement.

    >>> one, two = (ast.parse(t).body[0] for t in ("f(x)", "n = f(x)"))
    >>> [g.target.id for g in rewritten(one, two, lambda name: None, Loose()).given]
    ['n']
    """
    if not isinstance(old, WRITABLE) or not isinstance(new, WRITABLE):
        return None
    found = _BindingReader(new, before)
    if not found.statement(old):
        return None
    lifted = [given for given in found.given if given.read is not None]
    why = _order(lifted, new, loose) if lifted else ""
    return Rewritten(tuple(found.given), why)


class _BindingReader:
    """Reads two statements side by side, noting where only the second names a value."""

    def __init__(self, new: ast.stmt, before: Before) -> None:
        self.new = new
        self.before = before
        self.given: list[Given] = []
        self._stmt = new
        self._maybe = 0

    def statement(self, old: ast.stmt) -> bool:
        """Return True if the new statement is the old one with names in it."""
        new = self.new
        if isinstance(old, ast.Expr) and isinstance(new, ast.Assign | ast.AnnAssign):
            targets = _targets(new)
            # how `yield from` is run depends on the statement it stands in
            if new.value is None or isinstance(old.value, ast.YieldFrom):
                return False
            return self._give(targets) and self.node(old.value, new.value)
        if isinstance(old, ast.Assign) and isinstance(new, ast.Assign):
            wanted = [ast.dump(target) for target in old.targets]
            extra = []
            for target in new.targets:
                if wanted and ast.dump(target) == wanted[0]:
                    wanted.pop(0)
                else:
                    extra.append(target)
            return not wanted and self._give(extra) and self.node(old.value, new.value)
        if type(old) is not type(new):
            return False
        if isinstance(old, ast.Assert):  # its message is evaluated only when it fails
            same = self.field(old.test, getattr(new, "test", None))
            self._maybe += 1
            return same and self.field(old.msg, getattr(new, "msg", None))
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
            self.given += [Given(self._stmt, name, sure=True) for name in names]
        return True

    def field(self, old: object, new: object) -> bool:
        """Return True if the same field of two nodes reads the same."""
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            return self.node(old, new)
        if isinstance(old, list) and isinstance(new, list):
            return len(old) == len(new) and all(map(self.field, old, new))
        return type(old) is type(new) and old == new

    def node(self, old: ast.AST, new: ast.AST) -> bool:
        """Return True if two expressions read the same but for names given in the second."""
        if isinstance(new, ast.NamedExpr) and not isinstance(old, ast.NamedExpr):
            self.given.append(Given(self._stmt, new.target, sure=not self._maybe))
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
        same = True
        for at, (one, two) in enumerate(_children(old, new)):
            # the first thing that a choice evaluates is always evaluated
            self._maybe -= first and at == 0
            same = same and self.field(one, two)
            self._maybe += first and at == 0
        self._maybe -= isinstance(old, _MAYBE)
        return same

    def _lifted(self, old: ast.AST, read: ast.Name) -> bool:
        stmt = self.before(read.id)
        if stmt is None or self._maybe:
            return False
        (target,) = _targets(stmt)
        assert isinstance(target, ast.Name)
        assert stmt.value is not None
        kept, self._stmt = self._stmt, stmt
        same = self.node(old, stmt.value)
        self._stmt = kept
        # inner ones first: that is the order in which the recorded statement computed them
        self.given.append(Given(stmt, target, sure=True, read=read, into=kept))
        return same


def _targets(stmt: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]


def _children(old: ast.AST, new: ast.AST) -> Iterator[tuple[object, object]]:
    """Yield the fields of two nodes side by side, in the order in which they are evaluated."""
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
    """Yield the names of a target that is nothing but names; nothing otherwise."""
    items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if all(isinstance(item, ast.Name) for item in items):
        yield from (item for item in items if isinstance(item, ast.Name))


def _order(lifted: list[Given], stmt: ast.stmt, loose: Loose) -> str:
    """Say what was computed before a value that is now computed first, or nothing."""
    names = [given.target.id for given in lifted]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return f"what `{twice}` names was computed more than once"
    places = [(given.stmt.lineno, given.stmt.col_offset) for given in lifted]
    if places != sorted(places):
        return f"`{names[-1]}` was computed after `{names[-2]}`"
    bound = {
        node.target.id
        for given in lifted
        for node in ast.walk(given.stmt)
        if isinstance(node, ast.NamedExpr)
    }
    loose = Loose(loose.names | bound, loose.attributes)
    for one in (*(given.stmt for given in lifted), stmt):
        reads = [id(given.read) for given in lifted if given.into is one]
        if reads != reached(one, set(reads)):
            return "it was evaluated later, or not always"
        first = early(one, set(reads), loose)
        if first:
            return f"`{first}` was evaluated before it"
    return ""
