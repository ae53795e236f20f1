"""Record hyper-parameters that a program reads: nested settings become `outer.inner`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rearview.runtime.capture.assigned_scalars import is_copy
from rearview.runtime.recorder import Recorder

MOST = 200
"""Parameters that one source may give at once."""
EVER = 500
"""Parameters of a run."""
LONGEST = 1000
"""Characters of a value that are kept."""
DEEPEST = 6
"""Mappings in one another that are followed."""


class Parameters:
    """The parameters of one run, each with the library that read it."""

    def __init__(self, session: Recorder) -> None:
        self._session = session
        self._kept: dict[str, Any] = {}

    def keep(
        self,
        values: Mapping[Any, Any],
        source: str,
        *,
        texts: bool = False,
        new_only: bool = False,
    ) -> None:
        """Record parameters; a later value of the same name wins, unless `new_only`.

        With `texts`, values of other types are recorded as text.
        """
        session = self._session
        if session.finished or session.pending or session.pid != os.getpid():
            return
        new_values = {
            name: value
            for name, value in flat(values, texts=texts).items()
            if (name not in self._kept or not (new_only or _same(self._kept[name], value)))
            and (name in self._kept or len(self._kept) < EVER)
        }
        if new_values:
            self._kept |= new_values
            session.argument(new_values, source)

    def is_early(self) -> bool:
        """Return True if no watched loop of the program has started yet."""
        return not self._session.timeline.nests

    def is_project_file(self, file: str) -> bool:
        """Return True if a file is the project's."""
        return self._session.belongs(file)

    def is_project_frame(self, frame: FrameType) -> bool:
        """Return True if a frame runs code of the project."""
        return self._session.belongs(frame.f_code.co_filename)

    def is_project_class(self, kind: type) -> bool:
        """Return True if a class is defined in a module of the project."""
        return self._session.is_project_module(kind.__module__)

    @staticmethod
    def is_copy(frame: FrameType) -> bool:
        """Return True if the dictionary of a frame's variables is a copy that only Rearview requested."""
        return is_copy(frame)

    def failed(self, source: str, exc: Exception) -> None:
        """Note that parameters of a source could not be read."""
        if self._session.captured is not None:
            self._session.captured.problems[source] = f"{type(exc).__name__}: {exc}"

    def is_project(self, function: Any) -> bool:
        """Return True if a function is defined in a file of the project."""
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None) or getattr(
            getattr(function, "__init__", None), "__code__", None
        )
        return code is not None and self._session.belongs(code.co_filename)


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (first == second or first != first)  # noqa: PLR0124 - nan


def flat(values: Mapping[Any, Any], *, texts: bool = False) -> dict[str, Any]:
    """Return nested settings as one mapping of plain values.

    >>> flat({"optim": {"lr": 0.1, "betas": (0.9, 0.99)}, "seed": 1, 3: None})
    {'optim.lr': 0.1, 'optim.betas': [0.9, 0.99], 'seed': 1, '3': None}
    """
    out: dict[str, Any] = {}
    _add(out, "", values, DEEPEST, texts=texts)
    return out


def _add(
    out: dict[str, Any], prefix: str, values: Mapping[Any, Any], levels: int, *, texts: bool
) -> None:
    for key, value in values.items():
        if len(out) >= MOST:
            return
        name = f"{prefix}{key}" if type(key) in (str, int, float, bool) else ""
        if not name or name.startswith("$"):
            continue
        if type(value) in _MAPPINGS and value and levels:
            _add(out, f"{name}.", value, levels - 1, texts=texts)
        elif (kept := plain(value)) is not UNKNOWN:
            out[name] = kept
        elif texts:
            out[name] = str(value)[:LONGEST]


UNKNOWN = object()
"""Marks a value that is not a parameter."""
_MAPPINGS = (dict,)


def plain(value: Any) -> Any:
    """Return a value as plain JSON data; `UNKNOWN` for any other kind of value."""
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str:
        return value[:LONGEST]
    if type(value) in (list, tuple):
        items = [plain(item) for item in value[:100]]
        return items if not any(item is UNKNOWN for item in items) else UNKNOWN
    if isinstance(value, os.PathLike) and type(value).__module__.startswith("pathlib"):
        return str(value)
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        return value.item()
    if isinstance(value, bool | int | float | str):  # of a class of its own, such as an enum
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    return UNKNOWN
