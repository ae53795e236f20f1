"""What counts as state while a loop of a library runs; `source.library_loops` names those loops.

The globals of a library's modules are not state, except what some libraries keep for the whole process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

CLOCKS = frozenset({"start_time", "time_start"})
"""Local variables of libraries that hold the time of day: measurements, not state."""


def _keras_state() -> Any:
    """Return the global state of Keras: its seed generator and the names given so far."""
    module = sys.modules.get("keras.src.backend.common.global_state")
    return vars(module.GLOBAL_STATE_TRACKER) if module is not None else None


def clear_library_references(frames: Iterable[FrameType], files: Collection[str]) -> None:
    """Clear references that library loops no longer need, and wait for their callbacks."""
    for frame in frames:
        if frame.f_code.co_filename in files and "epoch_iterator" in frame.f_code.co_varnames:
            variables = frame.f_locals
            _settle_keras(variables.get("epoch_iterator"))
            _settle_keras(getattr(variables.get("self"), "_eval_epoch_iterator", None))
            _await_keras(variables.get("callbacks"))


def _settle_keras(iterator: Any) -> None:
    """Drop the iterator that Keras keeps between two epochs and replaces before its next use."""
    running = getattr(iterator, "_epoch_iterator", None)
    over = isinstance(running, GeneratorType) and running.gi_frame is None
    if over and getattr(iterator, "steps_per_epoch", 0) is None:
        vars(iterator)["_current_iterator"] = None


def _await_keras(callbacks: Any) -> None:
    """Wait until the callbacks that Keras runs in threads have handled all batches so far.

    Keras itself waits for them only at the end of an epoch. Callbacks change state, so without this
    the state at a boundary would depend on timing.
    """
    futures = getattr(callbacks, "_futures", None)
    if futures:
        import concurrent.futures

        concurrent.futures.wait(list(futures))


def _pyro_state() -> Any:
    """Return the global parameter store of Pyro, which no model refers to."""
    return getattr(sys.modules.get("pyro.poutine.runtime"), "_PYRO_PARAM_STORE", None)


_KEPT_BY: Mapping[str, Callable[[], Any]] = {"pyro": _pyro_state}
_KEPT_IN_LOOPS_BY: Mapping[str, Callable[[], Any]] = {"keras": _keras_state}
"""Global state of libraries by name, used only if loops of the library are watched."""


def library_roots(*, loops: bool) -> Iterator[tuple[str, Any]]:
    """Yield the global state of libraries that no object of the program refers to, by name.

    `loops` is True if a loop of a library is watched.
    """
    for name, state in {**_KEPT_BY, **(_KEPT_IN_LOOPS_BY if loops else {})}.items():
        library_state = state()
        if library_state is not None:
            yield f"library::{name}", library_state
