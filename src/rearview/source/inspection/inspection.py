"""Inspect the text of a program before it runs: its loops, log calls, obstacles to checkpoints, places for probes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from rearview.source.inspection.changed_variables import (
    ChangedVariables,
    add_library_changes,
    changed_variables,
    explain_changes,
    library_updates,
)
from rearview.source.inspection.checkpoint_obstacles import Obstacle, obstacles_in
from rearview.source.inspection.main_loop import Calls, LoopCandidate, choose_main_loop
from rearview.source.instrument import COMPILERS
from rearview.source.library_loops import LibraryCall, library_calls
from rearview.source.log_calls import TRACKERS, Aliases, calls_in
from rearview.source.loops import (
    FUNCTIONS,
    LOOPS,
    Loop,
    LoopId,
    LoopPaths,
    find_loop_names,
    loop_ids,
    walk_loops,
)
from rearview.source.notebooks import Notebook, name_cells
from rearview.source.scopes import bound_by
from rearview.source.text import UNDECODABLE, blocks, try_parse

MOST_READS = 4
"""Maximal number of variables that are listed for one place where a probe could be added."""


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Facts about one loop of the program, read from its text."""

    id: LoopId
    line: int
    end: int
    kind: str
    """Keyword of the loop: `"for"`, `"while"` or `"async for"`."""
    point: tuple[str, ...]
    """Names of the loops around the loop, outermost first, then its own name: the names in its points."""
    main: bool
    """Whether this is the main loop: the loop that is taken for the training loop."""
    changes: ChangedVariables
    sentences: tuple[str, ...]
    """Sentences that say which variables the loop changes, and why."""
    why_unwatched: str
    """Reason why Rearview cannot save checkpoints in the loop; empty if it can (the loop is watched)."""


@dataclass(frozen=True, slots=True)
class LogReport:
    """One log call of the program."""

    path: str
    line: int
    logger: str
    names: tuple[str, ...]
    """Names of logged values; `*` replaces parts known only at run time. Empty if the call logs a line of text."""
    loops: tuple[str, ...]
    """Names of the loops around the call in its function, outermost first."""


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """A place where the user could add a log statement."""

    path: str
    after: int
    """Number of the line after which the statement would be added."""
    where: str
    """The place in words: "after the loop `epoch`"."""
    cost: str
    """Description of what a backfill has to run again for a log statement at this place."""
    reads: tuple[str, ...]
    """Variables that the statement could log."""


@dataclass(frozen=True, slots=True)
class Unread:
    """The reason why this interpreter cannot read a file as Python."""

    reason: str
    python2: bool = False
    """Whether the file can be read as Python 2."""


class Answer(Enum):
    """Whether Rearview will work on a program."""

    YES = "yes"
    LIMITED = "limited"
    """Rearview records and replays the program, but an obstacle keeps replays from starting at every checkpoint."""
    WHOLE = "whole"
    """Rearview records the program. A replay runs the whole program, because no training loop is watched."""
    NO = "no"
    """Rearview cannot read the script, and so cannot record the program."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Results of inspecting the text of a program: loops, log calls, obstacles, places for probes."""

    script: str
    files: tuple[str, ...]
    loops: tuple[LoopReport, ...]
    library: tuple[LibraryCall, ...]
    """Calls that run a training loop inside a library."""
    logs: tuple[LogReport, ...]
    obstacles: tuple[Obstacle, ...]
    places: tuple[ProbePlace, ...]
    unread: Mapping[str, Unread]
    """File path -> why Python cannot read the file."""
    training_call: LibraryCall | None = None
    """The call that trains, or None if the training loop is in the program itself."""
    step: tuple[str, ...] = ()
    """Names of the loops from the outermost one to the loop over training steps inside the main loop; may be empty."""
    sure: bool = True
    """Whether the text shows that the main loop trains; otherwise the main loop is only a guess."""
    answer: Answer = Answer.YES
    reasons: tuple[str, ...] = ()
    """Sentences that say why `answer` is not `YES`, or which files and cells could not be read."""

    notebooks: Mapping[str, Notebook] = field(default_factory=dict)
    """Path of the program text (`a.ipynb.py`) -> notebook from which the text was made."""

    def cell_and_line(self, path: str, line: int) -> tuple[str, int | None, int]:
        """Return (file path, number of the cell, line in the cell), or (`path`, None, `line`) if not in a notebook."""
        notebook = self.notebooks.get(path)
        if notebook is None:
            return path, None, line
        return path.removesuffix(".py"), *notebook.cell_at(line)

    def in_cells(self, text: str) -> str:
        """Return `text` with positions such as `a.ipynb.py:3` given as cell and line in the cell."""
        return name_cells(text, {path: each.text for path, each in self.notebooks.items()})

    @property
    def main(self) -> LoopReport | None:
        """The loop that is taken for the training loop, or None if no loop of the program is."""
        return next((loop for loop in self.loops if loop.main), None)

    @property
    def point(self) -> tuple[str, ...]:
        """Names of the loops around a training step, outermost first, including the loops of a library."""
        main, call = self.main, self.training_call
        library = call.point if call is not None else ()
        if main is None:
            return library
        return (*main.point, *library) if library else self.step or main.point


def _is_inside(loop: LoopReport, outer: LoopReport) -> bool:
    return len(loop.point) > len(outer.point) and loop.point[: len(outer.point)] == outer.point


def inspect(
    script: str, files: Mapping[str, str], notebooks: Mapping[str, Notebook] | None = None
) -> Inspection:
    r"""Inspect the text of a program without running it; `script` is the path of its main file.

    `files` maps file paths to text. For each path of a text that was made from a notebook, `notebooks` holds
    the notebook.

    >>> text = "for epoch in range(3):\n    for x in data:\n        loss = net(x)\n        loss.backward()\n"
    >>> report = inspect("t.py", {"t.py": text})
    >>> report.main.id.name, [(place.after, place.reads) for place in report.places]
    ('epoch', [(4, ('loss', 'x')), (4, ()), (4, ())])
    >>> report.answer.value
    'yes'
    """
    trees: dict[str, ast.Module] = {}
    unread: dict[str, Unread] = {}
    for path, text in files.items():
        tree = _readable(text)
        if isinstance(tree, Unread):
            unread[path] = tree
        else:
            trees[path] = tree
    loops = _loops(trees, find_loop_names(trees), notebooks or {})
    candidates = [
        LoopCandidate(report.id, node, len(report.point), not report.why_unwatched)
        for report, node in loops
    ]
    calls = Calls(trees)
    library = library_calls(trees, calls.origins)
    main_loop = choose_main_loop(script, candidates, trees, library, calls)
    main = main_loop.loop
    loops = [
        (replace(report, main=main is not None and report.id == main.id), node)
        for report, node in loops
    ]
    inspection = Inspection(
        script,
        tuple(sorted(files)),
        tuple(report for report, _ in loops),
        library,
        tuple(log for path, tree in sorted(trees.items()) for log in _logs(path, tree)),
        tuple(each for path, tree in sorted(trees.items()) for each in obstacles_in(path, tree)),
        (),
        unread,
        main_loop.call,
        sure=main_loop.sure,
        notebooks=notebooks or {},
    )
    inner = _inner_loop(inspection, loops, calls)
    if inner is not None and calls.training_weight(inner[0].id.path, inner[1]):
        inspection = replace(inspection, step=inner[0].point)
    inspection = replace(inspection, obstacles=tuple(_relevant(inspection, loops)))
    answer, reasons = _answer(inspection, calls, trees)
    places = tuple(_places(inspection, loops, inner, trees))
    return replace(inspection, answer=answer, reasons=reasons, places=places)


def _relevant(
    inspection: Inspection, loops: Sequence[tuple[LoopReport, Loop]]
) -> Iterator[Obstacle]:
    """Yield the obstacles that concern all loops, the main loop, or a loop around the main loop."""
    main = inspection.main
    for obstacle in inspection.obstacles:
        if obstacle.loop_line and (main is not None or inspection.training_call is not None):
            concerned = next(
                report
                for report, _ in loops
                if (report.id.path, report.line) == (obstacle.path, obstacle.loop_line)
            )
            if main is None or not (concerned.main or _is_inside(main, concerned)):
                continue
        yield obstacle


def _answer(
    inspection: Inspection,
    calls: Calls,
    trees: Mapping[str, ast.Module],
) -> tuple[Answer, tuple[str, ...]]:
    """Return (whether Rearview will work on the program, sentences that explain restrictions)."""
    if inspection.script in inspection.unread:
        reason = inspection.unread[inspection.script].reason
        return Answer.NO, (f"{inspection.script} cannot be read as Python: {reason}.",)
    reasons = [
        f"{path} cannot be read as Python: {unread.reason}. Its loops are not listed here."
        for path, unread in sorted(inspection.unread.items())
    ]
    reasons += [
        f"{path.removesuffix('.py')} cell {cell.number} cannot be read as Python."
        for path, notebook in inspection.notebooks.items()
        for cell in notebook.cells
        if not cell.readable
    ]
    main, call = inspection.main, inspection.training_call
    if main is None and call is None:
        return Answer.WHOLE, (*reasons, *_why_nothing_is_watched(inspection))
    if call is not None:
        reasons += call.limits
    trained_in_child = False
    for obstacle in inspection.obstacles:
        if obstacle.starts and main is not None:
            main_function = (main.id.path, main.id.function.rpartition(".")[2])
            started = calls.functions_named(obstacle.path, obstacle.starts)
            child_trains = main_function in started or any(
                main_function in calls.functions_reached_from(function[0], body)
                for function in started
                for body in calls.bodies[function]
            )
            if not child_trains:
                continue
            only_in_child = not _is_called_directly(obstacle.starts, trees)
            trained_in_child = trained_in_child or only_in_child
            when = (
                "The training loop runs"
                if only_in_child
                else "If it is used, the training loop runs"
            )
            reasons.append(
                f"{_capitalized(obstacle.what)} ({obstacle.path}:{obstacle.line}). {when} in child "
                "processes, whose loops are not recorded."
            )
        else:
            what = _capitalized(obstacle.what)
            reasons.append(f"{what} ({obstacle.path}:{obstacle.line}): {obstacle.effect}.")
    if trained_in_child:
        return Answer.WHOLE, tuple(reasons)
    return (Answer.LIMITED if reasons else Answer.YES), tuple(reasons)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _readable(text: str) -> ast.Module | Unread:
    """Return the syntax tree of a text, or an `Unread` with the reason if it is not Python 3."""
    if (undecodable := UNDECODABLE.search(text)) is not None:
        line = text.count("\n", 0, undecodable.start()) + 1
        return Unread(f"line {line} has bytes that are not in the encoding of the file")
    parsed = try_parse(text)
    if isinstance(parsed, str):
        return Unread(parsed)
    if parsed.repaired:
        return Unread("it is Python 2, and Rearview needs Python 3.11 or newer", python2=True)
    return parsed.tree


def _why_nothing_is_watched(inspection: Inspection) -> Iterator[str]:
    if not inspection.loops and not inspection.library:
        yield "It has no loop."
    for loop in inspection.loops:
        if loop.why_unwatched:
            name, where = "/".join(loop.point), f"{loop.id.path}:{loop.line}"
            yield f"The loop `{name}` ({where}) is not watched: {loop.why_unwatched}."
    for call in inspection.library:
        yield (
            f"`{call.call}` ({call.path}:{call.line}) trains inside {call.library}, "
            "whose loops are not watched."
        )


def _is_called_directly(function: str, trees: Mapping[str, ast.Module]) -> bool:
    """Return True if a file of the program contains a call `function(…)`."""
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == function
        for tree in trees.values()
        for part in ast.walk(tree)
    )


def _loops(
    trees: Mapping[str, ast.Module], stacks: LoopPaths, notebooks: Mapping[str, Notebook]
) -> list[tuple[LoopReport, Loop]]:
    """Return (report, syntax node) of each loop. `stacks` holds the loops around the calls of each function."""
    loops = []
    for path, tree in sorted(trees.items()):
        ids = loop_ids(tree, path)
        notebook = notebooks.get(path)
        own_changes = changed_variables(tree, path)
        updates = library_updates(tree)
        visible = _VisibleNames(tree)
        unwatched = dict(_unwatched_loops(tree))
        for node, function, chain in walk_loops(tree):
            loop_id = ids[node.lineno]
            outer = min(stacks.get((path, function), ((),)), key=len)
            own = own_changes.get(loop_id, ChangedVariables(()))
            above = node.lineno - notebook.cell_at(node.lineno)[1] if notebook is not None else 0
            changes = add_library_changes(own, updates, visible=visible.at(node))
            report = LoopReport(
                loop_id,
                node.lineno,
                node.end_lineno or node.lineno,
                _kind(node),
                (*outer, *chain),
                main=False,
                changes=changes,
                sentences=explain_changes(changes, lines_above=above),
                why_unwatched=unwatched.get(node.lineno, ""),
            )
            loops.append((report, node))
    return loops


def _kind(node: Loop) -> str:
    if isinstance(node, ast.While):
        return "while"
    return "for" if isinstance(node, ast.For) else "async for"


def _unwatched_loops(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line of the loop, reason) for each loop that is not watched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.While) and node.orelse:
            yield node.lineno, "a `while` with an `else` is left unchanged"
        elif isinstance(node, ast.AsyncFor):
            yield node.lineno, "an `async for` is counted, but not checkpointed"
        elif isinstance(node, FUNCTIONS):
            compiler = next((d for d in node.decorator_list if _words_in(d) & COMPILERS), None)
            why = ""
            if compiler is not None:
                why = f"`@{ast.unparse(compiler)}` compiles the function as it is written"
            elif isinstance(node, ast.AsyncFunctionDef):
                why = "nothing is saved inside a coroutine"
            if why:
                for inner in ast.walk(node):
                    if isinstance(inner, LOOPS):
                        yield inner.lineno, why


def _words_in(node: ast.AST) -> set[str]:
    """Return all names in an expression, those of variables and those of attributes."""
    return {
        part.attr if isinstance(part, ast.Attribute) else part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute | ast.Name)
    }


class _VisibleNames:
    """The names that code in each function of a file can use."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
        self.top = {name for stmt in tree.body for name, _ in bound_by(stmt)}
        self._names: dict[int, frozenset[str]] = {}

    def at(self, loop: Loop) -> frozenset[str]:
        """Return the names that the module binds and all names in the functions around `loop`."""
        around = [
            function
            for function in self.functions
            if function.lineno < loop.lineno <= (function.end_lineno or 0)
        ]
        return frozenset(self.top).union(*(self._inside(function) for function in around))

    def _inside(self, function: ast.AST) -> frozenset[str]:
        if id(function) not in self._names:
            self._names[id(function)] = frozenset(
                part.id if isinstance(part, ast.Name) else part.arg
                for part in ast.walk(function)
                if isinstance(part, ast.Name | ast.arg)
            )
        return self._names[id(function)]


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
    """Return the logger that a log call uses, as the user writes it: `print`, `wandb`, `writer.add_scalar`."""
    func = call.func
    if isinstance(func, ast.Name):
        return func.id if func.id in {"print", "pprint"} else "rearview"
    owner = ast.unparse(func.value) if isinstance(func, ast.Attribute) else ""
    root = owner.split(".")[0]
    if root in TRACKERS or root in aliases.modules:
        return owner
    return f"{owner}.{func.attr}" if isinstance(func, ast.Attribute) else owner


def _places(
    inspection: Inspection,
    loops: Sequence[tuple[LoopReport, Loop]],
    inner: tuple[LoopReport, Loop] | None,
    trees: Mapping[str, ast.Module],
) -> Iterator[ProbePlace]:
    """Yield places for a probe: in hooks of a library, in `inner`, in the main loop, after the main loop."""
    main, call = inspection.main, inspection.training_call
    if call is not None:
        yield from _hook_places(call, trees)
    if main is None:
        if call is not None:
            yield ProbePlace(
                *(call.path, call.end, f"after `{call.call}`", "restores the last checkpoint", ())
            )
        return
    node = next(loop for report, loop in loops if report.id == main.id)
    if inner is not None and call is None:
        report, deepest = inner
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


def _inner_loop(
    inspection: Inspection, loops: Sequence[tuple[LoopReport, Loop]], calls: Calls
) -> tuple[LoopReport, Loop] | None:
    """Return the loop inside the main loop that looks most like training, or None if no loop is inside."""
    main = inspection.main
    inner = [
        (report, loop)
        for report, loop in loops
        if main is not None and _is_inside(report, main) and not report.why_unwatched
    ]
    return max(
        inner,
        key=lambda item: (
            calls.training_weight(item[0].id.path, item[1]),
            len(list(ast.walk(item[1]))),
        ),
        default=None,
    )


def _hook_places(call: LibraryCall, trees: Mapping[str, ast.Module]) -> Iterator[ProbePlace]:
    """Yield places for a probe in functions of the program that a library's training loop calls."""
    functions = [
        (call.hooks.index(node.name), path, node)
        for path, tree in sorted(trees.items())
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and node.name in call.hooks
    ]
    for _, path, node in sorted(functions, key=lambda item: item[0])[:2]:
        yield ProbePlace(
            path,
            _last_line(node.body),
            f"in `{node.name}`, which {call.library} calls",
            "runs the iterations asked for again, from the nearest checkpoint",
            _bound_in(_without_jump(node.body))[:MOST_READS],
        )


def _place(report: LoopReport, loop: Loop, where: str, cost: str) -> ProbePlace:
    """Return the end of a loop's body as a place for a probe, with variables that the body binds."""
    names = dict.fromkeys(_bound_in(_without_jump(loop.body)))
    if len(report.point) > 1 and not isinstance(loop, ast.While):
        names.update(dict.fromkeys(name for name, _ in bound_by(loop.target)))
    reads = tuple(name for name in names if name.strip("_"))[:MOST_READS]
    return ProbePlace(report.id.path, _last_line(loop.body), where, cost, reads)


def _without_jump(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a body without a `return`, `raise`, `break` or `continue` at its end, unless that is all of it."""
    ends_in_jump = isinstance(body[-1], ast.Return | ast.Raise | ast.Break | ast.Continue)
    return body[:-1] if ends_in_jump and len(body) > 1 else body


def _last_line(body: list[ast.stmt]) -> int:
    last = _without_jump(body)[-1]
    return last.end_lineno or last.lineno


def _bound_in(body: list[ast.stmt]) -> tuple[str, ...]:
    """Return the variables that a body binds, in order, without those bound inside loops, `if` and the like."""
    bound = (name for stmt in body if not blocks(stmt) for name, _ in bound_by(stmt))
    return tuple(name for name in dict.fromkeys(bound) if name.strip("_"))
