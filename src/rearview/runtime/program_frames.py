"""Frames of the user's program: which belong to the project, which names they bind, how to bind other values.

Hidden frames: Rearview's frames are below the program's frames on the stack. `inspect.stack()[-1]`,
`warnings.warn(..., stacklevel=9)`, `traceback.print_stack()` and `sys._getframe(n)` would show them, and the recursion
limit counts them. Python has no call to hide frames, so on CPython 3.11 the link from the program's first frame to
Rearview's is removed in the interpreter's own structure. Nothing else in 3.11 follows this link: when a frame that C
code entered returns, the interpreter takes the frame below from the C stack. The link is removed only if it holds
the address of the frame that is known to be below; otherwise, and on every other Python, Rearview's frames
stay visible.

Trace functions: the program's own trace and profile functions are suspended while Rearview's code runs. The data that
these functions record is part of the program's state: if they observed Rearview's walk over the state, the walk would
create more state and never end.

Library loops: the training loops of libraries (`source.library_loops`) are instrumented like the project's own. The
globals of a library's modules do not belong to the state, except objects that some libraries keep for the whole
process.

Roots of the state: the global and local variables from which all its objects are reached (`roots`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import FrameType, GeneratorType, ModuleType
from typing import Any, ParamSpec, TypeVar

from rearview.source.instrument import PART, TURN
from rearview.state.codecs.suspended_generators import assign_locals

Belongs = Callable[[str], bool]
"""Function that returns True if the file at a path belongs to the project."""

_ABSENT = object()
_COMPILED = (
    *("__builtins_dict__", "__compiled_fn", "__import_", "__resume_at_", "__gen_rand_values"),
    *("__warnings_warn_wrapper", "___"),
)
"""Prefixes of the names that `torch.compile` adds to the modules of the functions that it compiles."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120


_folder = cache(os.path.realpath)


def resolved(file: str) -> str:
    """Return the path `file` without symbolic links; the path of each folder is resolved once and remembered."""
    if os.path.islink(file):  # noqa: PTH114 - hot
        return os.path.realpath(file)
    folder, name = os.path.split(file)
    return os.path.join(_folder(folder), name)  # noqa: PTH118


def project_frames(
    frame: FrameType | None, belongs: Belongs, loops: Collection[str] = ()
) -> list[FrameType]:
    """Return the frames of the program's functions, from the outermost one to `frame`.

    A frame is the program's if its file belongs to the project (`belongs`). If a loop of a library is running (its
    file is in `loops`), the frames between the project and this loop are included, because they hold state too.
    Frames of modules are left out: their local variables are globals.
    """
    frames: list[FrameType] = []
    library_frames: list[FrameType] = []
    in_library_loop = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if belongs(file):
            frames += library_frames
            library_frames = []
            if code.co_name != "<module>" and not code.co_name.startswith("<cell line"):
                frames.append(frame)
        else:
            in_library_loop = in_library_loop or file in loops
            if in_library_loop and not file.startswith(_OURS):
                library_frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    return frames


ALIAS = "__mp_main__"
"""Second name in `sys.modules` of the module `__main__`, after `multiprocessing` was imported."""


@dataclass(slots=True)
class Modules:
    """Finds the project's modules that are loaded; `sys.modules` is examined again only if it has changed."""

    belongs: Belongs
    main: ModuleType | None = None
    """Module that holds the names of a notebook, which has no file; None for a program."""
    hides: Callable[[str], bool] = lambda _: False
    """Function that returns True for a name in `main` that the notebook kernel has put there."""
    names: list[str] = field(default_factory=list)
    """Names of the project's modules when `sys.modules` was last examined."""
    examined: tuple[int, str] = (0, "")
    """Number of loaded modules, and the name of the last one, when `sys.modules` was last examined."""

    def __iter__(self) -> Iterator[tuple[str, ModuleType]]:
        """Yield (name, module) for each module of the project: `__main__` first, the others sorted by name."""
        latest = (len(sys.modules), next(reversed(sys.modules)))
        if latest != self.examined:
            names = [
                name
                for name in list(sys.modules)
                if name != ALIAS and self._ours(sys.modules.get(name))
            ]
            self.names = sorted(names, key=lambda name: (name != "__main__", name))
            self.examined = latest
        for name in self.names:
            module = sys.modules.get(name)
            if module is not None and self._ours(module):  # test again: it may be another module
                yield name, module

    def _ours(self, module: ModuleType | None) -> bool:
        if module is not None and module is self.main:
            return True
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self.belongs(file)


def roots(frames: list[FrameType], modules: Modules) -> dict[str, Any]:
    """Return name -> value of the roots of the state: globals of project `modules` and local variables of `frames`.

    The names are `global:<module>:<name>` and `local:<depth of frame>:<function>:<name>`.

    >>> sorted(roots([], Modules(lambda file: False)))
    []
    """
    roots_by_name: dict[str, Any] = {}
    for module_name, module in modules:
        for name, value in sorted(vars(module).items()):
            if module is modules.main and modules.hides(name):
                continue
            if not (name.startswith("__") and (name.endswith("__") or name.startswith(_COMPILED))):
                roots_by_name[f"global:{module_name}:{name}"] = value
    for depth, frame in enumerate(frames):
        where = f"local:{depth}:{frame.f_code.co_qualname}:"
        for name, value in sorted(frame.f_locals.items()):
            if name not in (TURN, PART) and (
                name not in CLOCKS or modules.belongs(frame.f_code.co_filename)
            ):
                roots_by_name[where + name] = value
    return roots_by_name


def as_recorded(live: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the roots in `live` (name -> value) that have the recorded `names`, in the order of `names`.

    Older recordings hold the globals of `__main__` a second time, under `__mp_main__`.

    >>> as_recorded({"global:__main__:lr": 1, "new": 2}, ["global:__mp_main__:lr", "gone"])
    {'global:__mp_main__:lr': 1}
    """
    head = f"global:{ALIAS}:"
    live_names = {
        n: f"global:__main__:{n.removeprefix(head)}" if n.startswith(head) else n for n in names
    }
    return {name: live[live_name] for name, live_name in live_names.items() if live_name in live}


def load_modules(names: Iterable[str]) -> None:
    """Import the modules of the globals in `names` (names of roots) that are not loaded yet.

    The recorded run may have imported these modules in iterations that are skipped now.
    """
    for key in names:
        kind, place, _ = key.split(":", 2)
        if kind == "global" and place != ALIAS and place not in sys.modules:
            importlib.import_module(place)


def rebind(values: Mapping[str, Any], live: Mapping[str, Any], frames: list[FrameType]) -> None:
    """Assign `values` (name of a root -> value) to the variables of the modules and `frames` that the names say.

    `live` are the current roots. A global in `live` that is not in `values` did not exist in the recorded state and
    is removed.
    """
    by_frame: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        kind, owner, name_part = key.split(":", 2)
        if kind == "global":
            if owner == ALIAS:
                continue  # the global is also in `values` under `__main__`
            space = vars(sys.modules[owner])
            if space.get(name_part, _ABSENT) is not value:
                space[name_part] = value
        elif kind == "local":
            by_frame.setdefault(int(owner), {})[name_part.rpartition(":")[2]] = value
    for key in live:
        kind, owner, name = key.split(":", 2)
        if kind == "global" and key not in values and owner != ALIAS:
            vars(sys.modules[owner]).pop(name, None)
    for depth, names in by_frame.items():
        if depth < len(frames):
            assign_locals(frames[depth], names)


def position(frame: FrameType) -> tuple[int | None, int | None]:
    """Return line and column of the instruction that `frame` is executing, each None if unknown."""
    spans = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, _, column, _ = next(spans, (None, None, None, None))
    return line, column


_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME = 3
"""Offset, in words, of the pointer to the interpreter's frame in a frame object."""
_BELOW = 6
"""Offset, in words, of the pointer to the frame below in an interpreter's frame."""
_OBJECT = 5
"""Offset, in words, of the pointer to the frame object in an interpreter's frame."""
_COUNTERS = range(24, 56, 4)
"""Offsets, in bytes, in the interpreter's thread state at which the recursion counter and its limit may be."""
_OWN_CALLS = 4
"""Number of Rearview's calls on the stack while `_allow_all_calls` runs, which count against the recursion limit."""


def run_at_bottom(call: Callable[..., Any], *args: Any) -> None:
    """Call `call(*args)`, and hide Rearview's frames, which are below it on the stack, from the called code.

    Rearview's frames stay visible on a Python on which they cannot be hidden, or if a profiler is active.
    """
    can_hide, profiler = _can_hide_frames(), sys.getprofile()
    if not can_hide or profiler is not None:
        call(*args)
        return
    caller = sys._getframe()

    def first(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            sys.setprofile(None)
            if frame.f_back is caller:
                _hide_frames_below(frame, caller)

    sys.setprofile(first)
    try:
        call(*args)
    finally:
        if sys.getprofile() is first:
            sys.setprofile(None)


def _can_hide_frames() -> bool:
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] == (3, 11)
        and not sysconfig.get_config_var("Py_DEBUG")  # debug builds assert that the link exists
        and not hasattr(sys, "getobjects")  # builds with Py_TRACE_REFS have larger objects
    )


def _hide_frames_below(frame: FrameType, below: FrameType) -> None:
    inner = _inner(frame)
    if _word(inner, _OBJECT) == id(frame) and _word(inner, _BELOW) == _inner(below):
        ctypes.c_void_p.from_address(inner + _BELOW * _WORD).value = None
        _allow_all_calls()


def _allow_all_calls() -> None:
    """Set the recursion counter so that the program can recurse as deep as under plain `python`."""
    limit = sys.getrecursionlimit()
    state = ctypes.pythonapi.PyThreadState_Get
    state.restype = ctypes.c_void_p
    address = state()
    for offset in _COUNTERS:
        remaining = ctypes.c_int.from_address(address + offset)
        if ctypes.c_int.from_address(address + offset + 4).value == limit > remaining.value > 0:
            remaining.value = limit - _OWN_CALLS
            return


def _inner(frame: FrameType) -> int:
    return _word(id(frame), _FRAME)


def _word(address: int, position: int) -> int:
    return ctypes.c_void_p.from_address(address + position * _WORD).value or 0


_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")

# the original functions, because debuggers may replace those in `sys`
_set_trace, _set_profile = sys.settrace, sys.setprofile


def unobserved(function: Callable[_Parameters, _Answer]) -> Callable[_Parameters, _Answer]:
    """Return `function` wrapped so that the program's trace and profile functions are suspended while it runs."""

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Answer:
        trace, profile = sys.gettrace(), sys.getprofile()
        if not callable(profile):  # this is cProfile: its data does not belong to the state
            profile = None
        if trace is None and profile is None:
            return function(*args, **kwargs)
        if profile is not None:
            _set_profile(None)
        if trace is not None:
            _set_trace(None)
        try:
            return function(*args, **kwargs)
        finally:
            if trace is not None:
                _set_trace(trace)
            if profile is not None:
                _set_profile(profile)

    return call


CLOCKS = frozenset({"start_time", "time_start"})
"""Names of local variables of libraries that hold a clock reading, which is no part of the state."""


def _keras_state() -> Any:
    """Return the global state of Keras (its seed generator, names of layers), or None if Keras is not loaded."""
    module = sys.modules.get("keras.src.backend.common.global_state")
    return vars(module.GLOBAL_STATE_TRACKER) if module is not None else None


def clear_library_references(frames: Iterable[FrameType], files: Collection[str]) -> None:
    """Clear references that running Keras loops no longer need, and wait for their callbacks in other threads.

    A loop is running if one of `frames` is in one of `files`.
    """
    for frame in frames:
        if frame.f_code.co_filename in files and "epoch_iterator" in frame.f_code.co_varnames:
            variables = frame.f_locals
            _settle_keras(variables.get("epoch_iterator"))
            _settle_keras(getattr(variables.get("self"), "_eval_epoch_iterator", None))
            _await_keras(variables.get("callbacks"))


def _settle_keras(iterator: Any) -> None:
    """Clear the exhausted data iterator that Keras keeps between two epochs and replaces before its next use."""
    running = getattr(iterator, "_epoch_iterator", None)
    is_over = isinstance(running, GeneratorType) and running.gi_frame is None
    if is_over and getattr(iterator, "steps_per_epoch", 0) is None:
        vars(iterator)["_current_iterator"] = None


def _await_keras(callbacks: Any) -> None:
    """Wait until those of `callbacks` that Keras runs in threads have handled all batches so far.

    Keras itself waits for these callbacks only at the end of an epoch. Callbacks change state: without this wait,
    the state at a boundary would depend on timing.
    """
    futures = getattr(callbacks, "_futures", None)
    if futures:
        import concurrent.futures

        concurrent.futures.wait(list(futures))


def _pyro_state() -> Any:
    """Return the global parameter store of Pyro, to which no model refers, or None if Pyro is not loaded."""
    return getattr(sys.modules.get("pyro.poutine.runtime"), "_PYRO_PARAM_STORE", None)


_KEPT_BY: Mapping[str, Callable[[], Any]] = {"pyro": _pyro_state}
"""Library -> function that returns its global state, or None if the library is not loaded."""
_KEPT_IN_LOOPS_BY: Mapping[str, Callable[[], Any]] = {"keras": _keras_state}
"""Library -> function that returns its global state or None. This state belongs to the program's state only if a
loop of a library is watched."""


def library_roots(*, loops: bool) -> Iterator[tuple[str, Any]]:
    """Yield (name of the root, object) for global state of libraries to which no object of the program refers.

    `loops` is True if a loop of a library is watched.
    """
    for name, state in {**_KEPT_BY, **(_KEPT_IN_LOOPS_BY if loops else {})}.items():
        library_state = state()
        if library_state is not None:
            yield f"library::{name}", library_state
