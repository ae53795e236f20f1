"""Iterate the user's loops, and call the session between iterations.

Short iterations are joined into slices, which Python's own iterators run at full speed: the session is called
only between slices. The index within a slice is read from a counter when it is needed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import length_hint
from time import perf_counter
from types import FrameType, GeneratorType
from typing import Any, Protocol

from rearview.model import LoopTotals, Step
from rearview.runtime.program_frames import position
from rearview.source.instrument import LoopSite
from rearview.state.codecs.suspended_generators import LoopIterator, draw_items

SLICE = 0.002
"""Seconds that a slice of short iterations should take if the user wants a checkpoint at every boundary."""
STRIDE = 0.02
"""Seconds that a slice should take if the policy decides which boundaries are saved. It is longer because after a
training step Rearview's code is no longer in the processor's cache, and a boundary takes 30 microseconds."""
_LARGEST = 1 << 20
"""Maximum number of iterations in a slice."""
_MOST_VALUES = 1000
"""Maximum number of values of a loop target that are remembered; users select iterations by these values."""
_OVER_ITEMS: tuple[type, ...] = (type(iter([])), type(iter(())))
"""Types of iterators over a list or tuple."""
_OVER_NUMBERS = (type(iter(range(0))), type(iter(range(1 << 100))))
"""Types of iterators over a range: Python has one for small numbers and one for large numbers."""
_PYTHON_CLASS = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: flag of a type that was created by a `class` statement."""


@dataclass(slots=True)
class LoopHistory:
    """Totals over all executions so far of one loop of the program."""

    site: LoopSite
    entries: int = 0
    iterations: int = 0
    seconds: float = 0.0
    logs: bool = False
    """Whether values were logged inside the loop."""
    outermost: bool = False
    """Whether the loop was entered outside all other loops."""
    unwatched: bool = False
    """Whether the loop is no longer watched: its iterations are short and log nothing."""
    nests: bool = False
    """Whether another watched loop ran inside the loop."""

    def facts(self) -> LoopTotals:
        """Return the totals in the form in which the run stores them."""
        return LoopTotals(
            entries=self.entries,
            iterations=self.iterations,
            seconds=self.seconds,
            outermost=self.outermost,
            loose=self.site.loose,
        )


@dataclass(slots=True)
class LoopEntry:
    """One running execution of a loop."""

    history: LoopHistory
    ordinal: int
    """Number of earlier executions of this loop in the same iteration of the loop around it."""
    frame: int
    """`id` of the frame in which the loop runs."""
    index: int = -1
    """Index of the first iteration of the current slice (iterations that run without a call of the session); between
    slices, index of the current iteration."""
    value: Any = None
    """Value of the loop target in the current iteration if it is a number or text; None if it is not or is unknown."""
    started: float = 0.0
    counter: Any = None
    """Iterator whose length hint is the number of items of the slice that the loop has not requested yet."""
    sliced: int = 0
    """Number of iterations in the current slice after the first."""
    received: Any = None
    """Iterator whose length hint is the number of items of the slice that the body has not received yet."""
    sequence: range | None = None
    """The range that the loop runs over; None if it runs over other items."""
    span: tuple[int, int] | None = None
    """(start, step) of the values of the loop target (variable of the `for`) if they are evenly spaced, else None."""
    target_values: list[Any] | None = None
    """Values of the loop target in each iteration if they are plain numbers or texts, else None."""
    remembers_values: bool = False
    """Whether each iteration adds a value to `target_values`."""
    source: Any = None
    """The iterator from which the loop draws its items."""
    walk: LoopIterator | None = None
    """Iterator that counts the items of a loop in a generator or coroutine; None for any other loop."""
    ordinals: dict[str, int] = field(default_factory=dict)
    """Id of an inner loop -> number of its executions in one iteration of this loop."""
    counted: tuple[int, bool] = (-1, False)
    """Iteration that `ordinals` counts in, and whether it counts loops that run while the iterator produces the item."""

    @property
    def site(self) -> LoopSite:
        """The loop in the program text."""
        return self.history.site

    @property
    def now(self) -> int:
        """Index of the current iteration, exact also within a slice."""
        if self.walk is not None:
            return self.walk.count - 1
        if self.counter is None:
            return self.index
        return self.index + self.sliced - length_hint(self.counter)

    def inner_entries(self) -> dict[str, int]:
        """Return id of an inner loop -> number of its executions in the current iteration.

        Loops that run while the iterator produces the item are counted separately from loops in the body.
        """
        producing = self.received is not None and length_hint(self.received) > length_hint(
            self.counter
        )
        if self.counted != (current := (self.now, producing)):
            self.counted, self.ordinals = current, {}
        return self.ordinals

    def label(self, index: int) -> Any:
        """Return the value of the loop target in iteration `index`, or None if it is unknown or equal to `index`."""
        if self.sequence is not None:
            value = self.sequence[index] if 0 <= index < len(self.sequence) else None
        elif self.counter is not None and index != self.index:
            return None  # within a slice, Python's iterators pass the items on and Rearview does not see them
        else:
            value = self.value
        return None if value == index else value

    def observe_target(self, source: Any, *, remember: bool) -> None:
        """Set `span` if the loop target takes evenly spaced numbers, and else `target_values` if `remember` is True.

        If the values cannot be read from the iterator `source` in advance, each iteration adds its value.
        """
        self.span = _span(source)
        if not remember or self.span is not None:
            return
        if type(source) in _OVER_ITEMS:
            self.target_values = _plain_values(*_sequence_and_drawn(source))
        else:
            self.target_values, self.remembers_values = [], True

    def take_item(self, item: Any) -> Any:
        """Remember the value that the loop target gets from `item`, and return `item`."""
        self.value = _plain_value(item)
        if self.remembers_values:
            self.remember_value(self.index)
        return item

    def remember_value(self, index: int) -> None:
        """Add `value` to `target_values` as the value of the loop target in iteration `index`.

        If it is unknown, if an earlier value is missing, or if there are too many, drop all and remember no more.
        """
        if (
            self.target_values is None
            or self.value is None
            or not len(self.target_values) == index < _MOST_VALUES
        ):
            self.target_values, self.remembers_values = None, False
        else:
            self.target_values.append(self.value)

    def slice_of(self, source: Iterator[Any], size: int) -> Iterator[Any]:
        """Return an iterator over the next `size` items of `source`; it draws each item only when the loop needs it."""
        self.value, self.sliced = None, size - 1
        self.counter, self.received = repeat(source, size), repeat(True, size)
        items = compress(map(next, self.counter), self.received)
        if size == 1:
            return map(self.take_item, items)
        if self.remembers_values:
            self.target_values, self.remembers_values = None, False
        return items

    def values(self) -> list[Any] | None:
        """Return the values of the loop target in all iterations so far, or None if they are unknown."""
        count = max(0, self.now + 1)
        return (
            self.target_values[:count]
            if self.target_values and len(self.target_values) >= count
            else None
        )

    def step(self) -> Step:
        """Return the current iteration as a step of a point."""
        index = self.now
        return Step(self.site.name, index, self.label(index))


class LoopSession(Protocol):
    """Session that records or replays, as a loop sees it: the loop calls these methods between its iterations."""

    stack: list[LoopEntry]
    """The running loops, outermost first."""
    stride: float
    """Seconds that short iterations may run before the loop calls the session again."""

    def push(self, entry: LoopEntry) -> None:
        """Put the loop `entry` on the stack: its first iteration is about to begin."""

    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:
        """Save or restore before iteration `index`; return the iteration to continue with, or None to end the loop."""

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Bring a loop from iteration `index` to `target` without running the iterations in between.

        Return the iteration that was reached.
        """

    def slice(self, entry: LoopEntry, size: int) -> int:
        """Return how many iterations may run before the loop calls the session again, at most `size`."""

    def on_exhausted(self, entry: LoopEntry, index: int, frame: FrameType) -> bool:
        """React to an iterator that has no more items; return True if the loop has ended, else False."""

    def leave(self, entry: LoopEntry, frame: FrameType | None, *, ended: bool) -> None:
        """Take the loop `entry` off the stack; `ended` is False if it was left early, as by `break` or an exception."""


def iterate(
    session: LoopSession, entry: LoopEntry, items: Any
) -> Generator[Iterable[Any], None, None]:
    """Yield the items of the loop `entry` in slices (iterators over some items); call `session` before each slice.

    `items` is the iterator that the loop draws from, or the `range` over which it runs, or None for a
    `while` loop. `iter` is never called on this iterator again. The slices draw the items in the
    frame of the loop, each only when the body needs it.
    """
    sequence = entry.sequence = items if type(items) is range else None
    simple = sequence is not None or items is None
    entry.observe_target(items, remember=not simple and len(session.stack) < 2)
    source: Iterator[Any] = iter(()) if simple else items
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
            if sequence is not None and index >= len(sequence):
                entry.index = index - 1
                ended = session.on_exhausted(entry, index, sys._getframe(1))
                return
            entry.index = index  # values logged while an item is produced belong to its iteration
            size = session.slice(entry, size)
            is_over = False
            if simple:
                part = None if sequence is None else sequence[index : index + size]
                entry.sliced = (size if part is None else len(part)) - 1
                # Python's iterator tells how many items remain, so that the index can be read from it
                entry.counter = repeat(None, size) if part is None else iter(part)
                yield entry.counter
                index = entry.now + 1
            else:
                yield entry.slice_of(source, size)
                remaining = length_hint(entry.received)
                is_over = remaining > 0
                index += size - remaining
            entry.counter = entry.received = None
            entry.index = index - 1
            if is_over:
                if remaining < size and session.boundary(entry, index, sys._getframe(1)) is None:
                    ended = True
                else:
                    entry.index = index - 1
                    ended = session.on_exhausted(entry, index, sys._getframe(1))
                return
            now = perf_counter()
            size = _next_size(size, now - last, session.stride)
            last = now
    finally:
        session.leave(entry, sys._getframe(1), ended=ended)


def is_watched_already(items: Any) -> bool:
    """Return True if `items` is an iterator that this module has made, so that the loop is watched already."""
    return type(items) is chain and any(
        type(referent) is GeneratorType and referent.gi_code is iterate.__code__
        for referent in gc.get_referents(items)
    )


def direct_iterator(source: Any) -> Any:
    """Return an iterator with the items of the iterator `source`.

    A `for` loop calls `__iter__` of the iterator that it gets. If the program defines the class of `source`, another
    iterator is returned, so that the program's `__iter__` is not called again. Iterators of other classes, such as
    Python's own, are returned unchanged, which is fastest.
    """
    if type(source).__flags__ & _PYTHON_CLASS and type(source) is not LoopIterator:
        return draw_items(source)
    return source


def iterate_in_generator(
    session: LoopSession, entry: LoopEntry, walk: LoopIterator
) -> Generator[Iterable[Any], None, None]:
    """Yield `walk`, which counts its items, as the only slice of the loop `entry` in a generator or coroutine."""
    entry.walk = walk
    entry.source = walk.source
    entry.started = perf_counter()
    session.push(entry)
    try:
        yield walk
    finally:
        session.leave(entry, None, ended=True)


def _next_size(size: int, seconds: float, stride: float = SLICE) -> int:
    """Return how many iterations the next slice should have, if a slice of `size` iterations took `seconds`.

    A slice should take at most about `stride` seconds.

    >>> _next_size(1, 0.01), _next_size(4, 0.0001), _next_size(64, 0.02)
    (1, 8, 6)
    """
    if seconds > stride:
        return max(1, int(size * stride / seconds))
    if seconds * 2 < stride:
        return min(size * 2, _LARGEST)
    return size


def _span(source: Any) -> tuple[int, int] | None:
    """Return (start, step) of the numbers that `source`, a range or enumerate, still yields; else None.

    >>> _span(range(1, 9, 2)), _span(iter(range(1, 9, 2))), _span(enumerate("ab", 1)), _span(iter("ab"))
    ((1, 2), (1, 2), (1, 1), None)
    """
    if type(source) is range:
        return source.start, source.step
    if type(source) in _OVER_NUMBERS:
        numbers, drawn = _sequence_and_drawn(source)
        return numbers.start + drawn * numbers.step, numbers.step
    if type(source) is enumerate:
        reduced: Any = source.__reduce__()
        return reduced[1][1], 1
    return None


def _sequence_and_drawn(source: Any) -> tuple[Any, int]:
    """Return the list, tuple or range over which Python's iterator `source` runs, and how many items were drawn.

    >>> _sequence_and_drawn(iter([7, 8])), _sequence_and_drawn(iter(range(3)))
    (([7, 8], 0), (range(0, 3), 0))
    """
    _, (sequence, *_), *drawn = source.__reduce__()
    return sequence, drawn[0] or 0 if drawn else 0


def _plain_value(item: Any) -> Any:
    """Return `item` if it is a number or text, else the first element of a tuple if that is one, else None."""
    if type(item) is tuple and item:
        item = item[0]
    if type(item) in (int, str, float):
        return item
    return None


def _plain_values(items: list[Any] | tuple[Any, ...], drawn: int = 0) -> list[Any] | None:
    """Return the values that a loop target takes from `items` without the first `drawn`.

    Return None if they are not all plain numbers or texts, or are too many.

    >>> _plain_values([0.1, 0.01]), _plain_values((("a", 1), ("b", 2))), _plain_values([object()]), _plain_values([1, 2, 3], 1)
    ([0.1, 0.01], ['a', 'b'], None, [2, 3])
    """
    if type(items) not in (list, tuple) or not drawn < len(items) <= _MOST_VALUES:
        return None
    if _plain_value(items[drawn]) is None:
        return None
    values = [_plain_value(item) for item in items[drawn:]]
    return None if None in values else values


def ended_at_test(entry: LoopEntry, frame: FrameType | None) -> bool:
    """Return True if `frame` is at the condition of the `while` loop `entry`: the condition was False."""
    if frame is None or id(frame) != entry.frame:
        return False
    current = position(frame)
    heads = [place for place in entry.site.breaks if place[0] == entry.site.line]
    return bool(heads) and current == min(heads)
