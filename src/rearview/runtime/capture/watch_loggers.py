"""Turn calls of other loggers into captured records: the part that all loggers share.

The library's own function runs first and its result is returned. A failure here switches the source off
and is noted with the run. Only the outermost of nested calls counts: values that a framework passes to a
logger are captured once.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rearview.model import Point, Step
from rearview.model.run import SEEN, Origin
from rearview.runtime.capture.assigned_scalars import number
from rearview.runtime.capture.captured_record_files import Allowance
from rearview.runtime.recorder import Recorder
from rearview.runtime.session import PointEncoder
from rearview.store.records import encode_point

STEP = "step"
"""Column for the step that a logger was given, if it differs from the iteration of the loop."""
LONGEST = 1000
"""Characters of a name, and of a text."""
NAMES = 500
"""Names that loggers of one run may give."""

After = Callable[[tuple[Any, ...], dict[str, Any]], None]


class LoggerCalls:
    """Records the values that a program passes to loggers."""

    def __init__(self, session: Recorder) -> None:
        self._session = session
        self._prefixes = PointEncoder()
        self._nested = threading.local()
        self._steps: dict[Origin, tuple[bytes, int]] = {}
        self._names: set[str] = set()
        self.media = Allowance()
        """Time for histograms and images, which have to be encoded."""

    def watch(self, owner: Any, name: str, origin: Origin, after: After) -> None:
        """Call `after` with the arguments of each call of `owner.name` that has succeeded."""
        original = vars(owner).get(name)
        if original is None or not callable(original):
            return  # another version of the library
        nested, seen = self._nested, self._seen(origin, after)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            depth = getattr(nested, "depth", 0)
            nested.depth = depth + 1
            try:
                answer = original(*args, **kwargs)
            finally:
                nested.depth = depth
            seen(args, kwargs)
            return answer

        vars(call)[SEEN] = seen
        setattr(owner, name, call)

    def watch_elsewhere(self, function: Any, origin: Origin, after: After) -> None:
        """Call `after` with the arguments of each call of `function` that a background writer makes."""
        if callable(function):
            setattr(function, SEEN, self._seen(origin, after))

    def _seen(self, origin: Origin, after: After) -> After:
        """Return a function that calls `after` with the arguments of a call, unless it is inside another watched call."""
        nested, off = self._nested, False

        def seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal off
            if not off and not getattr(nested, "depth", 0) and self._is_recording():
                try:
                    after(args, kwargs)
                except Exception as exc:
                    off = True
                    self._failed(origin, exc)

        return seen

    def _failed(self, origin: Origin, exc: Exception) -> None:
        if self._session.captured is not None:
            self._session.captured.problems[origin.value] = f"{type(exc).__name__}: {exc}"

    def _is_recording(self) -> bool:
        session = self._session
        return (
            session.captured is not None
            and not session.finished
            and not session.pending
            and session.pid == os.getpid()
        )

    def keep(self, origin: Origin, values: Mapping[str, Any], step: Any = None) -> None:
        """Record named values at the current point, or at `step` outside all loops."""
        items = [(name, value) for name, value in _flat(values) if self._is_name(name)]
        whole = number(step)
        place = whole if type(whole) is int else None
        session = self._session
        inside = bool(session.stack) and threading.get_ident() == session.thread
        if inside:
            prefix = self._prefixes.of(session)
            last = session.stack[-1].step()
            step_differs = place is not None and place not in (last.index, last.value)
            if step_differs and items and self._steps.get(origin) != (prefix, place):
                self._steps[origin] = (prefix, place or 0)
                items.append((STEP, place))
        else:
            prefix = encode_point(Point((Step(STEP, place),)) if place is not None else Point())
        if items and session.captured is not None:
            session.captured.append(origin, prefix, items)

    def _is_name(self, name: str) -> bool:
        if name in self._names:
            return True
        good = name.strip() and not name.startswith("$") and "\0" not in name
        if not good or len(name) > LONGEST or len(self._names) >= NAMES:
            return False
        self._names.add(name)
        return True


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values that can be kept; those of a mapping in a mapping as `outer.inner`."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif (kept := _kept(value)) is not None:
            yield name, kept


def _kept(value: Any) -> Any:
    """Return a value as it is recorded (a number, text or histogram), or None if it is not."""
    plain_number = number(value)
    if plain_number is not None:
        return plain_number
    if type(value) is str:
        return value[:LONGEST]
    if type(value) is tuple and len(value) == 2:
        return value  # counts and edges
    if hasattr(value, "getbands") and hasattr(value, "save"):
        return value  # an image of PIL
    if type(value).__module__ in {"torch", "torch.nn.parameter"} and not value.dim():
        return value.item()  # on an accelerator: the logger has waited for it already
    return None
