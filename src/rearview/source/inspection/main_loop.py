"""Choose the main loop of a program: the outermost loop around its training steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rearview.source.library_loops import LibraryCall, Origins, dotted
from rearview.source.loops import FUNCTIONS, LOOPS, MODULE, Loop, LoopId, called_name

CALL_WEIGHTS = {
    "backward": 4, "step": 3, "zero_grad": 3, "partial_fit": 3, "train_on_batch": 3, "boost": 2,
    "update": 2, "apply_gradients": 3, "apply_updates": 3, "train_step": 3, "training_step": 3,
    "manual_backward": 4, "value_and_grad": 3, "train": 1, "fit": 1,
}  # fmt: skip
"""Name of a function or method that training loops call -> how strongly a call suggests that a loop trains."""
SURE_WEIGHT = 3
"""Least score, a sum of `CALL_WEIGHTS`, with which a loop is surely taken for a training loop."""
_SCRIPT_FACTOR = 2.0
"""Factor for the score of a loop in the script itself, not in an imported file."""
_NOT_CALLED_FACTOR = 0.5
"""Factor for the score of a loop in a function that the script does not seem to call."""
_SHARED_NAMES = frozenset({
    "update", "step", "train", "eval", "get", "append", "add", "run", "log", "write", "save",
    "load", "reset", "close", "copy", "forward", "backward", "print", "to", "items", "__init__",
})  # fmt: skip
"""Names of methods that many classes have: such a name does not tell which method is called."""


@dataclass(frozen=True, slots=True)
class LoopCandidate:
    """A loop of the program that may be its main loop."""

    id: LoopId
    node: Loop
    depth: int
    """Number of loops around the loop, in its function and in callers, plus 1."""
    watched: bool


Function = tuple[str, str]
"""(file path, last word of the qualified name) of a function of the program."""

_RUN_IN_OTHER_PROCESS = frozenset(
    {"Process", "Thread", "spawn", "start_processes", "submit", "apply_async", "imap", "starmap"}
)
"""Functions that run their arguments in another process or thread."""


class Calls:
    """The calls between the functions of a program, as far as the text shows them."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.origins = Origins(trees)
        self.bodies: dict[Function, list[ast.AST]] = {}
        """Function -> its definitions; functions with equal names in one file are not distinguished."""
        self._functions: dict[str, set[Function]] = {}
        """Name -> functions of the program with this name that are no methods."""
        self._methods: dict[str, set[Function]] = {}
        """Name -> methods of the program with this name."""
        self._called_by: dict[tuple[Function, bool], frozenset[Function]] = {}
        """Arguments (function, `sure`) -> cached result of `functions_called_by`."""
        self._reached: dict[tuple[int, bool], frozenset[Function]] = {}
        """(`id()` of a node, `sure`) -> cached result of `functions_reached_from`. The trees stay in memory."""
        self._weights: dict[Function, int] = {}
        self.called_alone: frozenset[Function] = frozenset()
        """Functions that the script may call while no loop of the program runs; set by `start_from`."""
        for path, tree in trees.items():
            self._collect(path, tree, self._functions)

    def _collect(self, path: str, node: ast.AST, table: dict[str, set[Function]]) -> None:
        """Add the functions inside `node` to `table`, and the methods inside it to `_methods`."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                key = (path, child.name)
                table.setdefault(child.name, set()).add(key)
                self.bodies.setdefault(key, []).append(child)
                self._collect(path, child, self._functions)
            elif isinstance(child, ast.ClassDef):
                self._collect(path, child, self._methods)
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                self._collect(path, child, table)

    def functions_named(self, path: str, name: str) -> set[Function]:
        """Return the functions, but no methods, for which `name` may stand in the file `path`."""
        functions = self._functions.get(name, set())
        if (path, name) in functions:
            return {(path, name)}
        imported = self.origins.imports.get(path, {}).get(name)
        if imported is None:
            return set()
        module, _, original = imported.rpartition(".")
        return {key for key in self._functions.get(original, ()) if _is_module(key[0], module)}

    def _functions_of_call(self, path: str, call: ast.Call, *, sure: bool) -> set[Function]:
        """Return the functions and methods of the program that `call` may run; `sure` as in `functions_called_in`."""
        func = call.func
        if isinstance(func, ast.Name):
            return self.functions_named(path, func.id)
        if not isinstance(func, ast.Attribute):
            return set()
        receiver = dotted(func.value)
        module = self.origins.imports.get(path, {}).get(receiver)
        if module is not None:
            return {key for key in self._functions.get(func.attr, ()) if _is_module(key[0], module)}
        methods = self._methods.get(func.attr, set())
        if receiver in {"self", "cls"}:
            return {key for key in methods if key[0] == path} or methods
        own_class = self.origins.project_class(path, receiver)
        if own_class is not None:
            if any(getattr(part, "name", "") == func.attr for part in own_class.body):
                file = self.origins.class_files[own_class.name]
                return {key for key in methods if key[0] == file}
            return methods
        return methods if not sure or func.attr not in _SHARED_NAMES else set()

    def functions_called_in(
        self, path: str, node: ast.AST, *, sure: bool, loops: bool = True
    ) -> frozenset[Function]:
        """Return the functions that the code inside `node` calls, or passes as arguments to a call.

        With `sure`, a call of a method counts only if the text shows the class of the object, or if the name of
        the method is not in `_SHARED_NAMES`. Without `loops`, calls in loops do not count.
        """
        functions: set[Function] = set()
        for call in _calls_below(node, loops=loops):
            functions |= self._functions_of_call(path, call, sure=sure)
            if called_name(call) not in _RUN_IN_OTHER_PROCESS:
                for value in (*call.args, *(keyword.value for keyword in call.keywords)):
                    if isinstance(value, ast.Name):
                        functions |= self.functions_named(path, value.id)
        return frozenset(functions)

    def functions_reached_from(
        self, path: str, node: ast.AST, *, sure: bool = True
    ) -> frozenset[Function]:
        """Return the functions that the code inside `node` may call, directly or through other functions.

        `sure` as in `functions_called_in`.
        """
        key = (id(node), sure)
        if key in self._reached:
            return self._reached[key]
        reached: set[Function] = set()
        remaining = set(self.functions_called_in(path, node, sure=sure))
        while remaining:
            function = remaining.pop()
            if function not in reached:
                reached.add(function)
                remaining |= self.functions_called_by(function, sure=sure) - reached
        self._reached[key] = frozenset(reached)
        return self._reached[key]

    def functions_called_by(self, function: Function, *, sure: bool) -> frozenset[Function]:
        """Return the functions that `function` may call directly; `sure` as in `functions_called_in`."""
        key = (function, sure)
        if key not in self._called_by:
            bodies = self.bodies[function]
            parts = (self.functions_called_in(function[0], body, sure=sure) for body in bodies)
            self._called_by[key] = frozenset[Function]().union(*parts)
        return self._called_by[key]

    def start_from(self, script: str, tree: ast.Module) -> frozenset[Function]:
        """Return the functions that the script may call, directly or through others, and set `called_alone`.

        `script` is the path of the script, `tree` its syntax tree.
        """
        alone: set[Function] = set()
        remaining = set(self.functions_called_in(script, tree, sure=True, loops=False))
        while remaining:
            function = remaining.pop()
            if function not in alone:
                alone.add(function)
                for body in self.bodies[function]:
                    remaining |= (
                        self.functions_called_in(function[0], body, sure=True, loops=False) - alone
                    )
        self.called_alone = frozenset(alone)
        return self.functions_reached_from(script, tree, sure=False)

    def training_weight(self, path: str, node: ast.AST) -> int:
        """Return the highest `_weight` among `node` and the functions that the code inside it may call."""
        below = self.functions_reached_from(path, node, sure=False)
        return max([_weight(node), *(self._weight_of(function) for function in below)])

    def _weight_of(self, function: Function) -> int:
        if function not in self._weights:
            self._weights[function] = max(map(_weight, self.bodies[function]))
        return self._weights[function]


def _is_module(path: str, module: str) -> bool:
    """Return True if the file at `path` may be the module that an import names.

    >>> _is_module("mingpt/trainer.py", "mingpt.trainer"), _is_module("a/b.py", ".b"), _is_module("a.py", "b")
    (True, True, False)
    """
    file = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    name = module.strip(".")
    return file == name or file.endswith(f".{name}") or name.endswith(f".{file}")


def _weight(node: ast.AST) -> int:
    """Return the sum of the `CALL_WEIGHTS` of the function names that the code inside `node` calls."""
    return sum(
        CALL_WEIGHTS.get(name, 0) for name in {called_name(call) for call in _calls_below(node)}
    )


def _calls_below(node: ast.AST, *, loops: bool = True) -> Iterator[ast.Call]:
    """Yield the calls inside `node`, except in functions defined there and, if not `loops`, except in loops."""
    remaining = list(ast.iter_child_nodes(node))
    while remaining:
        part = remaining.pop()
        if isinstance(part, ast.Call):
            yield part
        if not isinstance(part, FUNCTIONS) and (loops or not isinstance(part, LOOPS)):
            remaining.extend(ast.iter_child_nodes(part))


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """The part of a program that trains: a loop of the program, a call of a library, both, or neither."""

    loop: LoopCandidate | None
    """The main loop, or None if no loop of the program trains or is around the `call`."""
    call: LibraryCall | None = None
    """The call that runs a library's training loop, or None if no such call trains."""
    sure: bool = True
    """Whether the text shows that the loop trains; otherwise `loop` is only a guess."""


def choose_main_loop(
    script: str,
    candidates: Sequence[LoopCandidate],
    trees: Mapping[str, ast.Module],
    library: Sequence[LibraryCall],
    calls: Calls,
) -> TrainingLoop:
    """Return the outermost loop around the training steps of a program, and the library call that trains, if any.

    `candidates` are all loops of the program, `library` all calls that run a training loop inside a library.
    """
    reached = calls.start_from(script, trees[script]) if script in trees else frozenset()
    runs = [
        candidate
        for candidate in candidates
        if candidate.watched and _seems_to_run(candidate, script, reached)
    ]
    scores = {
        candidate.id: calls.training_weight(candidate.id.path, candidate.node)
        * (1.0 if candidate in runs else _NOT_CALLED_FACTOR)
        for candidate in candidates
        if candidate.watched
    }
    # prefer outer loops, then loops of the script itself
    ranked = [
        (
            scores[candidate.id]
            / candidate.depth
            * (_SCRIPT_FACTOR if candidate.id.path == script else 1),
            candidate,
        )
        for candidate in candidates
        if candidate.watched and scores[candidate.id]
    ]
    most, best = max(ranked, key=lambda item: item[0], default=(0.0, None))
    watched_call = _call_that_trains(script, library)
    if best is not None and scores[best.id] >= SURE_WEIGHT:
        outer = _outermost(best, runs, calls)
        around = next((c for c in library if c.library == "Optuna" and c.watched), None)
        if around is not None and best.id.function != MODULE:
            return TrainingLoop(None, around)
        return TrainingLoop(outer)
    if watched_call is not None:
        return TrainingLoop(_loop_around(watched_call, runs, trees, calls), watched_call)
    if best is not None:
        return TrainingLoop(_outermost(best, runs, calls), sure=most >= 1)
    outer_loops = [
        candidate for candidate in candidates if candidate.depth == 1 and candidate.watched
    ]
    longest = max(
        outer_loops,
        key=lambda candidate: (candidate.id.path == script, _line_count(candidate.node)),
        default=None,
    )
    return TrainingLoop(longest, sure=False)


def _line_count(loop: Loop) -> int:
    return (loop.end_lineno or loop.lineno) - loop.lineno


def _seems_to_run(candidate: LoopCandidate, script: str, reached: frozenset[Function]) -> bool:
    """Return True if the script seems to run the loop; `reached` are the functions that the script may call."""
    path, function = candidate.id.path, candidate.id.function
    if function == MODULE:
        return path == script
    return (path, function.rpartition(".")[2]) in reached


def _call_that_trains(script: str, library: Sequence[LibraryCall]) -> LibraryCall | None:
    """Return the watched call of `library`, preferably of Optuna, then in the script; None if none is watched."""
    watched = [call for call in library if call.watched]
    return min(
        watched, key=lambda call: (call.library != "Optuna", call.path != script), default=None
    )


def _loop_around(
    call: LibraryCall,
    candidates: Sequence[LoopCandidate],
    trees: Mapping[str, ast.Module],
    calls: Calls,
) -> LoopCandidate | None:
    """Return the outermost loop of the program around a call of a library, or None if no loop is around the call."""
    inside = [
        candidate
        for candidate in candidates
        if candidate.watched
        and candidate.id.path == call.path
        and candidate.node.lineno < call.line <= (candidate.node.end_lineno or 0)
    ]
    if inside:
        return _outermost(min(inside, key=lambda candidate: candidate.depth), candidates, calls)
    holder = _function_around(trees[call.path], call.line)
    if holder is None:
        return None
    function = (call.path, holder)
    around = [candidate for candidate in candidates if _may_call(candidate, function, calls)]
    return _outermost(around[0], candidates, calls) if around else None


def _function_around(tree: ast.Module, line: int) -> str | None:
    """Return the name of the innermost function around a line, or None at the top level of the file."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno).name if around else None


def _outermost(
    candidate: LoopCandidate, candidates: Sequence[LoopCandidate], calls: Calls
) -> LoopCandidate:
    """Return the outermost loop of `candidates` that runs `candidate`, directly or through function calls.

    Return `candidate` if no loop runs it. Stay inside a function that the script also calls outside loops.
    """
    current, visited = candidate, {candidate.id}
    while True:
        around = [
            outer
            for outer in candidates
            if outer.id not in visited and _contains(outer, current, calls)
        ]
        if _function(current) in calls.called_alone and _has_inner(current, candidates, calls):
            # the script calls `train()` also outside `for g in grid: train()`: stay inside the function
            around = [outer for outer in around if _function(outer) == _function(current)]
        if not around:
            return current
        current = min(around, key=lambda outer: (outer.depth, outer.node.lineno))
        visited.add(current.id)


def _function(candidate: LoopCandidate) -> Function:
    return candidate.id.path, candidate.id.function.rpartition(".")[2]


def _has_inner(candidate: LoopCandidate, candidates: Sequence[LoopCandidate], calls: Calls) -> bool:
    return any(
        inner.id != candidate.id and _contains(candidate, inner, calls) for inner in candidates
    )


def _contains(outer: LoopCandidate, inner: LoopCandidate, calls: Calls) -> bool:
    """Return True if `inner` may run inside `outer`, in the same function or through calls."""
    same_file = outer.id.path == inner.id.path
    if same_file and outer.id.function == inner.id.function:
        return outer.node.lineno < inner.node.lineno <= (outer.node.end_lineno or 0)
    if inner.id.function == MODULE:
        return False
    return _may_call(outer, _function(inner), calls)


def _may_call(loop: LoopCandidate, function: Function, calls: Calls) -> bool:
    return _function(loop) != function and function in calls.functions_reached_from(
        loop.id.path, loop.node
    )
