"""Choose the loop of a program that trains: its main loop, the outermost one around the training steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rearview.source.library_loops import LibraryCall, Origins
from rearview.source.loops import FUNCTIONS, MODULE, Loop, LoopId, called_name

TRAINS = {
    "backward": 4, "step": 3, "zero_grad": 3, "partial_fit": 3, "train_on_batch": 3, "boost": 2,
    "update": 2, "apply_gradients": 3, "apply_updates": 3, "train_step": 3, "training_step": 3,
    "manual_backward": 4, "value_and_grad": 3, "train": 1, "fit": 1,
}  # fmt: skip
"""Calls that training loops make, each with its weight when the main loop is chosen."""
SURE = 3
"""Weight from which a loop is taken for one that trains."""
_UNREACHED = 0.5
"""Factor for a loop in a function that the script does not seem to call."""
_DEEPEST = 4
"""Calls that are followed into functions of the program."""
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


class Calls:
    """Which functions of a program the code below a node may call, by their last names."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.origins = Origins(trees)
        self.bodies: dict[str, list[ast.AST]] = {}
        self._home: dict[int, str] = {}
        self._below: dict[tuple[str, bool], frozenset[str]] = {}
        for path, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, FUNCTIONS):
                    self.bodies.setdefault(node.name, []).append(node)
                    self._home[id(node)] = path

    def direct(self, path: str, node: ast.AST, *, sure: bool) -> set[str]:
        """Return the functions that are called in a node, or handed to a call in it.

        With `sure`, calls of methods count only if the text shows whose method it is, or if the name is
        an unusual one.
        """
        names: set[str] = set()
        for part in _executed(node):
            if not isinstance(part, ast.Call):
                continue
            name = called_name(part)
            if name in self.bodies and (not sure or self._shown(path, part, name)):
                names.add(name)
            values = (*part.args, *(keyword.value for keyword in part.keywords))
            names |= {
                value.id
                for value in values
                if isinstance(value, ast.Name) and value.id in self.bodies
            }
        return names

    def _shown(self, path: str, call: ast.Call, name: str) -> bool:
        if not isinstance(call.func, ast.Attribute) or name not in _SHARED_NAMES:
            return True
        receiver = ast.unparse(call.func.value)
        if receiver == "self" or receiver in self.origins.imports.get(path, {}):
            return True
        own = self.origins.project_class(path, receiver)
        return own is not None and any(getattr(part, "name", "") == name for part in own.body)

    def below(self, path: str, node: ast.AST, *, sure: bool = True) -> frozenset[str]:
        """Return the functions that a node may call, directly or through others."""
        reached: set[str] = set()
        remaining = self.direct(path, node, sure=sure)
        while remaining:
            name = remaining.pop()
            if name not in reached:
                reached.add(name)
                remaining |= self._called_by(name, sure=sure) - reached
        return frozenset(reached)

    def _called_by(self, name: str, *, sure: bool) -> frozenset[str]:
        key = (name, sure)
        if key not in self._below:
            bodies = self.bodies[name]
            self._below[key] = frozenset().union(
                *(self.direct(self._home[id(body)], body, sure=sure) for body in bodies)
            )
        return self._below[key]


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node that run with it: not those of functions that it defines."""
    remaining = list(ast.iter_child_nodes(node))
    while remaining:
        part = remaining.pop()
        yield part
        if not isinstance(part, FUNCTIONS):
            remaining.extend(ast.iter_child_nodes(part))


@dataclass(frozen=True, slots=True)
class MainLoop:
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
) -> MainLoop:
    """Return what trains: the outermost loop around the training steps, or a library's call."""
    reached = calls.below(script, trees[script], sure=False) if script in trees else frozenset()
    scores: dict[LoopId, float] = {}
    for spot in spots:
        score = float(_training(spot.node, calls.bodies, frozenset()))
        function = spot.id.function
        called = function == MODULE or function.rpartition(".")[2] in reached
        scores[spot.id] = score * (1 if called else _UNREACHED)
    # prefer outer loops, then loops of the script itself
    ranked = [
        (scores[spot.id] / spot.depth + 0.1 * (spot.id.path == script), spot)
        for spot in spots
        if spot.watched and scores[spot.id]
    ]
    most, best = max(ranked, key=lambda item: item[0], default=(0.0, None))
    watched_call = _call_that_trains(script, library)
    if best is not None and scores[best.id] >= SURE:
        outer = _outermost(best, spots, calls)
        around = next((c for c in library if c.library == "Optuna" and c.watched), None)
        if around is not None and best.id.function != MODULE:
            return MainLoop(None, around)
        return MainLoop(outer)
    if watched_call is not None:
        return MainLoop(_loop_around(watched_call, spots, trees, calls), watched_call)
    if best is not None:
        return MainLoop(_outermost(best, spots, calls), sure=most >= 1)
    outer_loops = [spot for spot in spots if spot.depth == 1 and spot.watched]
    longest = max(
        outer_loops,
        key=lambda spot: (spot.id.path == script, _lines(spot.node)),
        default=None,
    )
    return MainLoop(longest, sure=False)


def _lines(loop: Loop) -> int:
    return (loop.end_lineno or loop.lineno) - loop.lineno


def _training(
    node: ast.AST, bodies: Mapping[str, list[ast.AST]], seen: frozenset[str], depth: int = 0
) -> int:
    """Return how much a node trains, calls into the program's functions followed."""
    called = {called_name(part) for part in ast.walk(node)} - {""}
    score = sum(TRAINS.get(name, 0) for name in called)
    if depth < _DEEPEST:
        for name in called & bodies.keys() - seen:
            inside = (_training(body, bodies, seen | {name}, depth + 1) for body in bodies[name])
            score = max(score, *inside)
    return score


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
    return next((s for s in spots if s.watched and _calls(s, holder, calls)), None)


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
            other
            for other in spots
            if other.watched and other.id not in seen and _contains(other, current, calls)
        ]
        if not around:
            return current
        current = min(around, key=lambda other: (other.depth, other.node.lineno))
        seen.add(current.id)


def _contains(outer: LoopSpot, inner: LoopSpot, calls: Calls) -> bool:
    same = outer.id.path == inner.id.path
    if same and outer.id.function == inner.id.function:
        return outer.node.lineno < inner.node.lineno <= (outer.node.end_lineno or 0)
    if inner.id.function == MODULE:
        return False
    return _calls(outer, inner.id.function.rpartition(".")[2], calls)


def _calls(loop: LoopSpot, function: str, calls: Calls) -> bool:
    own = loop.id.function.rpartition(".")[2]
    return own != function and function in calls.below(loop.id.path, loop.node)
