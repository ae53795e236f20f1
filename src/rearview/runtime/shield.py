"""Run a probe without leaving a trace in the program: chance goes on as if it had not run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rearview.runtime.names import offer
from rearview.runtime.state.randomness import read_global, write_global
from rearview.runtime.trackers import plain, told
from rearview.source.shield import CALM, SHIELD, TRACK

if TYPE_CHECKING:
    from rearview.runtime.replayer import Replayer


def install(session: Replayer) -> None:
    """Make the context manager that shielded code names known to it."""

    @contextmanager
    def shield(line: int, *generators: Any) -> Iterator[None]:
        del line  # the traceback has it
        before = read_global()
        kept = copy.deepcopy({k: v for k, v in session.declared.items() if k.startswith("$")})
        own = [(one, _state(one)) for one in generators]
        session.probing += 1
        try:
            yield
        except Exception as exc:
            here = exc.__traceback__  # where this generator stands; the statement comes after
            session.note_raised(exc, here and here.tb_next)
            raise
        finally:
            session.probing -= 1
            write_global(before)
            for name, value in kept.items():
                _take_back(session.declared[name], value)
            for one, state in own:
                _put_back(one, state)

    calm = _Calm(session)

    def track(method: str, *args: Any, **given: Any) -> None:
        session.log({name: plain(value) for name, value in told(method, args, given).items()})

    def calmly(line: int) -> _Calm:
        del line
        return calm

    offer(SHIELD, shield, **{CALM: calmly, TRACK: track})


class _Calm:
    """The shield of a probe that draws nothing: it only says that a probe is at work."""

    __slots__ = ("session",)

    def __init__(self, session: Replayer) -> None:
        self.session = session

    def __enter__(self) -> None:
        self.session.probing += 1

    def __exit__(
        self, kind: object, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception):
            self.session.note_raised(exc, trace)
        self.session.probing -= 1


def _take_back(live: Any, before: Any) -> None:
    if isinstance(live, list):
        live[:] = before
    else:
        vars(live).update(vars(before))


def _state(generator: Any) -> Any:
    """Return the state of a generator that the program holds: Python's, NumPy's or torch's."""
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    for getter in ("getstate", "get_state"):
        if hasattr(generator, getter):
            return copy.deepcopy(getattr(generator, getter)())
    return None


def _put_back(generator: Any, state: Any) -> None:
    if state is None:
        return
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
