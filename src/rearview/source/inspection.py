"""Inspect the text of a program before it runs: loops, log calls, obstacles to checkpoints, places for probes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rearview.errors import SourceError
from rearview.source.estimated_effects import Changeset, LibraryFacts, augment, effects, explain
from rearview.source.instrument import COMPILERS
from rearview.source.log_calls import TRACKERS, Aliases, calls_in
from rearview.source.loops import (
    FUNCTIONS,
    LOOPS,
    Chains,
    Loop,
    LoopId,
    called_name,
    chains,
    loop_ids,
    walk_loops,
)
from rearview.source.scopes import bound_by
from rearview.source.text import blocks, parse

TRAINS = {
    "backward": 4, "step": 3, "zero_grad": 3, "partial_fit": 3, "train_on_batch": 3, "boost": 2,
    "update": 2, "apply_gradients": 3, "train_step": 3, "training_step": 3, "train": 1, "fit": 1,
}  # fmt: skip
"""Calls that training loops make, each with its weight when the main loop is chosen."""
MOST_READS = 4
"""Most variables that are named for one place where a probe could go."""


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop of the program."""

    id: LoopId
    line: int
    end: int
    kind: str
    """`"for"`, `"while"` or `"async for"`."""
    point: tuple[str, ...]
    """Loop names from the outermost inwards: the beginning of the points of its records."""
    main: bool
    """This is the loop that Rearview takes for the training loop."""
    changes: Changeset
    sentences: tuple[str, ...]
    """The variables that it changes, in words."""
    left_alone: str
    """Why the loop is not watched; empty if it is."""


@dataclass(frozen=True, slots=True)
class LogReport:
    """One call that logs."""

    path: str
    line: int
    logger: str
    names: tuple[str, ...]
    """Names of the columns; `*` stands for a part that is known only at run time; empty for printed lines."""
    loops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that keeps a checkpoint from being complete, or a loop from being resumed."""

    path: str
    line: int
    what: str
    effect: str
    """What follows for recording, replay and resume."""


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """Where a log statement could be added, and which variables it could read there."""

    path: str
    after: int
    """Line after which the statement would go."""
    where: str
    cost: str
    """The part of a run that a backfill has to run again for a probe there."""
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that the text of a program shows before it runs."""

    script: str
    files: tuple[str, ...]
    loops: tuple[LoopReport, ...]
    logs: tuple[LogReport, ...]
    obstacles: tuple[Obstacle, ...]
    places: tuple[ProbePlace, ...]
    unread: Mapping[str, str]
    """Files that could not be parsed, with the reason."""

    @property
    def main(self) -> LoopReport | None:
        """The loop taken for the training loop."""
        return next((loop for loop in self.loops if loop.main), None)


def inspect(script: str, files: Mapping[str, str]) -> Inspection:
    r"""Inspect the text of a program for loops, log calls and obstacles; `files` maps path to text.

    >>> text = "for epoch in range(3):\n    for x in data:\n        loss = net(x)\n        loss.backward()\n"
    >>> report = inspect("t.py", {"t.py": text})
    >>> report.main.id.name, [(place.after, place.reads) for place in report.places]
    ('epoch', [(4, ('loss', 'x')), (4, ()), (4, ())])
    """
    trees: dict[str, ast.Module] = {}
    unread: dict[str, str] = {}
    for path, text in files.items():
        try:
            trees[path] = parse(text, path)
        except SourceError as exc:  # a file for another Python, or a file half written
            unread[path] = str(exc)
    stacks = chains(trees)
    loops = _loops(files, trees, stacks)
    main = _main_loop(script, loops, trees)
    reports = tuple(
        replace(report, main=main is not None and report.id == main.id) for report, _ in loops
    )
    return Inspection(
        script,
        tuple(sorted(files)),
        reports,
        tuple(log for path, tree in sorted(trees.items()) for log in _logs(path, tree)),
        tuple(
            obstacle for path, tree in sorted(trees.items()) for obstacle in _obstacles(path, tree)
        ),
        tuple(_places(main, loops)) if main is not None else (),
        unread,
    )


def _loops(
    files: Mapping[str, str], trees: Mapping[str, ast.Module], stacks: Chains
) -> list[tuple[LoopReport, Loop]]:
    loops = []
    for path, tree in sorted(trees.items()):
        ids = loop_ids(tree, path)
        changed = effects(files[path], path)
        facts = library_facts(tree)
        unwatched = dict(_left_alone(tree))
        for node, function, chain in walk_loops(tree):
            loop_id = ids[node.lineno]
            outer = min(stacks.get((path, function), ((),)), key=len)
            changes = augment(changed.get(loop_id, Changeset(())), facts)
            report = LoopReport(
                loop_id,
                node.lineno,
                node.end_lineno or node.lineno,
                _kind(node),
                (*outer, *chain),
                main=False,
                changes=changes,
                sentences=explain(changes),
                left_alone=unwatched.get(node.lineno, ""),
            )
            loops.append((report, node))
    return loops


def _kind(node: Loop) -> str:
    if isinstance(node, ast.While):
        return "while"
    return "for" if isinstance(node, ast.For) else "async for"


def _left_alone(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) of each loop that instrumentation does not watch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.While) and node.orelse:
            yield node.lineno, "a `while` with an `else` is left unchanged"
        elif isinstance(node, ast.AsyncFor):
            yield node.lineno, "an `async for` is counted, but not checkpointed"
        elif isinstance(node, FUNCTIONS):
            compiler = next((d for d in node.decorator_list if _names(d) & COMPILERS), None)
            why = ""
            if compiler is not None:
                why = f"`@{ast.unparse(compiler)}` compiles the function as it is written"
            elif isinstance(node, ast.AsyncFunctionDef):
                why = "nothing is saved inside a coroutine"
            if why:
                for inner in ast.walk(node):
                    if isinstance(inner, LOOPS):
                        yield inner.lineno, why


def _names(node: ast.AST) -> set[str]:
    return {
        part.attr if isinstance(part, ast.Attribute) else part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute | ast.Name)
    }


def library_facts(tree: ast.Module) -> LibraryFacts:
    r"""Return which optimizer updates which model, and which scheduler sets which optimizer's rates.

    Both are read from how they are constructed: an optimizer from `model.parameters()`, a scheduler
    from an optimizer as its first argument.

    >>> text = "opt = SGD(net.parameters())\nsched = StepLR(opt, 3)"
    >>> library_facts(ast.parse(text))
    LibraryFacts(models={'opt': ('net',)}, optimizers={'sched': ('opt',)})
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
        owners = [
            ast.unparse(part.func.value)
            for part in ast.walk(call)
            if isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in {"parameters", "named_parameters"}
        ]
        if owners and called_name(call)[:1].isupper():
            models[name] = tuple(dict.fromkeys(owners))
    for name, call in constructed:
        first = ast.unparse(call.args[0]) if call.args else ""
        first = next((ast.unparse(k.value) for k in call.keywords if k.arg == "optimizer"), first)
        if first in models and name not in models:
            optimizers[name] = (first,)
    return LibraryFacts(models, optimizers)


def _main_loop(
    script: str, loops: Sequence[tuple[LoopReport, Loop]], trees: Mapping[str, ast.Module]
) -> LoopReport | None:
    """Return the outermost loop that trains most, following calls into the program's functions."""
    bodies: dict[str, list[ast.AST]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                bodies.setdefault(node.name, []).append(node)
    best, most = None, 0.0
    for report, node in loops:
        if report.left_alone:
            continue
        score = float(_training(node, bodies, frozenset()))
        if not score:
            continue
        # prefer outer loops, then loops of the script itself
        score = score / len(report.point) + 0.1 * (report.id.path == script)
        if score > most:
            best, most = report, score
    if best is None:  # no loop looks like training: take the longest outermost loop
        outer = [r for r, _ in loops if len(r.point) == 1 and not r.left_alone]
        best = max(outer, key=lambda r: (r.id.path == script, r.end - r.line), default=None)
    return best


def _training(
    node: ast.AST, bodies: Mapping[str, list[ast.AST]], seen: frozenset[str], depth: int = 0
) -> int:
    called = {called_name(part) for part in ast.walk(node)} - {""}
    score = sum(TRAINS.get(name, 0) for name in called)
    if depth < 4:
        for name in called & bodies.keys() - seen:
            inside = (_training(body, bodies, seen | {name}, depth + 1) for body in bodies[name])
            score = max(score, *inside)
    return score


def _logs(path: str, tree: ast.Module) -> Iterator[LogReport]:
    aliases = Aliases(tree)
    around = {node.lineno: chain for node, _, chain in walk_loops(tree)}
    spans = [
        (node.lineno, node.end_lineno or node.lineno, around[node.lineno])
        for node, _, _ in walk_loops(tree)
    ]
    for call in calls_in(tree, aliases):
        line = call.node.lineno
        inside = max((s for s in spans if s[0] < line <= s[1]), default=(0, 0, ()))
        yield LogReport(path, line, _logger(call.node, aliases), call.names, inside[2])


def _logger(call: ast.Call, aliases: Aliases) -> str:
    """Return the library or object that a log call goes through, as a person would name it."""
    func = call.func
    if isinstance(func, ast.Name):
        return func.id if func.id in {"print", "pprint"} else "rearview"
    owner = ast.unparse(func.value) if isinstance(func, ast.Attribute) else ""
    root = owner.split(".")[0]
    if root in TRACKERS or root in aliases.modules:
        return owner
    return f"{owner}.{func.attr}" if isinstance(func, ast.Attribute) else owner


_FROM_START = "a replay or resume starts at an earlier checkpoint, or from the start"
_OBSTACLES: Mapping[str, tuple[str, str]] = {
    "spawn": ("starts worker processes", "loops in child processes are not recorded"),
    "init_process_group": ("joins a process group", "each process is recorded separately"),
    "Manager": ("keeps state in a manager process", _FROM_START),
    "SharedMemory": ("keeps state in shared memory", _FROM_START),
    "Thread": ("runs a thread", f"while it runs, {_FROM_START}"),
    "socket": ("opens a socket", _FROM_START),
    "Popen": ("starts another program", "its state is not saved"),
}
_OWNERS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("sqlite3", "connect"): ("keeps a database connection", _FROM_START),
    ("h5py", "File"): ("keeps an HDF5 file open", _FROM_START),
    ("lgb", "Dataset"): ("a LightGBM data set cannot be saved", "probes run from the start"),
    ("lightgbm", "Dataset"): ("a LightGBM data set cannot be saved", "probes run from the start"),
}


def _obstacles(path: str, tree: ast.Module) -> Iterator[Obstacle]:
    """Yield what keeps checkpoints from being complete, in the order of the text."""
    obstacles = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = called_name(node)
            owner = ""
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                owner = node.func.value.id
            what = _OWNERS.get((owner, name)) or _OBSTACLES.get(name)
            if what is not None:
                obstacles.append(
                    Obstacle(path, node.lineno, f"`{_short(node.func)}` {what[0]}", what[1])
                )
            elif any(k.arg == "persistent_workers" and _true(k.value) for k in node.keywords):
                text = "`persistent_workers=True` keeps loader processes between epochs"
                obstacles.append(Obstacle(path, node.lineno, text, _FROM_START))
        elif isinstance(node, ast.With | ast.AsyncWith):
            loops = [part for part in ast.walk(node) if isinstance(part, LOOPS)]
            opened = [item for item in node.items if called_name(item.context_expr) == "open"]
            if loops and opened:
                text = f"the loop at line {loops[0].lineno} runs inside `with open(…)`"
                effect = "a replay cannot skip iterations of that loop: it runs from the start"
                obstacles.append(Obstacle(path, node.lineno, text, effect))
        elif isinstance(node, ast.AsyncFunctionDef) and any(
            isinstance(part, LOOPS) for part in ast.walk(node)
        ):
            text = f"`{node.name}` is a coroutine with loops"
            effect = "nothing is saved in coroutines; a backfill runs the program again, unproved"
            obstacles.append(Obstacle(path, node.lineno, text, effect))
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.GeneratorExp)
            and not isinstance(node.targets[0], ast.Tuple | ast.List)  # unpacked: used up at once
        ):
            text = "a generator expression is kept in a variable"
            obstacles.append(
                Obstacle(path, node.lineno, text, f"while it is half used, {_FROM_START}")
            )
    yield from sorted(dict.fromkeys(obstacles), key=lambda each: each.line)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) < 40 else "…" + text[-38:]


def _true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and not node.value)


def _places(main: LoopReport, loops: Sequence[tuple[LoopReport, Loop]]) -> Iterator[ProbePlace]:
    """Yield where a probe could go: in the inner loop, in the outer loop, after both."""
    node = next(loop for report, loop in loops if report.id == main.id)
    inner = [
        loop
        for report, loop in loops
        if report.point[: len(main.point)] == main.point
        and len(report.point) > len(main.point)
        and not report.left_alone
    ]
    deepest = max(inner, key=_weight, default=None)
    if deepest is not None:
        report = next(r for r, loop in loops if loop is deepest)
        yield _place(
            report,
            deepest,
            f"in the inner loop, at {'/'.join(report.point)}",
            "runs the requested iterations, from the nearest checkpoint",
        )
    yield _place(
        main,
        node,
        f"at the end of each iteration of `{main.id.name}`",
        "restores checkpoints; runs only iterations without one",
    )
    yield ProbePlace(
        main.id.path,
        main.end,
        f"after the loop `{main.id.name}`",
        "restores the last checkpoint",
        tuple(main.changes.names[:MOST_READS]),
    )


def _weight(loop: Loop) -> tuple[int, int]:
    called = {called_name(part) for part in ast.walk(loop)}
    return sum(TRAINS.get(name, 0) for name in called), len(list(ast.walk(loop)))


def _place(report: LoopReport, loop: Loop, where: str, cost: str) -> ProbePlace:
    """Return the end of a loop's body as a place, with the variables that the body binds."""
    body = loop.body
    if len(body) > 1 and isinstance(body[-1], ast.Return | ast.Raise | ast.Break | ast.Continue):
        body = body[:-1]
    names: dict[str, None] = {}
    for stmt in body:
        if not blocks(stmt):
            names.update(dict.fromkeys(name for name, _ in bound_by(stmt)))
    if len(report.point) > 1 and not isinstance(loop, ast.While):
        names.update(dict.fromkeys(name for name, _ in bound_by(loop.target)))
    reads = tuple(name for name in names if name.strip("_"))[:MOST_READS]
    return ProbePlace(report.id.path, body[-1].end_lineno or body[-1].lineno, where, cost, reads)


_CHANGES = {"append", "extend", "insert"}


def reaches_up(text: str) -> bool:
    r"""Return True if a script changes `sys.path` and computes the path of a folder above its own folder.

    >>> reaches_up("import sys\nsys.path.append('../..')\nfrom lib import step\n")
    True
    >>> reaches_up("import sys\nroot = Path(__file__).parents[1]\nsys.path.insert(0, str(root))\n")
    True
    >>> reaches_up("sys.path.append('tools')\n"), reaches_up("open('../data.csv')\n")
    (False, False)
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    return any(map(_changes_path, nodes)) and sum(map(_upward, nodes)) >= 2


def _is_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _changes_path(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CHANGES and _is_path(node.func.value)
    if isinstance(node, ast.Assign):
        return any(_is_path(getattr(target, "value", target)) for target in node.targets) or any(
            map(_is_path, node.targets)
        )
    return isinstance(node, ast.AugAssign) and _is_path(node.target)


def _upward(node: ast.AST) -> int:
    """Return how many folders up a path expression leads; the first `dirname` or `.parent` is the script's own folder."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        return 2 if ".." in text.replace("\\", "/").split("/") else 0
    if isinstance(node, ast.Attribute):
        return {"parents": 2, "pardir": 2, "parent": 1, "dirname": 1}.get(node.attr, 0)
    return int(isinstance(node, ast.Name) and node.id == "dirname")
