"""Estimate the variables that a loop changes, by Flor's six static rules.

The rules guess from the text alone, so they only explain a loop to its author. Replays are exact because
state is captured from the live objects, not because of these rules.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rearview.source import mutations
from rearview.source.log_calls import log_call
from rearview.source.loops import FUNCTIONS, LOOPS, MODULE, Loop, LoopId, loop_ids
from rearview.source.scopes import bound_by
from rearview.source.text import blocks

RULES = (
    "a variable that the loop already changed is assigned again",
    "assigned from a method, which may also change its object",
    "assigned from a function",
    "assigned",
    "a method is called on it",
    "a function is called for its effect, which the text does not tell",
)
"""The meaning of each rule, by number; rules 0 and 5 give no estimate."""

READ_ONLY_CALLS = frozenset(
    {*mutations.FRESH, *mutations.COPIES, "print", "assert_close", "min", "max"}
)


@dataclass(frozen=True, slots=True)
class LoopEffect:
    """One statement that a rule fired on."""

    rule: int
    line: int
    names: tuple[str, ...]
    """Variables that it adds to the changeset, as written: `net`, `self.net`."""


@dataclass(frozen=True, slots=True)
class Changeset:
    """Variables that one loop changes, according to its text."""

    names: tuple[str, ...]
    """Changed and seen outside the loop, in the order of the text."""
    scoped: tuple[str, ...] = ()
    """Changed, but first bound in the loop and not read after it."""
    changes: tuple[LoopEffect, ...] = ()
    unsure: tuple[LoopEffect, ...] = ()
    """Statements that rules 0 and 5 gave no estimate for."""
    inferred: Mapping[str, str] = field(default_factory=dict)
    """Name -> why it was added: a library is known to change it."""

    @property
    def estimated(self) -> bool:
        """Whether Flor would trust the changeset."""
        return not self.unsure


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """Which optimizer updates which model, and which scheduler which optimizer."""

    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Optimizer -> models whose parameters it updates."""
    optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Scheduler -> optimizers whose rates it sets."""


def changeset(
    loop: Loop, *, before: Iterable[str] = (), after: Iterable[str] = (), code: Iterable[str] = ()
) -> Changeset:
    r"""Return the variables that a loop changes, by rules 0 to 5 and the loop-scoped filter.

    `before` are the names bound before the loop, `after` the names read after it, `code` the names of
    modules, whose members are functions and not methods.

    >>> loop = ast.parse('''for batch in data:
    ...     preds = net(batch.X)
    ...     avg_loss = loss(preds, batch.y)
    ...     avg_loss.backward()
    ...     optimizer.step()
    ... ''').body[0]
    >>> changes = changeset(loop, before={"data", "net", "loss", "optimizer"})
    >>> changes.names, changes.scoped, changes.estimated
    (('optimizer',), ('preds', 'avg_loss'), True)
    >>> augment(changes, LibraryFacts(models={"optimizer": ("net",)})).names
    ('optimizer', 'net')
    """
    code = set(code)
    changed: dict[str, None] = {}
    changes: list[LoopEffect] = []
    unsure: list[LoopEffect] = []
    for stmt in _statements(loop.body):
        fired = _rule(stmt, changed, code)
        if fired is None:
            continue
        changes.append(fired)
        if fired.rule in {0, 5}:
            unsure.append(fired)
        changed.update(dict.fromkeys(fired.names))
    before, after = set(before), set(after)
    born = {name for stmt in loop.body for name, _ in bound_by(stmt)} - before
    if not isinstance(loop, ast.While):
        born |= {name for name, _ in bound_by(loop.target)}
    scoped = [name for name in changed if name.split(".")[0] in born - after]
    names = [name for name in changed if name not in set(scoped)]
    return Changeset(tuple(names), tuple(scoped), tuple(changes), tuple(unsure))


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for stmt in body:
        statements.append(stmt)
        if not isinstance(stmt, (*FUNCTIONS, ast.ClassDef)):
            for block in blocks(stmt):
                statements.extend(_statements(block))
    return statements


def _rule(stmt: ast.stmt, changed: Mapping[str, None], code: set[str]) -> LoopEffect | None:
    """Return the effect that the first matching rule gives a statement; None if no rule matches."""
    if isinstance(stmt, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        names = tuple(name for target in targets for name in _assigned(target))
        value = stmt.value
        if isinstance(stmt, ast.Assign) and any(name in changed for name in names):
            return LoopEffect(0, stmt.lineno, names)
        if isinstance(value, ast.Call) and not isinstance(stmt, ast.AugAssign):
            owner = _owner(value, code)
            if owner is not None:
                return LoopEffect(1, stmt.lineno, (owner, *names))
            return LoopEffect(2, stmt.lineno, names)
        return LoopEffect(3, stmt.lineno, names) if value is not None else None
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        call = stmt.value
        if log_call(call) is not None:
            return None
        owner = _owner(call, code)
        if owner is not None:
            return LoopEffect(4, stmt.lineno, (owner,))
        func = call.func
        called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        return None if called in READ_ONLY_CALLS else LoopEffect(5, stmt.lineno, ())
    return None


def _assigned(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return [name for item in target.elts for name in _assigned(item)]
    if isinstance(target, ast.Starred | ast.Subscript):
        return _assigned(target.value)
    if isinstance(target, ast.Name) and not target.id.strip("_"):
        return []  # `_`: a value that is thrown away
    return [ast.unparse(target)] if isinstance(target, ast.Name | ast.Attribute) else []


def _owner(call: ast.Call, code: set[str]) -> str | None:
    """Return the object that a method is called on; None for a function."""
    if not isinstance(call.func, ast.Attribute):
        return None
    node: ast.expr = call.func.value
    while True:
        if isinstance(node, ast.Call):
            node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(node, ast.Name) and hasattr(builtins, node.id):
                return None  # `next(loader).to(device)`: a value without a name
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            break
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    text = ast.unparse(node)
    return None if text.split(".")[0] in code else text


def augment(
    changeset: Changeset, facts: LibraryFacts, *, visible: Container[str] | None = None
) -> Changeset:
    """Return the changeset, extended by the objects that libraries change where the text does not show it.

    An optimizer updates its models; a scheduler sets the rates of its optimizers. Only objects with a
    name among `visible`, if given, are added.
    """
    names = dict.fromkeys(changeset.names)
    inferred = dict(changeset.inferred)
    queue = list(names)
    while queue:
        name = queue.pop(0)
        pairs = [(other, f"`{name}` updates it") for other in facts.models.get(name, ())]
        pairs += [(other, f"`{name}` sets its rates") for other in facts.optimizers.get(name, ())]
        for other, why in pairs:
            if other not in names and (visible is None or other.split(".")[0] in visible):
                names[other] = None
                inferred[other] = why
                queue.append(other)
    return replace(changeset, names=tuple(names), inferred=inferred)


def effects(tree: ast.Module, path: str = "") -> dict[LoopId, Changeset]:
    r"""Return what each loop of a program changes.

    >>> text = "best = 0\nfor epoch in range(3):\n    best = max(best, f())\nprint(best)"
    >>> [(i.name, c.names) for i, c in effects(ast.parse(text)).items()]
    [('epoch', ('best',))]
    """
    ids = loop_ids(tree, path)
    code = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    changesets: dict[LoopId, Changeset] = {}
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))]:
        for loop in _own_loops(scope):
            before, after = _around(scope, loop)
            changesets[ids[loop.lineno]] = changeset(loop, before=before, after=after, code=code)
    return dict(
        sorted(changesets.items(), key=lambda item: (item[0].function != MODULE, str(item[0])))
    )


def _own_loops(scope: ast.AST) -> list[Loop]:
    loops: list[Loop] = []
    stack = [stmt for block in blocks(scope) for stmt in block]
    while stack:
        node = stack.pop()
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, LOOPS):
            loops.append(node)
        stack.extend(stmt for block in blocks(node) for stmt in block)
    return loops


def _around(scope: ast.AST, loop: Loop) -> tuple[set[str], set[str]]:
    """Return (names bound before the loop, names read after it) in the scope that the loop belongs to.

    Functions defined in the scope read its variables at a time that the text does not show: names that
    they read from it count as read after the loop, names that they bind are their own.
    """
    before: set[str] = set()
    after: set[str] = set()
    args = getattr(scope, "args", None)
    if args is not None:
        before |= {arg.arg for arg in ast.walk(args) if isinstance(arg, ast.arg)}
    end = loop.end_lineno or loop.lineno
    remaining: list[ast.AST] = [stmt for block in blocks(scope) for stmt in block]
    while remaining:
        node = remaining.pop()
        line = getattr(node, "lineno", loop.lineno)
        if isinstance(node, ast.Global | ast.Nonlocal):
            before.update(node.names)
        elif isinstance(node, (*FUNCTIONS, ast.Lambda)):
            after |= _reads_from_outside(node)
            if line < loop.lineno and not isinstance(node, ast.Lambda):
                before.add(node.name)
            continue
        elif node is loop:
            remaining.extend(part for part in ast.walk(loop) if isinstance(part, ast.Global))
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and line > end:
            after.add(node.id)
        elif isinstance(node, ast.stmt) and line < loop.lineno:
            heads = [
                child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)
            ]
            whole = not blocks(node) or isinstance(node, ast.ClassDef)
            for part in [node] if whole else heads:
                before |= {name for name, _ in bound_by(part)}
        remaining.extend(ast.iter_child_nodes(node))
    return before, after


def _reads_from_outside(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Return the names that a function reads and does not bind itself."""
    body = function.body if isinstance(function.body, list) else [function.body]
    bound = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    shared: set[str] = set()
    reads: set[str] = set()
    for node in (part for stmt in body for part in ast.walk(stmt)):
        if isinstance(node, ast.Global | ast.Nonlocal):
            shared.update(node.names)
        elif isinstance(node, ast.Name):
            (reads if isinstance(node.ctx, ast.Load) else bound).add(node.id)
    return reads - (bound - shared)


def explain(changeset: Changeset, *, lines_above: int = 0) -> tuple[str, ...]:
    """Return the variables that a loop changes, in sentences.

    Lines are counted from the one after `lines_above`: a notebook's are counted in their cell.

    >>> explain(Changeset(("net",), ("x",), inferred={"net": "`opt` updates it"}))
    ('Changes `net`: `opt` updates it.', '`x` lives only inside the loop.')
    """
    sentences: list[str] = []
    for name in changeset.names:
        reasons = [RULES[c.rule] for c in changeset.changes if name in c.names and c.rule]
        lines = sorted({c.line for c in changeset.changes if name in c.names})
        numbers = ", ".join(str(line - lines_above) for line in lines)
        where = f" (line {numbers})" if lines else ""
        why = changeset.inferred.get(name) or (reasons[0] if reasons else RULES[0])
        sentences.append(f"Changes `{name}`: {why}{where}.")
    if changeset.scoped:
        listed = ", ".join(f"`{name}`" for name in changeset.scoped)
        verb = "lives" if len(changeset.scoped) == 1 else "live"
        sentences.append(f"{listed} {verb} only inside the loop.")
    for rule in sorted({effect.rule for effect in changeset.unsure}):
        unsure = [
            str(effect.line - lines_above) for effect in changeset.unsure if effect.rule == rule
        ]
        which = f"Line {unsure[0]}" if len(unsure) == 1 else f"Lines {', '.join(unsure)}"
        sentences.append(f"{which} may change more: {RULES[rule]}.")
    return tuple(sentences)
