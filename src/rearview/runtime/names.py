"""Make what instrumented code calls known to it by name, here and wherever that code is sent.

The names are builtins, so that a program's globals are what it wrote. But joblib, Ray and Dask send
functions of `__main__` to other processes as bytecode, together with the globals that it names. So once
a library is loaded that can do that, the names stand in the globals of instrumented modules too, and
what they stand for is pickled as what plain Python would have done: nothing of Rearview is needed there.
"""

from __future__ import annotations

import builtins
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from rearview.runtime.entropy import after_import
from rearview.source.instrument import HOOK, PARTS, WALK
from rearview.source.shield import CALM, SHIELD, TRACK

_ELSEWHERE = {
    HOOK: (
        "type('loop', (), {"
        "'__call__': lambda self, site, items:"
        " __import__('itertools').repeat(None) if items is None else"
        " map(next, __import__('itertools').repeat(items)),"
        " 'scalar': staticmethod(lambda name, value: None)})()"
    ),
    PARTS: "lambda site, numbers: (numbers,)",
    WALK: (
        "lambda items: items if items is None or type(items) is type(_ for _ in ()) else"
        " map(next, __import__('itertools').repeat(items))"
    ),
    SHIELD: (
        "type('probe', (), {"
        "'__call__': lambda self, *_: __import__('contextlib').nullcontext(),"
        f" {CALM!r}: staticmethod(lambda *_: __import__('contextlib').nullcontext()),"
        f" {TRACK!r}: staticmethod(lambda *_, **__: None)}})()"
    ),
}
"""What each name stands for in a process that is not watched."""

_PICKLERS = ("cloudpickle", "joblib.externals.cloudpickle", "ray.cloudpickle", "dill")
"""Libraries that pickle a function as bytecode."""

_known: dict[str, Any] = {}
_modules: list[weakref.ref[ModuleType]] = []
"""Instrumented modules; their globals are the program's, and end when it forgets them."""
_senders: set[str] = set()
"""Those that are loaded."""


class _Named(partial[Any]):
    """A function that becomes another one, without our help, when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (_ELSEWHERE[self.name],)

    name: str


def install() -> None:
    """Look out for libraries that send functions to other processes."""
    for name in _PICKLERS:
        after_import(name, _send)


def offer(name: str, call: Callable[..., Any], **attributes: Any) -> None:
    """Let instrumented code call `call` by `name`, also code that was loaded before."""
    named = _Named(call)
    vars(named).update(name=name, **attributes)
    lend(name, named)


def lend(name: str, call: Callable[..., Any]) -> None:
    """Let instrumented code call by `name` what can be pickled as it is."""
    _known[name] = builtins.__dict__[name] = call
    if _senders:
        _furnish()


def retire() -> None:
    """Let instrumented code run as under plain Python from now on: modules are about to be torn down.

    What it calls then refers to nothing that may be gone by that time, and stands in the globals of
    the program: Python puts its builtins back before it clears them.
    """
    offer(HOOK, _loop_plainly, scalar=_ignore)
    offer(PARTS, _range_plainly)
    offer(WALK, _walk_plainly)
    _furnish()


def _loop_plainly(_site: str, items: Any, repeat: Callable[[None], Any] = itertools.repeat) -> Any:
    return repeat(None) if items is None else items


def _range_plainly(_site: str, numbers: Any) -> Any:
    return (numbers,)


def _walk_plainly(items: Any) -> Any:
    return items


def _ignore(_name: str, _value: Any) -> None:
    return None


def furnish(module: ModuleType) -> None:
    """Take note of a module that is about to run instrumented code."""
    _modules.append(weakref.ref(module))
    if _senders:
        _furnish()


def _send(library: ModuleType) -> None:
    _senders.add(library.__name__)
    _furnish()


def _furnish() -> None:
    for known in _modules:
        module = known()
        if module is not None:
            vars(module).update(_known)
