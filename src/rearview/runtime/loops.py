"""Iterate the user's loops, and let the session act between iterations.

Short iterations are handed to C iterators in slices, so that a loop costs next to nothing; the
index within a slice is read from a counter when somebody asks.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress, islice, repeat
from operator import length_hint
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from rearview.model import Step
from rearview.runtime.frames import position
from rearview.runtime.state.iterators import Walk
from rearview.source.instrument import Site

if TYPE_CHECKING:
    from rearview.runtime.session import Session

SLICE = 0.002
"""Seconds that a slice of short iterations should take: boundaries stay this close together."""
STRIDE = 0.02
"""The same where nothing has to happen at every one of them: after a step of training our code is no
longer in the processor's cache, and a boundary takes 30 microseconds."""
_LARGEST = 1 << 20
_HELD = 1000
"""Items of a loop that are remembered, to be asked for by what they are."""
_END = object()


@dataclass(slots=True)
class Habit:
    """What is known of a site from its iterations so far."""

    site: Site
    entries: int = 0
    iterations: int = 0
    seconds: float = 0.0
    loud: bool = False
    """Something was logged inside it."""
    outermost: bool = False
    """It was entered outside all other loops."""
    quiet: bool = False
    """Not wrapped any more: its iterations are short and hold no record."""

    def facts(self) -> dict[str, Any]:
        """Return what the run keeps of it."""
        return {
            "entries": self.entries,
            "iterations": self.iterations,
            "seconds": self.seconds,
            "outermost": self.outermost,
        }


@dataclass(slots=True)
class Entry:
    """One loop being executed."""

    habit: Habit
    ordinal: int
    """How often its site was entered before within the same iteration of the loop around it."""
    frame: int
    """Identity of the frame it runs in."""
    index: int = -1
    value: Any = None
    started: float = 0.0
    counter: Any = None
    sliced: int = 0
    sequence: range | None = None
    span: tuple[int, int] | None = None
    """First number and step of what the target counts, where that is known."""
    held: list[Any] | None = None
    """What the target holds in each iteration, or held in each so far, where that is plain."""
    noting: bool = False
    """`held` grows with the iterations."""
    source: Any = None
    """Iterator that the items come from."""
    walk: Walk | None = None
    """Counts the items of a loop in a generator, which may be set forward under the loop."""
    ordinals: dict[str, int] = field(default_factory=dict)
    """Entries of loops inside, in one iteration."""
    counted: int = -1
    """Which iteration that is."""

    @property
    def site(self) -> Site:
        """The loop in the program text."""
        return self.habit.site

    @property
    def now(self) -> int:
        """Index of the iteration under way, also in the middle of a slice."""
        if self.walk is not None:
            return self.walk.count - 1
        if self.counter is None:
            return self.index
        return self.index + self.sliced - length_hint(self.counter)

    def inside(self) -> dict[str, int]:
        """Return how often loops inside were entered in the iteration under way."""
        if self.counted != (now := self.now):
            self.counted, self.ordinals = now, {}
        return self.ordinals

    def label(self, index: int) -> Any:
        """Return what the target holds in iteration `index`, where that is not the index."""
        if self.sequence is not None:
            value = self.sequence[index] if 0 <= index < len(self.sequence) else None
        elif self.counter is not None and index != self.index:
            return None  # in the middle of a slice nobody looked
        else:
            value = self.value
        return None if value == index else value

    def look(self, iterable: Any, *, remember: bool) -> None:
        """See how the target will count, or what it will hold; if need be take note as it comes."""
        self.span = _span(iterable)
        if not remember or self.span is not None:
            return
        if type(iterable) in (list, tuple):
            self.held = _held(iterable)
        else:
            self.held, self.noting = [], True

    def note(self, index: int) -> None:
        """Take note of what the target holds in iteration `index`, until one cannot be known."""
        if self.held is None or self.value is None or not len(self.held) == index < _HELD:
            self.held, self.noting = None, False
        else:
            self.held.append(self.value)

    def values(self) -> list[Any] | None:
        """Return what the target held in all iterations so far, where that is known."""
        count = max(0, self.now + 1)
        return self.held[:count] if self.held and len(self.held) >= count else None

    def step(self) -> Step:
        """Return where this loop is, as points carry it."""
        index = self.now
        return Step(self.site.name, index, self.label(index))


def iterate(session: Session, entry: Entry, iterable: Any) -> Generator[Iterable[Any], None, None]:
    """Yield the items of `iterable` in slices; the session acts before each.

    `iterable` is None for a `while` loop, whose items nobody looks at.
    """
    sequence = entry.sequence = iterable if isinstance(iterable, range) else None
    simple = sequence is not None or iterable is None
    entry.look(iterable, remember=not simple and len(session.stack) < 2)
    source: Iterator[Any] = iter(()) if simple else iter(iterable)
    entry.source = source
    size = 1
    ended = False
    entry.started = last = perf_counter()
    session.push(entry)
    try:
        index = 0
        while True:
            target = session.boundary(entry, index, sys._getframe(1))
            if target is None:
                ended = True
                return
            if target > index:
                index = session.advance(entry, source, index, target, sys._getframe(1))
            entry.index = index  # what is logged while the item is made belongs to it
            item = None if simple else next(source, _END)
            if item is _END or (sequence is not None and index >= len(sequence)):
                entry.index = index - 1
                ended = session.exhausted(entry, index, sys._getframe(1))
                return
            entry.value = None if simple else _scalar(item)
            if entry.noting:
                entry.note(index)
            entry.counted = -1  # loops that ran while the item was made are not of its iteration
            size = session.slice(entry, size)
            entry.sliced = size - 1
            if simple:
                part = None if sequence is None else sequence[index : index + size]
                entry.sliced = (size if part is None else len(part)) - 1
                # an iterator that knows itself how many items are left, with nothing around it
                entry.counter = repeat(None, size) if part is None else iter(part)
                yield entry.counter
                index = entry.now + 1
            elif size == 1:
                yield (item,)
                index += 1
            else:
                entry.counter = repeat(True, size - 1)
                yield chain((item,), compress(islice(source, size - 1), entry.counter))
                index = entry.now + 1
            entry.index, entry.counter = index - 1, None
            now = perf_counter()
            size = _next_size(size, now - last, session.apart)
            last = now
    finally:
        session.leave(entry, sys._getframe(1), ended=ended)


def suspended(session: Session, entry: Entry, walk: Walk) -> Iterator[Any]:
    """Yield the items of a loop in a generator or coroutine, which counts them itself."""
    entry.walk = walk
    entry.source = walk.source
    entry.started = perf_counter()
    session.push(entry)
    try:
        for item in walk:  # noqa: UP028 - `yield from` would close a generator that others hold
            yield item
    finally:
        session.leave(entry, None, ended=True)


def _next_size(size: int, seconds: float, apart: float = SLICE) -> int:
    """Return how many iterations should make the next slice, after `size` took `seconds`.

    >>> _next_size(1, 0.01), _next_size(4, 0.0001), _next_size(64, 0.02)
    (1, 8, 6)
    """
    if seconds > apart:
        return max(1, int(size * apart / seconds))
    if seconds * 2 < apart:
        return min(size * 2, _LARGEST)
    return size


def _span(iterable: Any) -> tuple[int, int] | None:
    """Return what a loop's target begins with and goes on by.

    >>> _span(range(1, 9, 2)), _span(enumerate("ab", 1)), _span("ab")
    ((1, 2), (1, 1), None)
    """
    if type(iterable) is range:
        return iterable.start, iterable.step
    if type(iterable) is enumerate:
        made: Any = iterable.__reduce__()
        return made[1][1], 1
    return None


def _scalar(item: Any) -> Any:
    """Return what a loop's target is known by, where that is a plain number or text."""
    if type(item) is tuple and item:
        item = item[0]
    if type(item) in (int, str, float):
        return item
    return None


def _held(items: list[Any] | tuple[Any, ...]) -> list[Any] | None:
    """Return what a loop's target will hold, where that can be shown.

    >>> _held([0.1, 0.01]), _held((("a", 1), ("b", 2))), _held([object()])
    ([0.1, 0.01], ['a', 'b'], None)
    """
    if not items or len(items) > _HELD or _scalar(items[0]) is None:
        return None
    found = [_scalar(item) for item in items]
    return None if None in found else found


def untried(entry: Entry, frame: FrameType | None) -> bool:
    """Say whether a `while` loop ended at its test, so that the last turn had no body."""
    if frame is None or id(frame) != entry.frame:
        return False
    here = position(frame)
    heads = [place for place in entry.site.breaks if place[0] == entry.site.line]
    return bool(heads) and here == min(heads)
