"""The state that a run had at a checkpoint: variables by name, read without running the program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from rearview.errors import UsageError
from rearview.model import Checkpoint, Run
from rearview.model.run import CELL, columns_of

if TYPE_CHECKING:
    from rearview.state.variables import Variables
    from rearview.store.checkpoints.checkpoints import LoadedCheckpoint

_log = logging.getLogger("rearview")

Asked = Mapping[str, Any]
"""A value for each loop, outermost first."""


class PastState(Mapping[str, Any]):
    """The variables of a run at a checkpoint: `state["main.model"]`, or `state["model"]` if only one.

    A torch module is a mapping like its `state_dict()`, an optimizer or scheduler like what its
    `state_dict()` returns, any other object a mapping of its attributes. Each variable is read when
    it is asked for. `missing` says what cannot be given, and why.
    """

    def __init__(
        self, run: str, checkpoint: Checkpoint, loaded: LoadedCheckpoint, *, exact: bool
    ) -> None:
        self.run = run
        self.checkpoint = checkpoint
        self.point = str(checkpoint.point)
        self.edge = checkpoint.edge
        """`start`: before that iteration; `end`: after its loop."""
        self.exact = exact
        """Whether this is the point that was asked for, not only the nearest."""
        self._loaded = loaded

    @cached_property
    def _variables(self) -> Variables:
        # the one part of the runtime that reads a state as data; see docs/decisions/state-as-data.md
        from rearview.state.variables import Variables

        anchors = msgspec.json.decode(self._loaded["anchors"])
        signature = [str(one) for one in anchors.get("signature", ())]
        return Variables(bytes(self._loaded["skeleton"]), signature, self._loaded.__getitem__)

    @cached_property
    def missing(self) -> dict[str, str]:
        """Why each variable that is not here cannot be given without running the program."""
        found = self._variables
        reasons = {name: found.reason(name) for name in found.roots}
        return {name: reason for name, reason in reasons.items() if reason}

    def __getitem__(self, name: str) -> Any:
        """Return the value of a variable by its full name, or by its last part if that is unique."""
        found = self._variables
        full = [name] if name in found.roots else _ending(name, found.roots)
        if len(full) == 1:
            if full[0] in self.missing:
                raise KeyError(f"{full[0]} cannot be given: {self.missing[full[0]]}")
            return found.value(full[0])
        if full:
            raise KeyError(f"{name} is several variables: {', '.join(full)}")
        near = get_close_matches(name, found.roots, n=3) or list(self)[:8]
        raise KeyError(f"{name} is no variable at {self.where}. There are: {', '.join(near)}")

    def __contains__(self, name: object) -> bool:
        return any(name == full or full.endswith(f".{name}") for full in self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._variables.roots if name not in self.missing)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def where(self) -> str:
        """The place in words: `the start of epoch=3`."""
        if not self.point:
            return "the start of the run" if self.edge == "start" else "the end of the run"
        if self.edge == "start":
            return f"the start of {self.point}"
        return f"the end of the loop, {self.point}"

    def __repr__(self) -> str:
        nearest = "" if self.exact else " (the nearest checkpoint)"
        return f"<State of run {self.run} at {self.where}{nearest}: {', '.join(self) or 'nothing'}>"


def _ending(name: str, names: Iterable[str]) -> list[str]:
    return [full for full in names if full.endswith(f".{name}")]


class PastRun(Run):
    """A run of a history: its facts, and its state and values at any point."""

    __slots__ = ("_at", "_value")

    _at: Callable[..., PastState]
    _value: Callable[..., Any]

    def at(self, point: str = "", /, *, end: bool = False, **loops: Any) -> PastState:
        """Return its variables at the checkpoint nearest to a point: `at(epoch=3)`.

        See `History.at`.
        """
        return self._at(self.id, point, end=end, **loops)

    def value(self, name: str, point: str = "", /, **loops: Any) -> Any:
        """Return the value that it logged under a name at a point: `value("w", epoch=3)`."""
        return self._value(self.id, name, point, **loops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and _facts(self) == _facts(other)

    __hash__ = Run.__hash__


def _facts(run: Run) -> tuple[Any, ...]:
    return tuple(getattr(run, name) for name in Run.__dataclass_fields__)


def of_history(run: Run, at: Callable[..., PastState], value: Callable[..., Any]) -> PastRun:
    """Return a run that can be asked for its state and its values."""
    past = PastRun(*_facts(run))
    object.__setattr__(past, "_at", at)
    object.__setattr__(past, "_value", value)
    return past


def asked_point(point: str, loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each loop, from a text such as `epoch=3/step=20`, from names, or both.

    >>> asked_point("epoch=3/step=20", {}), asked_point("", {"epoch": 3})
    ({'epoch': 3, 'step': 20}, {'epoch': 3})
    """
    out: dict[str, Any] = {}
    for part in filter(None, point.split("/")):
        loop, equals, text = part.partition("=")
        if not equals or not loop or not text:
            raise UsageError(
                f"{point!r} is no point. Write the value of each loop: epoch=3 or epoch=3/step=20.",
                slug="no-point",
            )
        out[loop] = _number(text)
    return {**out, **loops}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


def nearest(
    run: str, checkpoints: Iterable[Checkpoint], asked: Asked, *, end: bool
) -> tuple[Checkpoint, bool]:
    """Return the checkpoint at a point, and True; or else the nearest one, and False.

    The nearest is the last before the point, or the first one if all are after it. `end` means the
    end of that iteration, not its start. Without a point: the last checkpoint.
    """
    found = list(checkpoints)
    if not found:
        raise UsageError(
            f"Run {run} has no checkpoint, so there is no state of it. `rearview show {run}` says what "
            "it recorded.",
            slug="no-checkpoint",
        )
    if not asked:
        return found[-1], True
    if CELL not in asked:
        first = next(iter(asked))
        cells = {
            one.point.steps[0].shown
            for one in found
            if one.point.loops[:1] == (CELL,) and columns_of(one.point.loops)[1:2] == [first]
        }
        if len(cells) == 1:  # of a notebook, where one cell has that loop
            asked = {CELL: cells.pop(), **asked}
    names = list(asked)
    inside = [one for one in found if columns_of(one.point.loops)[: len(names)] == names]
    outer = [one for one in found if columns_of(one.point.loops) == names[: len(one.point.steps)]]
    known = sorted({*map(id, inside), *map(id, outer)})
    fitting = [one for one in found if id(one) in set(known) and one.point.steps]
    if not fitting:
        loops = {"/".join(columns_of(one.point.loops)) for one in found if one.point.steps}
        raise UsageError(
            f"Run {run} has no checkpoint in {'/'.join(names)}. It has some in "
            f"{', '.join(sorted(loops)) or 'no loop'}; name the loops from the outermost on.",
            slug="no-point",
        )
    goal = [_index(run, fitting, depth, asked[name]) for depth, name in enumerate(names)]
    if end:
        goal[-1] += 1
    exact = [one for one in fitting if _is_at(one, goal)]
    if exact:
        return exact[0], True
    before = [one for one in fitting if list(one.point.indices) <= goal]
    return (before[-1] if before else fitting[0]), False


def _is_at(checkpoint: Checkpoint, goal: list[int]) -> bool:
    """Return True for the start of an iteration; the first of a loop inside begins with it."""
    indices = list(checkpoint.point.indices)
    here = indices[: len(goal)] == goal and not any(indices[len(goal) :])
    return here and checkpoint.edge == "start"


def _index(run: str, checkpoints: Iterable[Checkpoint], depth: int, value: Any) -> int:
    """Return the number of the iteration at which a loop has that value."""
    steps = [one.point.steps[depth] for one in checkpoints if len(one.point.steps) > depth]
    valued = [step for step in steps if step.value is not None]
    for step in valued:
        if step.value == value:
            return step.index
    if isinstance(value, int) and not valued:
        return value
    shifts = {step.value - step.index for step in valued if isinstance(step.value, int)}
    if isinstance(value, int) and len(shifts) == 1 and all(type(s.value) is int for s in valued):
        return max(0, value - shifts.pop())
    there = ", ".join(dict.fromkeys(str(step) for step in steps)) or "none"
    raise UsageError(
        f"Where the loop has the value {value!r} is not known from the checkpoints of run {run}. "
        f"There are: {there}.",
        slug="no-point",
    )


def tell_nearest(state: PastState, asked: Asked) -> None:
    """Warn that another point than the one asked for is given."""
    if not state.exact:
        point = "/".join(f"{loop}={value}" for loop, value in asked.items())
        _log.warning(
            "There is no checkpoint at %s in run %s; this is the nearest, at %s.",
            *(point, state.run, state.where),
        )
