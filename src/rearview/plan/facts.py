"""The input of the planner: facts about each run, and the values that are requested of it.

`At` selects iterations of a loop. Users write selections as `epoch=3`, `epoch=3:5`, `epoch=3/step=10:20`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rearview.errors import UsageError
from rearview.model import Edge, Point
from rearview.model.wording import number_or_text

_VALUE = r"""("[^"]*"|'[^']*'|[^\s:=/"']*)"""
_FORM = re.compile(rf"\s*([^\s=:/]+)\s*=\s*{_VALUE}\s*(?:(:)\s*{_VALUE}\s*)?")
_PARTS = re.compile(r"""((?:"[^"]*"|'[^']*'|[^/])*)(?:/|\Z)""")


@dataclass(frozen=True, slots=True)
class At:
    """A selection of iterations of one loop: `first <= value < last`, as in a slice.

    `value` is the value of the loop's target variable in an iteration, because users know iterations by these values.
    If `first` or `last` is None, the selection has no limit on that side.
    """

    loop: str
    first: float | str | None = None
    last: float | str | None = None
    single: bool = False
    """Whether only the iteration with the value `first` is selected; `last` is then None."""

    def indices(self, count: int, values: Sequence[float | str] | None = None) -> list[int]:
        """Return the indices of the selected iterations of a loop with `count` iterations.

        `values` are the values of the loop's target variable; None means that they are the indices.

        >>> At("epoch", 1, 3).indices(10)
        [1, 2]
        >>> At("epoch", 1, 3).indices(3, values=[1, 2, 3])
        [0, 1]
        """
        if values is None:
            if self.single:
                return [i for i in range(count) if i == self.first]
            if isinstance(self.first, str) or isinstance(self.last, str):
                return []
            low = 0 if self.first is None else max(0, int(-(-self.first // 1)))
            high = count if self.last is None else min(count, int(-(-self.last // 1)))
            return list(range(low, high))
        if self.single:
            # if the loop's values are texts, `first` may be a text that was parsed as a number
            accepted = {self.first, str(self.first)}
            return [i for i in range(count) if values[i] in accepted]
        return [i for i in range(count) if self._within(values[i])]

    def _within(self, value: float | str) -> bool:
        for bound, below in ((self.first, False), (self.last, True)):
            if bound is None:
                continue
            if isinstance(bound, str) != isinstance(value, str):
                return False
            if below and not value < bound:  # type: ignore[operator]
                return False
            if not below and value < bound:  # type: ignore[operator]
                return False
        return True

    def __str__(self) -> str:
        if self.single:
            return f"{self.loop}={self.first}"
        first = "" if self.first is None else self.first
        return f"{self.loop}={first}:{'' if self.last is None else self.last}"


def parse_at(text: str) -> tuple[At, ...]:
    """Return the selections of iterations that a user wrote, outermost loop first.

    Raise UsageError if the text has another form. The end of a range is not included, as in slices.

    >>> parse_at("epoch=3:5")
    (At(loop='epoch', first=3, last=5, single=False),)
    >>> [str(at) for at in parse_at("epoch=3/step=10:")]
    ['epoch=3', 'step=10:']
    >>> parse_at("file='a/b.txt'")[0].first
    'a/b.txt'
    """
    selections: list[At] = []
    for part in _split(text):
        match = _FORM.fullmatch(part)
        if match is None or (not match[2] and not match[3]):
            raise UsageError(
                f"{text!r} does not say which iterations: {part!r} is not `loop=number`, "
                f"`loop=first:last`, `loop=first:` or `loop=:last`. "
                f"Write for example `epoch=3:5` or `epoch=3/step=10:20`; the last is not included. "
                f"Put a text with one of `:/=` or a space into quotes: `file='a/b.txt'`.",
                slug="at-form",
            )
        first, last = _value(match[2]), _value(match[4] or "")
        numbers = isinstance(first, int | float) and isinstance(last, int | float)
        if match[3] and numbers and not first < last:  # type: ignore[operator]
            raise UsageError(
                f"{part.strip()!r} is empty: ranges end before their last number, as slices "
                f"do. For iteration {first} alone write `{match[1]}={match[2]}`.",
                slug="at-empty",
            )
        selections.append(At(match[1], first, last, single=not match[3]))
    names = [at.loop for at in selections]
    if len(set(names)) < len(names):
        raise UsageError(
            f"{text!r} names a loop twice. Name each loop once, outermost first.",
            slug="at-form",
        )
    return tuple(selections)


def _split(text: str) -> list[str]:
    """Return the parts of `text` between slashes; a slash in quotes separates nothing.

    >>> _split("a=1/b='x/y'")
    ['a=1', "b='x/y'"]
    """
    parts = [match[1] for match in _PARTS.finditer(text)]
    return parts[:-1] if len(parts) > 1 and not text.endswith("/") else parts


def _value(text: str) -> float | str | None:
    if not text:
        return None
    if text[0] in "\"'":
        return text[1:-1]
    return number_or_text(text)


TargetValue = float | str
EVERY_ITERATION = range(1 << 62)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, with its measured speed."""

    name: str
    """Name of the hardware: two machines with equal hardware have equal names."""
    kernels: Mapping[str, float] = field(default_factory=dict)
    """Name of a standard computation -> its seconds on this machine; empty if the machine was never measured."""
    read: float = 0.0
    """Disk reading speed in MB/s; 0 if it was not measured."""
    write: float = 0.0
    """Disk writing speed in MB/s."""
    host: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Facts for the planner about a checkpoint."""

    id: str
    point: Point
    edge: Edge = Edge.START
    complete: bool = True
    nbytes: int = 0
    """Bytes that a replay reads to restore the checkpoint right after the previous checkpoint."""
    restore: float | None = None
    """Measured seconds to load and restore the checkpoint; None means that they are predicted from its size."""


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """Facts for the planner about the outermost loop of a run, or about a loop directly inside that loop."""

    name: str
    """The id of the loop; two loops may have equal names, but not equal ids."""
    seconds: Sequence[float]
    """Item i, for the outermost loop: seconds of its iteration i. For an inner loop: seconds of the whole inner loop
    in iteration i of the outermost loop.
    """
    counts: Sequence[int] = ()
    """For an inner loop, item i: number of its iterations in iteration i of the outermost loop."""
    values: Sequence[TargetValue] | None = None
    """The value of the loop's target variable in each iteration; None if the values are the indices."""
    counted: range = EVERY_ITERATION
    """Iterations of the outermost loop for which `counts` was measured; for all others, `counts` is a guess."""
    varied: bool = False
    """Whether the target variable had different values each time the loop was entered; then `values` cannot be used to
    select iterations.
    """


@dataclass(frozen=True, slots=True)
class DeepFacts:
    """Facts for the planner about a loop that is inside two or more other loops."""

    counts: Sequence[int]
    """Item i: number of iterations of the loop in iteration i of the outermost loop, over all times it was entered."""
    counted: range = EVERY_ITERATION
    """Iterations of the outermost loop for which `counts` was measured; for all others, `counts` is a guess."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts for the planner about a run."""

    run: str
    version: str
    """Id of the version that replays execute: the source of the run with the probes inserted."""
    loops: tuple[LoopFacts, ...] = ()
    """The outermost loop, then the loops directly inside it, in the order of execution."""
    deep: Mapping[tuple[str, ...], DeepFacts] = field(default_factory=dict)
    """Loop path without the outermost loop -> facts about the innermost loop of the path, for paths of three or more
    loops. In runs of older versions of Rearview, these paths consist of names, not of ids.
    """
    start: float = 0.0
    """Seconds that a replay takes from the start of its process until the program begins."""
    setup: float = 0.0
    """Seconds from the beginning of the program until it enters the outermost loop."""
    after: float = 0.0
    """Seconds from the end of the outermost loop to the end of the program."""
    shareable: float = 0.0
    """Seconds of `start` and `setup` that are spent only once for all segments of the run, because their processes are
    forked from a process that has already done the imports.
    """
    checkpoints: tuple[CheckpointFacts, ...] = ()
    finished: bool = True
    machine: Machine | None = None
    blocked: str = ""
    """Reason why the run cannot be replayed, such as a missing package; empty if it can."""
    priority: float = 0.0
    """Runs with smaller values are replayed first."""


@dataclass(frozen=True, slots=True)
class InnerIterations:
    """The requested iterations of one inner loop, which may differ between iterations of the outermost loop."""

    loop: str
    spans: Mapping[int, tuple[int, int | None]]
    """Iteration of the outermost loop -> (first, last): inner iterations `first <= index < last` are requested, or all
    from `first` on if `last` is None. In an outer iteration that is not a key, all inner iterations are requested.
    """

    def of(self, outer: int, indices: Sequence[int]) -> list[int]:
        """Return those of the inner iterations `indices` that are requested in the outer iteration `outer`.

        >>> InnerIterations("step", {2: (5, None)}).of(2, range(8))
        [5, 6, 7]
        """
        first, last = self.spans.get(outer, (0, None))
        return [i for i in indices if first <= i and (last is None or i < last)]

    def enclosing_range(self, indices: Iterable[int]) -> tuple[int, int | None]:
        """Return the smallest range (first, last) with all requested inner iterations, for outer iterations `indices`.

        `last` is not included; None means the end of the inner loop.

        >>> InnerIterations("step", {2: (5, 9), 4: (3, 6)}).enclosing_range([2, 4])
        (3, 9)
        """
        spans = [self.spans.get(index, (0, None)) for index in indices]
        ends = [last for _, last in spans if last is not None]
        first = min((first for first, _ in spans), default=0)
        return first, max(ends) if spans and len(ends) == len(spans) else None


@dataclass(frozen=True, slots=True)
class ValueRequest:
    """Values of one log statement that are requested of a run, and where in the run the statement is."""

    names: tuple[str, ...]
    loops: tuple[str, ...] = ()
    """Ids of all loops around the log statement, including loops in callers of its function, outermost first."""
    place: str = "alone"
    """Where the log statement is relative to other loops in the same block: `before`, `between` or `after` them, or
    `alone` if there are none.
    """
    depth: int | None = None
    """How many of `loops`, from the outermost in, a replay may enter at a later iteration than the first. None means
    all of them; a number below 1 means none.
    """
    feeds: bool = False
    """Whether the log statement reads variables that probes assign in inner loops, so that these loops must run."""
    at: tuple[At, ...] = ()
    """Selections of the requested iterations; empty if all are requested."""
    missing_iterations: frozenset[int] | None = None
    """Indices of iterations of the outermost loop that lack a value; None means all iterations."""
    cell_bytes: int = 64
    """Assumed size in bytes of one stored value."""
    within: InnerIterations | None = None
    """Requested iterations of one inner loop; None means all iterations of all inner loops."""
    uncounted: bool = False
    """Whether the number of values is unknown, because loops around the log statement were not counted."""


@dataclass(frozen=True, slots=True)
class RunQuestion:
    """One run and the values that are requested of it."""

    facts: RunFacts
    requests: tuple[ValueRequest, ...]
