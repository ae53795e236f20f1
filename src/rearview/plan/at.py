"""Which iterations are meant: `epoch=3`, `epoch=3:5`, `epoch=3/step=10:20`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rearview.errors import UsageError

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
