"""Estimate which variables each loop of a program changes, by the six rules of Flor, a record-replay system.

The rules guess from the program text, and the estimate is only shown to the user. Replays do not depend on
it: state is captured from the live objects.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rearview.source import mutations
from rearview.source.log_calls import log_call
from rearview.source.loops import FUNCTIONS, LOOPS, MODULE, Loop, LoopId, called_name, loop_ids
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
"""Number of a rule -> explanation to show. What a statement of rule 0 or 5 changes cannot be estimated."""

READ_ONLY_CALLS = frozenset(
    {
        *mutations.NEW_VALUE_CALLS,
        *mutations.NEW_CONTAINER_CALLS,
        "print",
        "assert_close",
        "min",
        "max",
    }
)


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """One statement of a loop, with the rule that applies to it."""

    rule: int
    line: int
    names: tuple[str, ...]
    """Variables that the statement changes, as written: `net`, `self.net`."""


@dataclass(frozen=True, slots=True)
class ChangedVariables:
    """The variables that one loop changes, according to its text."""

    names: tuple[str, ...]
    """Changed variables that code outside the loop may read, in the order of the text."""
    inside_only: tuple[str, ...] = ()
    """Changed variables that are first bound in the loop and not read after the loop."""
    matches: tuple[RuleMatch, ...] = ()
    """The statements of the loop to which a rule applies."""
    unsure: tuple[RuleMatch, ...] = ()
    """The statements of the loop to which rule 0 or 5 applies: their changes cannot be estimated."""
    inferred: Mapping[str, str] = field(default_factory=dict)
    """Variable that no statement of the loop changes -> explanation of how a library changes it."""

    @property
    def estimated(self) -> bool:
        """Whether the changes by all statements could be estimated: only then would Flor use the estimate."""
        return not self.unsure


@dataclass(frozen=True, slots=True)
class LibraryUpdates:
    """Which optimizer updates which models, and which scheduler sets the rates of which optimizers."""

    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Optimizer -> models whose parameters the optimizer updates."""
    optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Scheduler -> optimizers whose learning rates the scheduler sets."""


def variables_changed_by(
    loop: Loop, *, before: Iterable[str] = (), after: Iterable[str] = (), code: Iterable[str] = ()
) -> ChangedVariables:
    r"""Return the variables that a loop changes, according to `RULES`.

    `before` are the names bound before the loop, `after` the names read after the loop; a variable in neither
    lives only inside the loop. `code` are imported names: `np.f(x)` calls a function if `np` is in `code`, and
    otherwise a method of the object `np`.

    >>> loop = ast.parse('''for batch in data:
    ...     preds = net(batch.X)
    ...     avg_loss = loss(preds, batch.y)
    ...     avg_loss.backward()
    ...     optimizer.step()
    ... ''').body[0]
    >>> changes = variables_changed_by(loop, before={"data", "net", "loss", "optimizer"})
    >>> changes.names, changes.inside_only, changes.estimated
    (('optimizer',), ('preds', 'avg_loss'), True)
    >>> add_library_changes(changes, LibraryUpdates(models={"optimizer": ("net",)})).names
    ('optimizer', 'net')
    """
    code = set(code)
    changed: dict[str, None] = {}
    matches: list[RuleMatch] = []
    unsure: list[RuleMatch] = []
    for stmt in _statements(loop.body):
        match = _match_rule(stmt, changed, code)
        if match is None:
            continue
        matches.append(match)
        if match.rule in {0, 5}:
            unsure.append(match)
        changed.update(dict.fromkeys(match.names))
    before, after = set(before), set(after)
    first_bound = {name for stmt in loop.body for name, _ in bound_by(stmt)} - before
    if not isinstance(loop, ast.While):
        first_bound |= {name for name, _ in bound_by(loop.target)}
    inside_only = [name for name in changed if name.split(".")[0] in first_bound - after]
    names = [name for name in changed if name not in set(inside_only)]
    return ChangedVariables(tuple(names), tuple(inside_only), tuple(matches), tuple(unsure))


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for stmt in body:
        statements.append(stmt)
        if not isinstance(stmt, (*FUNCTIONS, ast.ClassDef)):
            for block in blocks(stmt):
                statements.extend(_statements(block))
    return statements


def _match_rule(stmt: ast.stmt, changed: Mapping[str, None], code: set[str]) -> RuleMatch | None:
    """Return the match of the first rule that applies to a statement, or None if no rule applies.

    `changed` are the variables that earlier statements of the loop changed; `code` are imported names.
    """
    if isinstance(stmt, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        names = tuple(name for target in targets for name in _assigned(target))
        value = stmt.value
        if isinstance(stmt, ast.Assign) and any(name in changed for name in names):
            return RuleMatch(0, stmt.lineno, names)
        if isinstance(value, ast.Call) and not isinstance(stmt, ast.AugAssign):
            owner = _owner(value, code)
            if owner is not None:
                return RuleMatch(1, stmt.lineno, (owner, *names))
            return RuleMatch(2, stmt.lineno, names)
        return RuleMatch(3, stmt.lineno, names) if value is not None else None
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        call = stmt.value
        if log_call(call) is not None:
            return None
        owner = _owner(call, code)
        if owner is not None:
            return RuleMatch(4, stmt.lineno, (owner,))
        func = call.func
        called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        return None if called in READ_ONLY_CALLS else RuleMatch(5, stmt.lineno, ())
    return None


def _assigned(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return [name for item in target.elts for name in _assigned(item)]
    if isinstance(target, ast.Starred | ast.Subscript):
        return _assigned(target.value)
    if isinstance(target, ast.Name) and not target.id.strip("_"):
        return []  # an assignment to `_` throws the value away
    return [ast.unparse(target)] if isinstance(target, ast.Name | ast.Attribute) else []


def _owner(call: ast.Call, code: set[str]) -> str | None:
    """Return the text of the object whose method is called, or None if `call` calls a function.

    A call of an attribute of an imported name (`code`), or of a value without a name, counts as a function.
    """
    if not isinstance(call.func, ast.Attribute):
        return None
    node: ast.expr = call.func.value
    while True:
        if isinstance(node, ast.Call):
            node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(node, ast.Name) and hasattr(builtins, node.id):
                return None  # `next(loader).to(device)` calls a method of a value without a name
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            break
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    text = ast.unparse(node)
    return None if text.split(".")[0] in code else text


def add_library_changes(
    changes: ChangedVariables, updates: LibraryUpdates, *, visible: Container[str] | None = None
) -> ChangedVariables:
    """Return `changes` plus the objects that a library changes although no statement of the loop shows it.

    An optimizer updates its models; a scheduler sets the learning rates of its optimizers. Unless `visible` is
    None, only objects whose name is in `visible` are added.
    """
    names = dict.fromkeys(changes.names)
    inferred = dict(changes.inferred)
    queue = list(names)
    while queue:
        name = queue.pop(0)
        pairs = [(model, f"`{name}` updates it") for model in updates.models.get(name, ())]
        pairs += [
            (optimizer, f"`{name}` sets its rates")
            for optimizer in updates.optimizers.get(name, ())
        ]
        for updated, why in pairs:
            if updated not in names and (visible is None or updated.split(".")[0] in visible):
                names[updated] = None
                inferred[updated] = why
                queue.append(updated)
    return replace(changes, names=tuple(names), inferred=inferred)


def library_updates(tree: ast.Module) -> LibraryUpdates:
    r"""Return which optimizer updates which models, and which scheduler sets the rates of which optimizer.

    The calls that make optimizers and schedulers show this: an optimizer is made from `model.parameters()`, by
    `model.configure_optimizers()`, or by a function such as `create_optimizer(model)`; a scheduler is made
    with an optimizer as its first argument.

    >>> text = "opt = SGD(net.parameters())\nsched = StepLR(opt, 3)"
    >>> library_updates(ast.parse(text))
    LibraryUpdates(models={'opt': ('net',)}, optimizers={'sched': ('opt',)})
    """
    models: dict[str, tuple[str, ...]] = {}
    optimizers: dict[str, tuple[str, ...]] = {}
    constructed = [
        (ast.unparse(node.targets[0]), node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name | ast.Attribute)
        and isinstance(node.value, ast.Call)
    ]
    for name, call in constructed:
        owners = [owner for owner in _models_of(call) if owner != name]
        if owners:
            models[name] = tuple(dict.fromkeys((*models.get(name, ()), *owners)))
    for name, call in constructed:
        first = ast.unparse(call.args[0]) if call.args else ""
        first = next((ast.unparse(k.value) for k in call.keywords if k.arg == "optimizer"), first)
        if first in models and name not in models:
            optimizers[name] = (first,)
    return LibraryUpdates(models, optimizers)


def _models_of(call: ast.Call) -> Iterator[str]:
    """Yield the models that the new optimizer updates if `call` makes an optimizer; otherwise nothing."""
    made_by = called_name(call)
    if made_by == "configure_optimizers" and isinstance(call.func, ast.Attribute):
        yield ast.unparse(call.func.value)
        return
    # a call of a class, or of the result of another call, such as `getattr(optim, name)(…)`
    if isinstance(call.func, ast.Call) or made_by[:1].isupper():
        for part in ast.walk(call):
            if (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Attribute)
                and part.func.attr in {"parameters", "named_parameters"}
            ):
                yield ast.unparse(part.func.value)
    first = call.args[0] if call.args else None
    if made_by.lower().endswith("optimizer") and isinstance(first, ast.Name | ast.Attribute):
        if "optim" not in ast.unparse(first).lower():
            yield ast.unparse(first)


def changed_variables(tree: ast.Module, path: str = "") -> dict[LoopId, ChangedVariables]:
    r"""Return {id of a loop: the variables that it changes} for all loops of the file `path`.

    >>> text = "best = 0\nfor epoch in range(3):\n    best = max(best, f())\nprint(best)"
    >>> [(i.name, c.names) for i, c in changed_variables(ast.parse(text)).items()]
    [('epoch', ('best',))]
    """
    ids = loop_ids(tree, path)
    code = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    changes: dict[LoopId, ChangedVariables] = {}
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))]:
        for loop in _own_loops(scope):
            before, after = _around(scope, loop)
            changes[ids[loop.lineno]] = variables_changed_by(
                loop, before=before, after=after, code=code
            )
    return dict(
        sorted(changes.items(), key=lambda item: (item[0].function != MODULE, str(item[0])))
    )


def _own_loops(scope: ast.AST) -> list[Loop]:
    """Return the loops of a module or function, without the loops of functions that it defines."""
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
    """Return (names bound before the loop, names read after the loop) in the scope that the loop belongs to.

    The text does not show when a function that is defined in the scope runs. Variables of the scope that the
    function reads therefore count as read after the loop; its local variables do not count.
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
            has_no_blocks = not blocks(node) or isinstance(node, ast.ClassDef)
            for part in [node] if has_no_blocks else heads:
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


def explain_changes(changes: ChangedVariables, *, lines_above: int = 0) -> tuple[str, ...]:
    """Return sentences that say which variables a loop changes, by which statements or library objects.

    `lines_above` is subtracted from line numbers: lines of a notebook are shown as lines of their cell.

    >>> explain_changes(ChangedVariables(("net",), ("x",), inferred={"net": "`opt` updates it"}))
    ('Changes `net`: `opt` updates it.', '`x` lives only inside the loop.')
    """
    sentences: list[str] = []
    for name in changes.names:
        reasons = [RULES[e.rule] for e in changes.matches if name in e.names and e.rule]
        lines = sorted({e.line for e in changes.matches if name in e.names})
        numbers = ", ".join(str(line - lines_above) for line in lines)
        where = f" (line {numbers})" if lines else ""
        why = changes.inferred.get(name) or (reasons[0] if reasons else RULES[0])
        sentences.append(f"Changes `{name}`: {why}{where}.")
    if changes.inside_only:
        listed = ", ".join(f"`{name}`" for name in changes.inside_only)
        verb = "lives" if len(changes.inside_only) == 1 else "live"
        sentences.append(f"{listed} {verb} only inside the loop.")
    for rule in sorted({match.rule for match in changes.unsure}):
        unsure = [str(match.line - lines_above) for match in changes.unsure if match.rule == rule]
        which = f"Line {unsure[0]}" if len(unsure) == 1 else f"Lines {', '.join(unsure)}"
        sentences.append(f"{which} may change more: {RULES[rule]}.")
    return tuple(sentences)
