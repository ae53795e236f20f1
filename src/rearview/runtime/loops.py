"""Iterate the user's loops, and call the session between iterations.

Short iterations are handed to C iterators in slices, so that a loop costs next to nothing; the index
within a slice is read from a counter when it is needed.
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

from rearview.model import Step
from rearview.runtime.frames import position
from rearview.source.instrument import LoopSite
from rearview.state.codecs.iterators import Walk, drawn

SLICE = 0.002
"""Seconds that a slice of short iterations should take: boundaries stay this close together."""
STRIDE = 0.02
"""The same where nothing has to happen at every one of them: after a step of training our code is no
longer in the processor's cache, and a boundary takes 30 microseconds."""
_LARGEST = 1 << 20
_HELD = 1000
"""Items of a loop that are remembered, to be asked for by what they are."""
_OVER_ITEMS: tuple[type, ...] = (type(iter([])), type(iter(())))
_OVER_NUMBERS = (type(iter(range(0))), type(iter(range(1 << 100))))
_PYTHON_CLASS = 1 << 9
"""Flag of a type that was made at run time, as a `class` statement makes it (`Py_TPFLAGS_HEAPTYPE`)."""


@dataclass(slots=True)
class LoopHistory:
    """What is known of a site from its iterations so far."""

    site: LoopSite
    entries: int = 0
    iterations: int = 0
    seconds: float = 0.0
    logs: bool = False
    """Something was logged inside it."""
    outermost: bool = False
    """It was entered outside all other loops."""
    unwatched: bool = False
    """Not wrapped any more: its iterations are short and hold no record."""

    def facts(self) -> dict[str, Any]:
        """Return what the run keeps of it."""
        return {
            "entries": self.entries,
            "iterations": self.iterations,
            "seconds": self.seconds,
            "outermost": self.outermost,
            "loose": self.site.loose,
        }


@dataclass(slots=True)
class LoopEntry:
    """One loop being executed."""

    history: LoopHistory
    ordinal: int
    """How often its site was entered before within the same iteration of the loop around it."""
    frame: int
    """Identity of the frame it runs in."""
    index: int = -1
    value: Any = None
    started: float = 0.0
    counter: Any = None
    """Knows how many items of a slice are still to be asked for."""
    sliced: int = 0
    given: Any = None
    """Knows how many of them are still to be given to the body, where they have to be made."""
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
    counted: tuple[int, bool] = (-1, False)
    """Which iteration that is, and whether its item was being made."""

    @property
    def site(self) -> LoopSite:
        """The loop in the program text."""
        return self.history.site

    @property
    def now(self) -> int:
        """Index of the iteration under way, also in the middle of a slice."""
        if self.walk is not None:
            return self.walk.count - 1
        if self.counter is None:
            return self.index
        return self.index + self.sliced - length_hint(self.counter)

    def inside(self) -> dict[str, int]:
        """Return how often loops inside were entered in the iteration under way.

        Loops that run while its item is made are counted apart from those of its body.
        """
        making = self.given is not None and length_hint(self.given) > length_hint(self.counter)
        if self.counted != (here := (self.now, making)):
            self.counted, self.ordinals = here, {}
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

    def look(self, source: Any, *, remember: bool) -> None:
        """See how the target will count, or what it will hold; if need be take note as it comes."""
        self.span = _span(source)
        if not remember or self.span is not None:
            return
        if type(source) in _OVER_ITEMS:
            self.held = _held(*_items(source))
        else:
            self.held, self.noting = [], True

    def hold(self, item: Any) -> Any:
        """Return `item`, having taken note of what the target holds now."""
        self.value = _scalar(item)
        if self.noting:
            self.note(self.index)
        return item

    def note(self, index: int) -> None:
        """Take note of what the target holds in iteration `index`, until one cannot be known."""
        if self.held is None or self.value is None or not len(self.held) == index < _HELD:
            self.held, self.noting = None, False
        else:
            self.held.append(self.value)

    def slice_of(self, source: Iterator[Any], size: int) -> Iterator[Any]:
        """Return the next `size` items of `source`, which is asked for each when its turn comes."""
        self.value, self.sliced = None, size - 1
        self.counter, self.given = repeat(source, size), repeat(True, size)
        items = compress(map(next, self.counter), self.given)
        if size == 1:
            return map(self.hold, items)
        if self.noting:
            self.held, self.noting = None, False
        return items

    def values(self) -> list[Any] | None:
        """Return what the target held in all iterations so far, where that is known."""
        count = max(0, self.now + 1)
        return self.held[:count] if self.held and len(self.held) >= count else None

    def step(self) -> Step:
        """Return where this loop is, as points carry it."""
        index = self.now
        return Step(self.site.name, index, self.label(index))


class LoopSession(Protocol):
    """What a loop calls between its iterations: the session that records or replays."""

    stack: list[LoopEntry]
    """Loops being executed, outermost first."""
    stride: float
    """Seconds between boundaries of short iterations."""

    def push(self, entry: LoopEntry) -> None:
        """Put a loop on the stack: its first iteration is about to begin."""

    def boundary(self, entry: LoopEntry, index: int, frame: FrameType) -> int | None:
        """Act before iteration `index`; return the iteration to continue with, None to end."""

    def advance(
        self, entry: LoopEntry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Bring the loop from iteration `index` to `target` without running those in between."""

    def slice(self, entry: LoopEntry, size: int) -> int:
        """Return how many iterations may pass unobserved, at most `size`."""

    def exhausted(self, entry: LoopEntry, index: int, frame: FrameType) -> bool:
        """Act when the iterator has no more items."""

    def leave(self, entry: LoopEntry, frame: FrameType | None, *, ended: bool) -> None:
        """Take a loop off the stack, however it was left."""


def iterate(
    session: LoopSession, entry: LoopEntry, items: Any
) -> Generator[Iterable[Any], None, None]:
    """Yield the items of a loop in slices; the session acts before each.

    `items` is the iterator that the loop draws from, or the `range` it runs over, or None for a
    `while` loop, whose items nobody looks at. An iterator is never asked for an iterator again; its
    items are drawn by the slices, in the frame of the loop, and never ahead of the body.
    """
    sequence = entry.sequence = items if type(items) is range else None
    simple = sequence is not None or items is None
    entry.look(items, remember=not simple and len(session.stack) < 2)
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
                ended = session.exhausted(entry, index, sys._getframe(1))
                return
            entry.index = index  # what is logged while the item is made belongs to it
            size = session.slice(entry, size)
            over = False
            if simple:
                part = None if sequence is None else sequence[index : index + size]
                entry.sliced = (size if part is None else len(part)) - 1
                # an iterator that knows itself how many items are left, with nothing around it
                entry.counter = repeat(None, size) if part is None else iter(part)
                yield entry.counter
                index = entry.now + 1
            else:
                yield entry.slice_of(source, size)
                left = length_hint(entry.given)
                over = left > 0
                index += size - left
            entry.counter = entry.given = None
            entry.index = index - 1
            if over:
                if left < size and session.boundary(entry, index, sys._getframe(1)) is None:
                    ended = True
                else:
                    entry.index = index - 1
                    ended = session.exhausted(entry, index, sys._getframe(1))
                return
            now = perf_counter()
            size = _next_size(size, now - last, session.stride)
            last = now
    finally:
        session.leave(entry, sys._getframe(1), ended=ended)


def watched(items: Any) -> bool:
    """Return True if `items` are those of a loop that the session is told of already."""
    return type(items) is chain and any(
        type(one) is GeneratorType and one.gi_code is iterate.__code__
        for one in gc.get_referents(items)
    )


def untouched(source: Any) -> Any:
    """Return what a `for` loop can iterate over without asking `source` for an iterator again.

    The iterators of Python itself return themselves; they are the fastest way to their items.
    """
    if type(source).__flags__ & _PYTHON_CLASS and type(source) is not Walk:
        return drawn(source)
    return source


def suspended(
    session: LoopSession, entry: LoopEntry, walk: Walk
) -> Generator[Iterable[Any], None, None]:
    """Yield a loop in a generator or coroutine, which counts its items itself, as one slice."""
    entry.walk = walk
    entry.source = walk.source
    entry.started = perf_counter()
    session.push(entry)
    try:
        yield walk
    finally:
        session.leave(entry, None, ended=True)


def _next_size(size: int, seconds: float, stride: float = SLICE) -> int:
    """Return how many iterations should make the next slice, after `size` took `seconds`.

    >>> _next_size(1, 0.01), _next_size(4, 0.0001), _next_size(64, 0.02)
    (1, 8, 6)
    """
    if seconds > stride:
        return max(1, int(size * stride / seconds))
    if seconds * 2 < stride:
        return min(size * 2, _LARGEST)
    return size


def _span(source: Any) -> tuple[int, int] | None:
    """Return what a loop's target begins with and goes on by.

    >>> _span(range(1, 9, 2)), _span(iter(range(1, 9, 2))), _span(enumerate("ab", 1)), _span(iter("ab"))
    ((1, 2), (1, 2), (1, 1), None)
    """
    if type(source) is range:
        return source.start, source.step
    if type(source) in _OVER_NUMBERS:
        numbers, begun = _items(source)
        return numbers.start + begun * numbers.step, numbers.step
    if type(source) is enumerate:
        made: Any = source.__reduce__()
        return made[1][1], 1
    return None


def _items(source: Any) -> tuple[Any, int]:
    """Return what an iterator of Python runs over, and how far it has come.

    >>> _items(iter([7, 8])), _items(iter(range(3)))
    (([7, 8], 0), (range(0, 3), 0))
    """
    _, (over, *_), *begun = source.__reduce__()
    return over, begun[0] or 0 if begun else 0


def _scalar(item: Any) -> Any:
    """Return what a loop's target is known by, where that is a plain number or text."""
    if type(item) is tuple and item:
        item = item[0]
    if type(item) in (int, str, float):
        return item
    return None


def _held(items: list[Any] | tuple[Any, ...], begun: int = 0) -> list[Any] | None:
    """Return what a loop's target will hold, where that can be shown.

    >>> _held([0.1, 0.01]), _held((("a", 1), ("b", 2))), _held([object()]), _held([1, 2, 3], 1)
    ([0.1, 0.01], ['a', 'b'], None, [2, 3])
    """
    if type(items) not in (list, tuple) or not begun < len(items) <= _HELD:
        return None
    if _scalar(items[begun]) is None:
        return None
    found = [_scalar(item) for item in items[begun:]]
    return None if None in found else found


def untried(entry: LoopEntry, frame: FrameType | None) -> bool:
    """Return True if a `while` loop ended at its test, so that the last turn had no body."""
    if frame is None or id(frame) != entry.frame:
        return False
    here = position(frame)
    heads = [place for place in entry.site.breaks if place[0] == entry.site.line]
    return bool(heads) and here == min(heads)
