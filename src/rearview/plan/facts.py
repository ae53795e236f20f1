"""What a plan is made from: facts of runs, and what is wanted of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rearview.model import Point
from rearview.plan.at import At

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
    edge: str = "start"
    """`"start"`: before the iteration `point` ends in; `"end"`: after that loop has ended."""
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
class Wanted:
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
class Question:
    """One run and everything that is wanted of it."""

    facts: RunFacts
    wanted: tuple[Wanted, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    """Name -> something to be said with its cost."""
