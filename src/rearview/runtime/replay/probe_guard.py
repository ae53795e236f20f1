"""Run a probe so that it changes nothing in the program.

The guard restores random state, and everything else that a probe might change, after it has run.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rearview.runtime.importer import offer, offer_value
from rearview.runtime.replay.silent_trackers import logged_values, plain
from rearview.source.wrap_probes import CALM, OURS, SHIELD, TRACK
from rearview.state.codecs.rng import read_global, write_global

if TYPE_CHECKING:
    from rearview.runtime.replay.replayer import Replayer


def install(session: Replayer) -> None:
    """Offer the names that probes use: the guard around them, and `rearview` itself."""

    @contextmanager
    def shield(line: int, *generators: Any) -> Iterator[None]:
        del line  # the traceback has it
        before = read_global()
        kept = copy.deepcopy({k: v for k, v in session.declared.items() if k.startswith("$")})
        own = [(generator, _state_of(generator)) for generator in generators]
        session.probing += 1
        try:
            yield
        except Exception as exc:
            trace = exc.__traceback__  # the first entry is this generator; the probe comes next
            session.note_probe_error(exc, trace and trace.tb_next)
            raise
        finally:
            session.probing -= 1
            write_global(before)
            for name, value in kept.items():
                _restore_declared(session.declared[name], value)
            for generator, state in own:
                _restore_generator(generator, state)

    light_guard = _LightGuard(session)

    def track(method: str, *args: Any, **kwargs: Any) -> None:
        values = {name: plain(value) for name, value in logged_values(method, args, kwargs).items()}
        session.log(values, session.place(sys._getframe(1)))
        if session.events is not None and session.writes_at(session.point()):
            session.events.add(method, args, kwargs)

    def guard_lightly(line: int) -> _LightGuard:
        del line
        return light_guard

    offer(SHIELD, shield, **{CALM: guard_lightly, TRACK: track})
    offer_value(OURS, importlib.import_module(OURS))  # a probe may use it without importing it


class _LightGuard:
    """The guard of a probe that draws no random numbers: only marks that a probe runs."""

    __slots__ = ("session",)

    def __init__(self, session: Replayer) -> None:
        self.session = session

    def __enter__(self) -> None:
        self.session.probing += 1

    def __exit__(
        self, kind: object, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception):
            self.session.note_probe_error(exc, trace)
        self.session.probing -= 1


def _restore_declared(live: Any, before: Any) -> None:
    if isinstance(live, list):
        live[:] = before
    else:
        vars(live).update(vars(before))


def _state_of(generator: Any) -> Any:
    """Return the state of a generator that the program holds: Python's, NumPy's or torch's."""
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    for getter in ("getstate", "get_state"):
        if hasattr(generator, getter):
            return copy.deepcopy(getattr(generator, getter)())
    return None


def _restore_generator(generator: Any, state: Any) -> None:
    if state is None:
        return
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
