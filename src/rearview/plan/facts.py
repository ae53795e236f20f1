"""What a plan is made from: facts of runs, and what is wanted of them.

`At` is a choice of iterations as people write it: `epoch=3`, `epoch=3:5`, `epoch=3/step=10:20`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rearview.errors import UsageError
from rearview.model import Edge, Point

_VALUE = r"""("[^"]*"|'[^']*'|[^\s:=/"']*)"""
_FORM = re.compile(rf"\s*([^\s=:/]+)\s*=\s*{_VALUE}\s*(?:(:)\s*{_VALUE}\s*)?")
_PARTS = re.compile(r"""((?:"[^"]*"|'[^']*'|[^/])*)(?:/|\Z)""")


@dataclass(frozen=True, slots=True)
class At:
    """Iterations of one loop: `first <= value < last`, as a slice; None: no bound.

    Numbers are what the loop's target held, which is what people know an iteration by.
    """

    loop: str
    first: float | str | None = None
    last: float | str | None = None
    single: bool = False
    """Just the iteration whose value is `first`."""

    def indices(self, count: int, values: Sequence[float | str] | None = None) -> list[int]:
        """Return which of `count` iterations are meant.

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
            # a text that looks like a number is one only in the question
            said = {self.first, str(self.first)}
            return [i for i in range(count) if values[i] in said]
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
    """Return the iterations that a text means, outermost loop first.

    Ranges are half-open, as slices are.

    >>> parse_at("epoch=3:5")
    (At(loop='epoch', first=3, last=5, single=False),)
    >>> [str(at) for at in parse_at("epoch=3/step=10:")]
    ['epoch=3', 'step=10:']
    >>> parse_at("file='a/b.txt'")[0].first
    'a/b.txt'
    """
    found: list[At] = []
    for part in _split(text):
        match = _FORM.fullmatch(part)
        if match is None or (not match[2] and not match[3]):
            raise UsageError(
                f"{text!r} does not say which iterations: {part!r} is not `loop=number`, "
                f"`loop=first:last`, `loop=first:` or `loop=:last`. "
                f"Write for example `epoch=3:5` or `epoch=3/step=10:20`; the last is not included. "
                f"A text with one of `:/=` or a space in it stands in quotes: `file='a/b.txt'`.",
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
        found.append(At(match[1], first, last, single=not match[3]))
    names = [at.loop for at in found]
    if len(set(names)) < len(names):
        raise UsageError(
            f"{text!r} names a loop twice. Name each loop once, outermost first.",
            slug="at-form",
        )
    return tuple(found)


def _split(text: str) -> list[str]:
    """Return what stands between slashes, those in quotes apart.

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
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


Shown = float | str
ALWAYS = range(1 << 62)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of something that was measured `count` times; count 0: a guess.

    >>> Timing.of([1.0, 3.0])
    Timing(mean=2.0, spread=1.4142135623730951, count=2)
    """

    mean: float
    spread: float = 0.0
    """Standard deviation of one measurement."""
    count: int = 1

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Return the timing of measured seconds."""
        count = len(seconds)
        mean = sum(seconds) / count if count else 0.0
        square = sum((value - mean) ** 2 for value in seconds)
        return cls(mean, (square / (count - 1)) ** 0.5 if count > 1 else 0.0, count)


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a machine is, as a short measurement tells."""

    name: str
    """Two machines of one name are made of the same."""
    kernels: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each standard piece of computing; none: it was never measured."""
    read: float = 0.0
    """MB/s."""
    write: float = 0.0
    host: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint as far as planning goes."""

    id: str
    point: Point
    edge: Edge = Edge.START
    complete: bool = True
    nbytes: int = 0
    """What has to be read for it, by a replay that comes from the one before."""
    restore: float | None = None
    """Measured seconds to load and restore it; None: predicted from its size."""


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """A loop of a run, over all its iterations."""

    name: str
    """Its id: two loops may share what people call them by."""
    seconds: Sequence[float]
    """Of each iteration: of the whole iteration for the outermost loop; for an inner loop, of all
    its iterations together within each iteration of the loop around it."""
    counts: Sequence[int] = ()
    """For an inner loop: how many iterations it had in each iteration of the loop around it."""
    values: Sequence[Shown] | None = None
    """What the target held in each iteration, where that is not the index."""
    counted: range = ALWAYS
    """Iterations of the loop around it for which `counts` is what was; else it is a guess."""
    varied: bool = False
    """The target held something else each time, so that no iteration is known by it."""


@dataclass(frozen=True, slots=True)
class DeepFacts:
    """A loop inside two others or more."""

    counts: Sequence[int]
    """How many iterations it had in each iteration of the outermost loop."""
    counted: range = ALWAYS
    """Iterations of the outermost loop for which that is what was; else it is a guess."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run measured about itself."""

    run: str
    version: str
    """Version to execute: with the probes in it."""
    loops: tuple[LoopFacts, ...] = ()
    """The outermost loop, then those directly inside it in the order the program comes to them."""
    deep: Mapping[tuple[str, ...], DeepFacts] = field(default_factory=dict)
    """By the ids of the loops from the inner one down (names in older runs): loops inside of those."""
    start: float = 0.0
    """Seconds of interpreter start and imports."""
    setup: float = 0.0
    """Seconds from there to the outermost loop."""
    after: float = 0.0
    """Seconds from the end of the outermost loop to the end of the program."""
    shareable: float = 0.0
    """Seconds of `start` and `setup` that only the first process of several for this run computes: the
    others are forked from one that has done the imports."""
    checkpoints: tuple[CheckpointFacts, ...] = ()
    finished: bool = True
    machine: Machine | None = None
    blocked: str = ""
    """Why it cannot be replayed at all: a package or an input that is gone."""
    priority: float = 0.0


@dataclass(frozen=True, slots=True)
class Within:
    """Iterations of one inner loop that are wanted."""

    loop: str
    spans: Mapping[int, tuple[int, int | None]]
    """Iteration of the outermost loop -> `first <= index < last`; None: to its end.

    What is not here is wanted whole."""

    def of(self, index: int, picked: Sequence[int]) -> list[int]:
        """Return those of `picked` that are wanted in one iteration of the outermost loop.

        >>> Within("step", {2: (5, None)}).of(2, range(8))
        [5, 6, 7]
        """
        first, last = self.spans.get(index, (0, None))
        return [i for i in picked if first <= i and (last is None or i < last)]

    def hull(self, indices: Iterable[int]) -> tuple[int, int | None]:
        """Return one stretch that holds what is wanted in each of some iterations.

        >>> Within("step", {2: (5, 9), 4: (3, 6)}).hull([2, 4])
        (3, 9)
        """
        spans = [self.spans.get(index, (0, None)) for index in indices]
        ends = [last for _, last in spans if last is not None]
        first = min((first for first, _ in spans), default=0)
        return first, max(ends) if spans and len(ends) == len(spans) else None


@dataclass(frozen=True, slots=True)
class Want:
    """Names wanted of a run, and where they are logged.

    `loops` are the ids of all loops around the log statement, callers' included, outermost first.
    """

    names: tuple[str, ...]
    loops: tuple[str, ...] = ()
    place: str = "alone"
    """Where the statement stands among the loops of its level: before, between, after, alone."""
    depth: int | None = None
    """How many of `loops` replay may enter in the middle; None: all; below 1: none."""
    feeds: bool = False
    """It reads what probes gather in inner loops, so their work cannot be skipped."""
    at: tuple[At, ...] = ()
    """Only these iterations."""
    missing: frozenset[int] | None = None
    """Iterations (by index) of the outermost loop that lack a value; None: all."""
    cell_bytes: int = 64
    """Bytes that one value takes at rest."""
    within: Within | None = None
    """Only these iterations of the loop inside the outermost one, where it is around it."""
    several: bool = False
    """It stands in loops after all, of which nobody knows how often they went round."""


@dataclass(frozen=True, slots=True)
class RunQuestion:
    """One run and everything that is wanted of it."""

    facts: RunFacts
    wanted: tuple[Want, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    """Name -> something to be said with its cost."""
