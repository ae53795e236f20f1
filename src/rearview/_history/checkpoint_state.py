"""The state of a run at a checkpoint: variables by name, read without running the program."""

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
from rearview.model.wording import number_or_text

if TYPE_CHECKING:
    from rearview.state.read_checkpoint_variables import Variables
    from rearview.store.checkpoints.checkpoints import LoadedCheckpoint

_log = logging.getLogger("rearview")

LoopValues = Mapping[str, Any]
"""Loop -> value of the loop variable, for example `{"epoch": 3, "step": 20}`; the outermost loop is first."""


class PastState(Mapping[str, Any]):
    """The variables of a run at a checkpoint, by name: `state["main.model"]`, or `state["model"]` if that is unique.

    A torch module is returned as a mapping like its `state_dict()`, an optimizer or scheduler as its
    `state_dict()`, and any other object as a mapping of its attributes. A variable is read on first access.
    `missing` names the variables that cannot be read, and why.
    """

    def __init__(
        self, run: str, checkpoint: Checkpoint, loaded: LoadedCheckpoint, *, exact: bool
    ) -> None:
        self.run = run
        self.checkpoint = checkpoint
        self.point = str(checkpoint.point)
        self.edge = checkpoint.edge
        """`start` if the checkpoint was saved before the iteration `point`; `end` if after the loop of `point`."""
        self.exact = exact
        """Whether the checkpoint is at the requested point; if not, it is the checkpoint nearest to that point."""
        self._loaded = loaded

    @cached_property
    def _variables(self) -> Variables:
        # `Variables` reads the state as data and runs no code from it; see docs/decisions/state-as-data.md
        from rearview.state.read_checkpoint_variables import Variables

        anchors = msgspec.json.decode(self._loaded["anchors"])
        signature = [str(name) for name in anchors.get("signature", ())]
        return Variables(bytes(self._loaded["skeleton"]), signature, self._loaded.__getitem__)

    @cached_property
    def missing(self) -> dict[str, str]:
        """Name of each variable that cannot be read without running the program -> the reason."""
        variables = self._variables
        reasons = {name: variables.reason(name) for name in variables.roots}
        return {name: reason for name, reason in reasons.items() if reason}

    def __getitem__(self, name: str) -> Any:
        """Return the value of the variable `name`: a full name such as `main.model`, or its last part if unique."""
        variables = self._variables
        full = [name] if name in variables.roots else _ending(name, variables.roots)
        if len(full) == 1:
            if full[0] in self.missing:
                raise KeyError(f"{full[0]} cannot be read: {self.missing[full[0]]}")
            return variables.value(full[0])
        if full:
            raise KeyError(f"{name} is the name of several variables: {', '.join(full)}")
        near = get_close_matches(name, variables.roots, n=3) or list(self)[:8]
        raise KeyError(f"There is no variable {name} at {self.where}. There are: {', '.join(near)}")

    def __contains__(self, name: object) -> bool:
        return any(name == full or full.endswith(f".{name}") for full in self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._variables.roots if name not in self.missing)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def where(self) -> str:
        """The point of the checkpoint as text: `the start of epoch=3`."""
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
    """A run whose state and logged values can be read at any point."""

    __slots__ = ("_at", "_value")

    _at: Callable[..., PastState]
    _value: Callable[..., Any]

    def at(self, point: str = "", /, *, end: bool = False, **loops: Any) -> PastState:
        """Return the variables of this run at the checkpoint nearest to `point` or `loops`: `at(epoch=3)`.

        See `History.at`.
        """
        return self._at(self.id, point, end=end, **loops)

    def value(self, name: str, point: str = "", /, **loops: Any) -> Any:
        """Return the value that this run logged under `name` at `point` or `loops`: `value("w", epoch=3)`."""
        return self._value(self.id, name, point, **loops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and _facts(self) == _facts(other)

    __hash__ = Run.__hash__


def _facts(run: Run) -> tuple[Any, ...]:
    return tuple(getattr(run, name) for name in Run.__dataclass_fields__)


def with_history(run: Run, at: Callable[..., PastState], value: Callable[..., Any]) -> PastRun:
    """Return a copy of `run` whose methods `at` and `value` call the functions `at` and `value`."""
    past = PastRun(*_facts(run))
    object.__setattr__(past, "_at", at)
    object.__setattr__(past, "_value", value)
    return past


def parse_point(point: str, loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return loop -> value, from the text `point` such as `epoch=3/step=20`, from `loops`, or from both.

    >>> parse_point("epoch=3/step=20", {}), parse_point("", {"epoch": 3})
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
        value = number_or_text(text)
        out[loop] = value.strip("'\"") if isinstance(value, str) else value
    return {**out, **loops}


def nearest(
    run: str, checkpoints: Iterable[Checkpoint], point: LoopValues, *, end: bool
) -> tuple[Checkpoint, bool]:
    """Return (checkpoint, True) if there is a checkpoint at `point`, else (nearest checkpoint, False).

    The nearest is the last checkpoint before the point, or the first if all are after the point. With `end`, the
    point is the end of the iteration, else its start. If `point` is empty, the result is (last checkpoint, True).
    Raise if the run has no checkpoint in the loops of `point`.
    """
    all_checkpoints = list(checkpoints)
    if not all_checkpoints:
        raise UsageError(
            f"Run {run} has no checkpoint, so its state cannot be read. `rearview show {run}` says "
            "what it recorded.",
            slug="no-checkpoint",
        )
    if not point:
        return all_checkpoints[-1], True
    if CELL not in point:
        first = next(iter(point))
        cells = {
            checkpoint.point.steps[0].label
            for checkpoint in all_checkpoints
            if checkpoint.point.loops[:1] == (CELL,)
            and columns_of(checkpoint.point.loops)[1:2] == [first]
        }
        # if only one cell of a notebook has the loop `first`, the point is in this cell
        if len(cells) == 1:
            point = {CELL: cells.pop(), **point}
    names = list(point)
    inside = [
        checkpoint
        for checkpoint in all_checkpoints
        if columns_of(checkpoint.point.loops)[: len(names)] == names
    ]
    outer = [
        checkpoint
        for checkpoint in all_checkpoints
        if columns_of(checkpoint.point.loops) == names[: len(checkpoint.point.steps)]
    ]
    matching = {*map(id, inside), *map(id, outer)}
    fitting = [
        checkpoint
        for checkpoint in all_checkpoints
        if id(checkpoint) in matching and checkpoint.point.steps
    ]
    if not fitting:
        loops = {
            "/".join(columns_of(checkpoint.point.loops))
            for checkpoint in all_checkpoints
            if checkpoint.point.steps
        }
        raise UsageError(
            f"Run {run} has no checkpoint in {'/'.join(names)}. It has checkpoints "
            f"in {', '.join(sorted(loops)) or 'no loop'}; name the loops from the outermost on.",
            slug="no-point",
        )
    goal = [_index(run, fitting, depth, point[name]) for depth, name in enumerate(names)]
    if end:
        goal[-1] += 1
    exact = [checkpoint for checkpoint in fitting if _is_at(checkpoint, goal)]
    if exact:
        return exact[0], True
    before = [checkpoint for checkpoint in fitting if list(checkpoint.point.indices) <= goal]
    return (before[-1] if before else fitting[0]), False


def _is_at(checkpoint: Checkpoint, goal: list[int]) -> bool:
    """Return True if a checkpoint is at the start of the iteration `goal` (an index per loop, outermost first).

    The start of the first iteration of a loop inside that iteration counts too.
    """
    indices = list(checkpoint.point.indices)
    same_iteration = indices[: len(goal)] == goal and not any(indices[len(goal) :])
    return same_iteration and checkpoint.edge == "start"


def _index(run: str, checkpoints: Iterable[Checkpoint], depth: int, value: Any) -> int:
    """Return the index of the iteration in which the loop at `depth` had `value`, as far as `checkpoints` tell.

    Raise if the checkpoints do not tell.
    """
    steps = [
        checkpoint.point.steps[depth]
        for checkpoint in checkpoints
        if len(checkpoint.point.steps) > depth
    ]
    valued = [step for step in steps if step.value is not None]
    for step in valued:
        if step.value == value:
            return step.index
    if isinstance(value, int) and not valued:
        return value
    shifts = {step.value - step.index for step in valued if isinstance(step.value, int)}
    if isinstance(value, int) and len(shifts) == 1 and all(type(s.value) is int for s in valued):
        return max(0, value - shifts.pop())
    known_steps = ", ".join(dict.fromkeys(str(step) for step in steps)) or "none"
    raise UsageError(
        f"The checkpoints of run {run} do not say in which iteration the loop has the value "
        f"{value!r}. They have: {known_steps}.",
        slug="no-point",
    )


def warn_if_not_exact(state: PastState, requested: LoopValues) -> None:
    """Log a warning if `state` is not exactly at the point `requested`."""
    if not state.exact:
        point = "/".join(f"{loop}={value}" for loop, value in requested.items())
        _log.warning(
            "There is no checkpoint at %s in run %s; this is the nearest, at %s.",
            *(point, state.run, state.where),
        )
