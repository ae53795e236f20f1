"""Choose the loop of a program that trains: its main loop, the outermost one around the training steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rearview.source.library_loops import LibraryCall, Origins, dotted
from rearview.source.loops import FUNCTIONS, LOOPS, MODULE, Loop, LoopId, called_name

TRAINS = {
    "backward": 4, "step": 3, "zero_grad": 3, "partial_fit": 3, "train_on_batch": 3, "boost": 2,
    "update": 2, "apply_gradients": 3, "apply_updates": 3, "train_step": 3, "training_step": 3,
    "manual_backward": 4, "value_and_grad": 3, "train": 1, "fit": 1,
}  # fmt: skip
"""Calls that training loops make, each with its weight when the main loop is chosen."""
SURE = 3
"""Weight from which a loop is taken for one that trains."""
_OWN = 2.0
"""Factor for a loop of the script itself."""
_UNREACHED = 0.5
"""Factor for a loop in a function that the script does not seem to call."""
_SHARED_NAMES = frozenset({
    "update", "step", "train", "eval", "get", "append", "add", "run", "log", "write", "save",
    "load", "reset", "close", "copy", "forward", "backward", "print", "to", "items", "__init__",
})  # fmt: skip
"""Names of methods that many kinds of object have: a call of one says little about what is called."""


@dataclass(frozen=True, slots=True)
class LoopSpot:
    """A loop in the text, with the place it has in the program."""

    id: LoopId
    node: Loop
    depth: int
    """Loops around it, itself included."""
    watched: bool


Function = tuple[str, str]
"""(path, last name) of a function of the program."""

_ELSEWHERE = frozenset(
    {"Process", "Thread", "spawn", "start_processes", "submit", "apply_async", "imap", "starmap"}
)
"""Calls that run the functions handed to them in another process or thread."""


class Calls:
    """Which functions of a program the code below a node may call."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.origins = Origins(trees)
        self.bodies: dict[Function, list[ast.AST]] = {}
        self._plain: dict[str, set[Function]] = {}
        """By name: functions that are no methods."""
        self._methods: dict[str, set[Function]] = {}
        self._direct: dict[tuple[Function, bool], frozenset[Function]] = {}
        self._below: dict[tuple[int, bool], frozenset[Function]] = {}
        """By id of a node of the trees, which the caller keeps."""
        self._weights: dict[Function, int] = {}
        self.called_alone: frozenset[Function] = frozenset()
        """Functions that the script reaches without any loop of the program around them."""
        for path, tree in trees.items():
            self._collect(path, tree, self._plain)

    def _collect(self, path: str, node: ast.AST, kind: dict[str, set[Function]]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                key = (path, child.name)
                kind.setdefault(child.name, set()).add(key)
                self.bodies.setdefault(key, []).append(child)
                self._collect(path, child, self._plain)
            elif isinstance(child, ast.ClassDef):
                self._collect(path, child, self._methods)
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                self._collect(path, child, kind)

    def named(self, path: str, name: str) -> set[Function]:
        """Return the plain functions that a name means in a file."""
        functions = self._plain.get(name, set())
        if (path, name) in functions:
            return {(path, name)}
        imported = self.origins.imports.get(path, {}).get(name)
        if imported is None:
            return set()
        module, _, original = imported.rpartition(".")
        return {key for key in self._plain.get(original, ()) if _is_module(key[0], module)}

    def _called(self, path: str, call: ast.Call, *, sure: bool) -> set[Function]:
        func = call.func
        if isinstance(func, ast.Name):
            return self.named(path, func.id)
        if not isinstance(func, ast.Attribute):
            return set()
        receiver = dotted(func.value)
        module = self.origins.imports.get(path, {}).get(receiver)
        if module is not None:
            return {key for key in self._plain.get(func.attr, ()) if _is_module(key[0], module)}
        methods = self._methods.get(func.attr, set())
        if receiver in {"self", "cls"}:
            return {key for key in methods if key[0] == path} or methods
        own = self.origins.project_class(path, receiver)
        if own is not None and any(getattr(part, "name", "") == func.attr for part in own.body):
            return {key for key in methods if key[0] == self.origins.class_files[own.name]}
        return methods if own is not None or not sure or func.attr not in _SHARED_NAMES else set()

    def direct(
        self, path: str, node: ast.AST, *, sure: bool, loops: bool = True
    ) -> frozenset[Function]:
        """Return the functions that are called in a node, or handed to a call in it.

        With `sure`, calls of methods count only if the text shows whose method it is, or if the name is
        an unusual one. Without `loops`, calls in loops do not count.
        """
        functions: set[Function] = set()
        for call in _calls_below(node, loops=loops):
            functions |= self._called(path, call, sure=sure)
            if called_name(call) not in _ELSEWHERE:
                for value in (*call.args, *(keyword.value for keyword in call.keywords)):
                    if isinstance(value, ast.Name):
                        functions |= self.named(path, value.id)
        return frozenset(functions)

    def below(self, path: str, node: ast.AST, *, sure: bool = True) -> frozenset[Function]:
        """Return the functions that a node may call, directly or through others."""
        key = (id(node), sure)
        if key in self._below:
            return self._below[key]
        reached: set[Function] = set()
        remaining = set(self.direct(path, node, sure=sure))
        while remaining:
            function = remaining.pop()
            if function not in reached:
                reached.add(function)
                remaining |= self.of_function(function, sure=sure) - reached
        self._below[key] = frozenset(reached)
        return self._below[key]

    def of_function(self, function: Function, *, sure: bool) -> frozenset[Function]:
        """Return the functions that a function may call directly."""
        key = (function, sure)
        if key not in self._direct:
            bodies = self.bodies[function]
            parts = (self.direct(function[0], body, sure=sure) for body in bodies)
            self._direct[key] = frozenset[Function]().union(*parts)
        return self._direct[key]

    def start_from(self, script: str, tree: ast.Module) -> frozenset[Function]:
        """Return the functions that the script reaches; note those reached outside all loops."""
        alone: set[Function] = set()
        remaining = set(self.direct(script, tree, sure=True, loops=False))
        while remaining:
            function = remaining.pop()
            if function not in alone:
                alone.add(function)
                for body in self.bodies[function]:
                    remaining |= self.direct(function[0], body, sure=True, loops=False) - alone
        self.called_alone = frozenset(alone)
        return self.below(script, tree, sure=False)

    def training(self, path: str, node: ast.AST) -> int:
        """Return how much a node trains, calls into the program's functions followed."""
        below = self.below(path, node, sure=False)
        return max([_weight(node), *(self._weight_of(function) for function in below)])

    def _weight_of(self, function: Function) -> int:
        if function not in self._weights:
            self._weights[function] = max(map(_weight, self.bodies[function]))
        return self._weights[function]


def _is_module(path: str, module: str) -> bool:
    """Return True if a file may be the module that an import names.

    >>> _is_module("mingpt/trainer.py", "mingpt.trainer"), _is_module("a/b.py", ".b"), _is_module("a.py", "b")
    (True, True, False)
    """
    file = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    name = module.strip(".")
    return file == name or file.endswith(f".{name}") or name.endswith(f".{file}")


def _weight(node: ast.AST) -> int:
    return sum(TRAINS.get(name, 0) for name in {called_name(call) for call in _calls_below(node)})


def _calls_below(node: ast.AST, *, loops: bool = True) -> Iterator[ast.Call]:
    """Yield the calls that run with a node: not those of functions that it defines."""
    remaining = list(ast.iter_child_nodes(node))
    while remaining:
        part = remaining.pop()
        if isinstance(part, ast.Call):
            yield part
        if not isinstance(part, FUNCTIONS) and (loops or not isinstance(part, LOOPS)):
            remaining.extend(ast.iter_child_nodes(part))


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """What trains in a program: a loop of its own, a call into a library, or neither."""

    loop: LoopSpot | None
    call: LibraryCall | None = None
    """The library's call that trains, in the loop if there is one."""
    sure: bool = True
    """Whether the text shows that it trains; if not, it is only the longest loop."""


def choose_main_loop(
    script: str,
    spots: Sequence[LoopSpot],
    trees: Mapping[str, ast.Module],
    library: Sequence[LibraryCall],
    calls: Calls,
) -> TrainingLoop:
    """Return what trains: the outermost loop around the training steps, or a library's call."""
    reached = calls.start_from(script, trees[script]) if script in trees else frozenset()
    runs = [spot for spot in spots if spot.watched and _runs(spot, script, reached)]
    scores = {
        spot.id: calls.training(spot.id.path, spot.node) * (1.0 if spot in runs else _UNREACHED)
        for spot in spots
        if spot.watched
    }
    # prefer outer loops, then loops of the script itself
    ranked = [
        (scores[spot.id] / spot.depth * (_OWN if spot.id.path == script else 1), spot)
        for spot in spots
        if spot.watched and scores[spot.id]
    ]
    most, best = max(ranked, key=lambda item: item[0], default=(0.0, None))
    watched_call = _call_that_trains(script, library)
    if best is not None and scores[best.id] >= SURE:
        outer = _outermost(best, runs, calls)
        around = next((c for c in library if c.library == "Optuna" and c.watched), None)
        if around is not None and best.id.function != MODULE:
            return TrainingLoop(None, around)
        return TrainingLoop(outer)
    if watched_call is not None:
        return TrainingLoop(_loop_around(watched_call, runs, trees, calls), watched_call)
    if best is not None:
        return TrainingLoop(_outermost(best, runs, calls), sure=most >= 1)
    outer_loops = [spot for spot in spots if spot.depth == 1 and spot.watched]
    longest = max(
        outer_loops,
        key=lambda spot: (spot.id.path == script, _lines(spot.node)),
        default=None,
    )
    return TrainingLoop(longest, sure=False)


def _lines(loop: Loop) -> int:
    return (loop.end_lineno or loop.lineno) - loop.lineno


def _runs(spot: LoopSpot, script: str, reached: frozenset[Function]) -> bool:
    """Return True if the script seems to run a loop."""
    path, function = spot.id.path, spot.id.function
    if function == MODULE:
        return path == script
    return (path, function.rpartition(".")[2]) in reached


def _call_that_trains(script: str, library: Sequence[LibraryCall]) -> LibraryCall | None:
    """Return the watched call of the script itself, or else of another file."""
    watched = [call for call in library if call.watched]
    return min(
        watched, key=lambda call: (call.library != "Optuna", call.path != script), default=None
    )


def _loop_around(
    call: LibraryCall, spots: Sequence[LoopSpot], trees: Mapping[str, ast.Module], calls: Calls
) -> LoopSpot | None:
    """Return the outermost loop of the program that a library's call is made in."""
    inside = [
        spot
        for spot in spots
        if spot.watched
        and spot.id.path == call.path
        and spot.node.lineno < call.line <= (spot.node.end_lineno or 0)
    ]
    if inside:
        return _outermost(min(inside, key=lambda spot: spot.depth), spots, calls)
    holder = _function_around(trees[call.path], call.line)
    if holder is None:
        return None
    function = (call.path, holder)
    around = [spot for spot in spots if _calls(spot, function, calls)]
    return _outermost(around[0], spots, calls) if around else None


def _function_around(tree: ast.Module, line: int) -> str | None:
    """Return the name of the innermost function that a line is in; None at the top of a file."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno).name if around else None


def _outermost(spot: LoopSpot, spots: Sequence[LoopSpot], calls: Calls) -> LoopSpot:
    """Return the outermost watched loop that a loop runs in, in its own function or through calls."""
    current, seen = spot, {spot.id}
    while True:
        around = [
            other for other in spots if other.id not in seen and _contains(other, current, calls)
        ]
        if _function(current) in calls.called_alone and _has_inner(current, spots, calls):
            # it is entered without a loop around it, too: `for g in grid: train()`, or just `train()`
            around = [other for other in around if _function(other) == _function(current)]
        if not around:
            return current
        current = min(around, key=lambda other: (other.depth, other.node.lineno))
        seen.add(current.id)


def _function(spot: LoopSpot) -> Function:
    return spot.id.path, spot.id.function.rpartition(".")[2]


def _has_inner(spot: LoopSpot, spots: Sequence[LoopSpot], calls: Calls) -> bool:
    return any(other.id != spot.id and _contains(spot, other, calls) for other in spots)


def _contains(outer: LoopSpot, inner: LoopSpot, calls: Calls) -> bool:
    same = outer.id.path == inner.id.path
    if same and outer.id.function == inner.id.function:
        return outer.node.lineno < inner.node.lineno <= (outer.node.end_lineno or 0)
    if inner.id.function == MODULE:
        return False
    return _calls(outer, _function(inner), calls)


def _calls(loop: LoopSpot, function: Function, calls: Calls) -> bool:
    return _function(loop) != function and function in calls.below(loop.id.path, loop.node)
