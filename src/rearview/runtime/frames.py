"""Frames of the user's program: which are the project's, what they hold, and writing it back."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any

from rearview.runtime.libraries import CLOCKS
from rearview.source.instrument import PART, TURN

Belongs = Callable[[str], bool]
"""Says whether a file is part of the project."""

_ABSENT = object()
_COMPILED = (
    *("__builtins_dict__", "__compiled_fn", "__import_", "__resume_at_", "__gen_rand_values"),
    *("__warnings_warn_wrapper", "___"),
)
"""How the names begin that `torch.compile` puts into the modules of functions it compiles."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120


_folder = cache(os.path.realpath)


def resolved(file: str) -> str:
    """Return a file's path without links; folders are looked at once, for libraries have large ones."""
    if os.path.islink(file):  # noqa: PTH114 - hot
        return os.path.realpath(file)
    folder, name = os.path.split(file)
    return os.path.join(_folder(folder), name)  # noqa: PTH118


def project_frames(
    frame: FrameType | None, belongs: Belongs, loops: Collection[str] = ()
) -> list[FrameType]:
    """Return the program's function frames from the outermost down to `frame`.

    Those are the project's and, where a loop of a library is running (its file is in `loops`),
    all between the project and that loop: what only they hold would be lost otherwise. Module
    frames are left out: their locals are globals.
    """
    found: list[FrameType] = []
    between: list[FrameType] = []
    inside = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if belongs(file):
            found += between
            between = []
            if code.co_name != "<module>" and not code.co_name.startswith("<cell line"):
                found.append(frame)
        else:
            inside = inside or file in loops
            if inside and not file.startswith(_OURS):
                between.append(frame)
        frame = frame.f_back
    found.reverse()
    return found


ALIAS = "__mp_main__"
"""Second name that `multiprocessing` gives to `__main__`, as soon as something imports it."""


@dataclass(slots=True)
class Modules:
    """The project's loaded modules. There are thousands of others, so they are looked through once."""

    belongs: Belongs
    main: ModuleType | None = None
    """Namespace of a notebook, which has no file."""
    hides: Callable[[str], bool] = lambda _: False
    """Says which names in there are the kernel's own."""
    names: list[str] = field(default_factory=list)
    seen: tuple[int, str] = (0, "")
    """How many modules there were, and which came last: the name of a newer one would be last."""

    def __iter__(self) -> Iterator[tuple[str, ModuleType]]:
        """Yield them by name, `__main__` first, then sorted."""
        seen = (len(sys.modules), next(reversed(sys.modules)))
        if seen != self.seen:
            names = [
                name
                for name in list(sys.modules)
                if name != ALIAS and self._ours(sys.modules.get(name))
            ]
            self.names = sorted(names, key=lambda name: (name != "__main__", name))
            self.seen = seen
        for name in self.names:
            module = sys.modules.get(name)
            if module is not None and self._ours(module):  # its entry may have been exchanged
                yield name, module

    def _ours(self, module: ModuleType | None) -> bool:
        if module is not None and module is self.main:
            return True
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self.belongs(file)


def roots(frames: list[FrameType], modules: Modules) -> dict[str, Any]:
    """Return everything the state starts from: globals of project modules and frame locals.

    >>> sorted(roots([], Modules(lambda file: False)))
    []
    """
    found: dict[str, Any] = {}
    for module_name, module in modules:
        for name, value in sorted(vars(module).items()):
            if module is modules.main and modules.hides(name):
                continue
            if not (name.startswith("__") and (name.endswith("__") or name.startswith(_COMPILED))):
                found[f"global:{module_name}:{name}"] = value
    for depth, frame in enumerate(frames):
        where = f"local:{depth}:{qualified(frame.f_code)}:"
        for name, value in sorted(frame.f_locals.items()):
            if name not in (TURN, PART) and (
                name not in CLOCKS or modules.belongs(frame.f_code.co_filename)
            ):
                found[where + name] = value
    return found


def qualified(code: CodeType) -> str:
    """Return the qualified name of the function that `code` belongs to."""
    return code.co_qualname


def as_recorded(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the roots in `found` that a recorded state has, in its order.

    Older recordings hold the globals of `__main__` a second time, under `__mp_main__`.

    >>> as_recorded({"global:__main__:lr": 1, "new": 2}, ["global:__mp_main__:lr", "gone"])
    {'global:__mp_main__:lr': 1}
    """
    head = f"global:{ALIAS}:"
    under = {
        n: f"global:__main__:{n.removeprefix(head)}" if n.startswith(head) else n for n in names
    }
    return {name: found[own] for name, own in under.items() if own in found}


def load_modules(names: Iterable[str]) -> None:
    """Import the project modules that the globals in `names` belong to.

    The run may have imported them in iterations that are skipped.
    """
    for key in names:
        kind, place, _ = key.split(":", 2)
        if kind == "global" and place != ALIAS and place not in sys.modules:
            importlib.import_module(place)


def rebind(values: Mapping[str, Any], before: Mapping[str, Any], frames: list[FrameType]) -> None:
    """Bind the names of `values` (as `roots` spells them) in their modules and frames.

    A global of `before` that is not in `values` did not exist then, and is removed.
    """
    by_frame: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        kind, place, rest = key.split(":", 2)
        if kind == "global":
            if place == ALIAS:
                continue  # `__main__` itself is among them
            space = vars(sys.modules[place])
            if space.get(rest, _ABSENT) is not value:
                space[rest] = value
        elif kind == "local":
            by_frame.setdefault(int(place), {})[rest.rpartition(":")[2]] = value
    for key in before:
        kind, place, name = key.split(":", 2)
        if kind == "global" and key not in values and place != ALIAS:
            vars(sys.modules[place]).pop(name, None)
    for depth, names in by_frame.items():
        if depth < len(frames):
            assign(frames[depth], names)


def assign(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give local variables of a running function new values."""
    space = frame.f_locals
    changed = {k: v for k, v in values.items() if space.get(k, _ABSENT) is not v}
    if not changed:
        return
    for name, value in changed.items():
        space[name] = value
    if sys.version_info < (3, 13):
        # Before PEP 667 `f_locals` is a copy; this writes it back, as debuggers do.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def position(frame: FrameType) -> tuple[int | None, int | None]:
    """Return line and column of the statement that `frame` is executing."""
    spans = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, _, column, _ = next(spans, (None, None, None, None))
    return line, column
